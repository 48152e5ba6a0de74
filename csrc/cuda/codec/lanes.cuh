// The codec for vectors of nearly every length up to 512 that pages can have, every dtype and width: 8, 16 or 32 lanes
// share a vector and hold it in registers. codec/generic.cuh, which holds a vector in shared memory, is for all other
// lengths; codec/encode_bulk.cuh and codec/encode_step.cu are faster for the lengths that most models use. The bytes
// are the same.
//
// d = m * n channels, n a multiple of 2 LANES. Element e of lane l is channel LANES e + 2 l, where e is even, or the
// next one, so that butterflies run in a lane, across lanes and in a lane again, which is their fixed order, and the m
// x m factor needs registers only. Lengths are numbers here and not template parameters: a lane has room for 16
// elements, and loops skip those that a vector does not have; all lanes agree on that.
//
// Candidates of a codebook share a table in shared memory: its words say, for every cell of 16 neighbouring
// coordinates, the magnitudes of the code under eight candidates.
#pragma once

#include "choices/codec.h"
#include "cuda/codec/generic.cuh"

namespace turboquant::cuda {

constexpr int kRoom = choices::kMostElements;  // elements that a lane has room for

// MIXES: lengths may be multiples of 3, 5 or 7. Without, kernels have none of the code for that.
template <int LANES, bool MIXES = true>
struct LaneShape {
  static constexpr int kLanes = LANES;  // that share a vector
  static constexpr bool kMixes = MIXES;
  static constexpr bool kInRegisters = true;

  int d, blocks;
  int elements, pairs;     // of a lane; pairs of its elements in each block
  float norm;              // 1 / sqrt(n)
  bool transforms = true;  // as in GenericShape

  explicit LaneShape(format::Split split)
      : d(split.blocks * split.block), blocks(split.blocks), elements(d / LANES), pairs(split.block / (2 * LANES)),
        norm(block_norm(split)) {}
};

// fn(shape) for vectors of d = m * n channels: a LaneShape or a GenericShape.
template <typename Fn>
void with_vector_shape(format::Split split, Fn&& fn) {
  switch (choices::vector_lanes(split)) {
    case 8: return fn(LaneShape<8>(split));
    case 16: return fn(LaneShape<16>(split));
    case 32: return fn(LaneShape<32>(split));
    default: return fn(GenericShape(split));
  }
}

// The vectors that a block of up to `most_warps` warps has at a time, and the bytes of their shared memory.
struct VectorBlock {
  int vectors, shared_bytes;

  VectorBlock(int d, int lanes, int most_warps) {
    const int words = generic_words(d), groups = 32 / lanes;  // of a warp
    vectors = times_in_block(groups * words, most_warps) * groups, shared_bytes = 4 * vectors * words;
  }
};

// A lane's part of a vector.
template <int LANES, bool MIXES = true>
struct LaneVector {
  using Shape = LaneShape<LANES, MIXES>;

  float y[kRoom] = {};

  // fn(e) for the even numbers e of all elements; e is known to the compiler.
  template <typename Fn>
  static __device__ __forceinline__ void for_each_pair(const Shape& s, Fn&& fn) {
#pragma unroll
    for (int e = 0; e < kRoom; e += 2) {
      if (e < s.elements) fn(e);
    }
  }
  static __device__ __forceinline__ int channel(int e, int lane) { return LANES * e + 2 * lane; }

  // Loads the vector at `offset` with center, scales and signs (section 5), for the rotation to follow. signs: null
  // where there is no transform.
  __device__ __forceinline__ void load(const Shape& s, const void* x, Dtype dtype, int64_t offset, const float* signs,
                                       const format::Channels& channels, int lane) {
    with_float_type(dtype, [&](auto tag) {
      const auto* from = static_cast<const typename decltype(tag)::type*>(x) + offset;
      for_each_pair(s, [&](int e) { load_floats<2>(from + channel(e, lane), y + e); });
    });
    if (channels.center) {
      for_each_pair(s, [&](int e) {
        const float2 c = two(channels.center, channel(e, lane));
        y[e] = __fsub_rn(y[e], c.x), y[e + 1] = __fsub_rn(y[e + 1], c.y);
      });
    }
    if (channels.scale) for_each_pair(s, [&](int e) { multiply(e, two(channels.scale, channel(e, lane))); });
    if (signs) for_each_pair(s, [&](int e) { multiply(e, two(signs, channel(e, lane))); });
  }
  __device__ __forceinline__ void multiply(int e, float2 by) {
    y[e] = __fmul_rn(y[e], by.x), y[e + 1] = __fmul_rn(y[e + 1], by.y);
  }

  // core(y); the factor of section 2, step 2 only if `normed`. All lanes of the warp take part.
  __device__ __forceinline__ void transform(const Shape& s, bool normed, int lane) {
    if (!s.transforms) return;
    for_each_pair(s, [&](int e) { butterfly(e, e + 1); });
#pragma unroll
    for (int bit = 1; bit < LANES; bit *= 2) {
      const float side = lane & bit ? -1.0f : 1.0f;  // as in `butterflies`
      for_each_pair(s, [&](int e) {
#pragma unroll
        for (int i = e; i < e + 2; ++i) y[i] = __fmaf_rn(side, y[i], __shfl_xor_sync(0xffffffff, y[i], bit));
      });
    }
    between_pairs<1>(s), between_pairs<2>(s), between_pairs<4>(s), between_pairs<8>(s);
    if (normed) for_each_pair(s, [&](int e) { multiply(e, {s.norm, s.norm}); });
    if constexpr (!MIXES) return;
    switch (s.blocks) {
      case 1: return;
      case 3: return mix<3>(s);
      case 5: return mix<5>(s);
      case 7: return mix<7>(s);
      default: return mix<9>(s);
    }
  }

  // tree(y * y), known to all lanes of the vector. All lanes of the warp take part.
  __device__ __forceinline__ float sum_of_squares(const Shape& s) const {
    float t[kRoom / 2 + 1] = {};
    for_each_pair(s, [&](int e) {
      float& sum = t[e / 2];
      sum = __fadd_rn(__fmul_rn(y[e], y[e]), __fmul_rn(y[e + 1], y[e + 1]));
#pragma unroll
      for (int bit = 1; bit < LANES; bit *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffff, sum, bit));
    });
    for (int pairs = s.pairs; pairs > 1; pairs /= 2) {
#pragma unroll
      for (int i = 0; i < kRoom / 4; ++i) t[i] = __fadd_rn(t[2 * i], t[2 * i + 1]);
    }
    float total = t[0];
#pragma unroll
    for (int b = 1; MIXES && b < 9 && b < kRoom / 2; ++b) {
      if (b < s.blocks) total = __fadd_rn(total, t[b]);
    }
    return total;
  }

 private:
  __device__ __forceinline__ void butterfly(int i, int j) {
    const float p = y[i], q = y[j];
    y[i] = __fadd_rn(p, q), y[j] = __fsub_rn(p, q);
  }
  // Butterflies between pairs of a block that are H pairs apart.
  template <int H>
  __device__ __forceinline__ void between_pairs(const Shape& s) {
    if constexpr (2 * H < kRoom) {
      if (s.pairs <= H) return;
      for_each_pair(s, [&](int e) {
        if ((e / 2 & H) == 0 && e + 2 * H < kRoom) butterfly(e, e + 2 * H), butterfly(e + 1, e + 2 * H + 1);
      });
    }
  }
  template <int M>
  __device__ __forceinline__ void mix(const Shape& s) {
    mix_of<M, 2>(s), mix_of<M, 4>(s), mix_of<M, 8>(s);
  }
  // The m x m factor where a lane has EACH elements of a block.
  template <int M, int EACH>
  __device__ __forceinline__ void mix_of(const Shape& s) {
    if constexpr (M * EACH <= kRoom) {
      if (2 * s.pairs == EACH) mix_blocks<M, EACH>(y);
    }
  }
};

// ---- Encoding -------------------------------------------------------------------------------------------------------

// The magnitudes of coordinates under up to eight candidates: nibble s of a word belongs to candidate s. A word is for
// a cell of neighbouring coordinates, which no boundary separates.
struct CandidateTable {
  static constexpr int kMost = 8;

  uint32_t* words;   // in shared memory
  uint32_t* levels;  // of fill_level_bytes, at a multiple of 16 bytes
  int reach;         // more than the cells on one side of zero that vectors have
  int last = 0;      // the cell of the greatest boundary: coordinates of later cells have its magnitudes

  // Words of shared memory for vectors of d channels, a multiple of 4.
  static __host__ __device__ constexpr int room(int d) { return choices::encode_table_reach(d) + 4; }
  __device__ __forceinline__ CandidateTable(uint32_t* memory, int d)
      : words(memory + 4), levels(memory), reach(choices::encode_table_reach(d)) {}

  // Fills the table from candidate `first` on. By the first `threads` threads of the block, which synchronise before
  // and after. No table is needed for codes of 8 bits.
  __device__ __forceinline__ void fill(const SharedCodebook& book, const Codebook& of, int first, int threads) {
    const Width width = of.width;
    if (format::levels_are_codes(width)) return;
    const int steps = min(of.num_steps - first, kMost);
    const int inner = (1 << (format::num_bits(width) - 1)) - 1;
    fill_level_bytes(levels, book, threadIdx.x);
    const auto boundary = [&](int s, int m) { return book.boundary[first + (s < steps ? s : 0)][m]; };
    last = 0;
#pragma unroll
    for (int s = 0; s < kMost; ++s) last = inner > 0 ? max(last, boundary(s, inner - 1)) : 0;
    last = min(last, reach - 1);
#pragma unroll 1
    for (int cell = threadIdx.x; cell <= last; cell += threads) {
      int magnitude[kMost] = {};
#pragma unroll 1
      for (int step = (inner + 1) / 2; step > 0; step /= 2) {
#pragma unroll
        for (int s = 0; s < kMost; ++s) {
          if (boundary(s, magnitude[s] + step - 1) <= cell) magnitude[s] += step;
        }
      }
      uint32_t word = 0;
#pragma unroll
      for (int s = 0; s < kMost; ++s) word |= magnitude[s] << 4 * s;
      words[cell] = word;
    }
  }

  __device__ __forceinline__ uint32_t operator[](int u) const {
    return words[min(static_cast<int>(static_cast<unsigned>(u ^ u >> 31) / format::kTableGrain), last)];
  }
};

// The best candidate of a vector so far, and the magnitudes of a lane's elements under it, a nibble each.
struct LaneFit {
  Fit fit{0, 0, 0};
  float merit = -1;
  uint32_t magnitudes[kRoom / 8];
};

// Tries the candidates of a table. u: a lane's coordinates; first: the number of the first candidate. All lanes of the
// warp take part.
template <bool WIDE, class Shape>
__device__ __forceinline__ void try_candidates(const int (&u)[kRoom], const Shape& s, int lane,
                                               const CandidateTable& table, const SharedCodebook& book, int first,
                                               int steps, LaneFit& best) {
  constexpr int kMost = CandidateTable::kMost;
  const uint4 levels = *reinterpret_cast<const uint4*>(table.levels);
  uint32_t dot[kMost] = {}, square[kMost] = {}, above = 0;
  uint32_t pairs[2][kRoom / 2];  // two elements' nibbles in each byte, for the candidates of even and of odd numbers
#pragma unroll
  for (int e = 0; e < kRoom; e += 4) {
    pairs[0][e / 2] = pairs[0][e / 2 + 1] = pairs[1][e / 2] = pairs[1][e / 2 + 1] = 0;
    if (e >= s.elements) continue;
#pragma unroll
    for (int i = e; i < e + 4; i += 2) {
      const uint32_t one = table[u[i]], other = table[u[i + 1]];
      pairs[0][i / 2] = select_bits(0x0F0F0F0F, one, other << 4);
      pairs[1][i / 2] = select_bits(0x0F0F0F0F, one >> 4, other);
    }
    const uint32_t size[4] = {static_cast<uint32_t>(abs(u[e])), static_cast<uint32_t>(abs(u[e + 1])),
                              static_cast<uint32_t>(abs(u[e + 2])), static_cast<uint32_t>(abs(u[e + 3]))};
    above |= size[0] | size[1] | size[2] | size[3];
    const uint32_t low = select_bytes(size[0], size[1], 0x5410), high = select_bytes(size[2], size[3], 0x5410);
#pragma unroll
    for (int c = 0; c < kMost; ++c) {
      if (c > 0 && steps == 1) break;
      // The upper half of this word belongs to another candidate.
      const uint32_t nibbles = select_bytes(pairs[c % 2][e / 2], pairs[c % 2][e / 2 + 1], c < 4 ? 0x5140 : 0x7362);
      const uint32_t level =
          levels_of_nibbles<WIDE>(levels.x, levels.y, levels.z, levels.w, c & 2 ? nibbles >> 16 : nibbles);
      square[c] = __dp4a(level, level, square[c]);
      dot[c] = __dp2a_lo(low, level, dot[c]);
      dot[c] = __dp2a_hi(high, level, dot[c]);
    }
  }
  if (s.elements % 4) {  // The last two of the elements above were none, but had levels.
    const uint32_t none = table[0];
#pragma unroll
    for (int c = 0; c < kMost; ++c) {
      const int level = book.level[none >> 4 * c & 15];
      square[c] -= 2 * level * level;
    }
  }
  if (above >> 16) {  // Rare: a coordinate has more than the 16 bits that were multiplied.
#pragma unroll 1
    for (int e = 0; e < s.elements; ++e) {
      int one = 0;
#pragma unroll
      for (int i = 0; i < kRoom; ++i) one = i == e ? u[i] : one;
      const uint32_t entry = table[one], rest = abs(one) & ~0xFFFF;
#pragma unroll
      for (int c = 0; c < kMost; ++c) dot[c] += rest * static_cast<uint32_t>(book.level[entry >> 4 * c & 15]);
    }
  }

  // Each of eight lanes gets the sums of one candidate over these lanes; those of other eights are added.
  divide_candidates<kMost>(dot, square, lane);
#pragma unroll
  for (int bit = kMost; bit < Shape::kLanes; bit *= 2) {
    dot[0] += __shfl_xor_sync(0xffffffff, dot[0], bit), square[0] += __shfl_xor_sync(0xffffffff, square[0], bit);
  }
  int own = lane % kMost;
  Fit fit = Fit::of_sums(static_cast<int>(dot[0]), static_cast<int>(square[0]), book.step[first + min(own, steps - 1)]);
  float merit = own >= steps ? -1 : fit.a > 0 ? divide(__fmul_rn(fit.a, fit.a), fit.b) : 0;
#pragma unroll
  for (int bit = 1; bit < kMost; bit *= 2) {
    const float merit_there = __shfl_xor_sync(0xffffffff, merit, bit);
    const int own_there = __shfl_xor_sync(0xffffffff, own, bit);
    const Fit there{__shfl_xor_sync(0xffffffff, fit.a, bit), __shfl_xor_sync(0xffffffff, fit.b, bit),
                    __shfl_xor_sync(0xffffffff, fit.step, bit)};
    if (merit_there > merit || (merit_there == merit && own_there < own)) {  // of equal candidates, the first wins
      merit = merit_there, own = own_there, fit = there;
    }
  }
  if (!(merit > best.merit)) return;
  best.fit = fit, best.merit = merit;
  const uint32_t bytes = 0x40 + own / 2 * 0x11;  // the candidate's byte of each of two words
#pragma unroll
  for (int e = 0; e < kRoom; e += 8) {
    uint32_t of[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) of[j] = own % 2 ? pairs[1][e / 2 + j] : pairs[0][e / 2 + j];
    best.magnitudes[e / 8] = select_bytes(select_bytes(of[0], of[1], bytes), select_bytes(of[2], of[3], bytes), 0x5410);
  }
}

// Leaves a lane's codes of up to five bits in a row of octets. finite: otherwise codes are zero.
template <class Shape>
__device__ __forceinline__ void put_codes(const int (&u)[kRoom], const uint32_t (&magnitudes)[kRoom / 8],
                                          const Shape& s, int lane, Width width, bool finite, uint32_t* row) {
  const uint32_t half = 1u << (format::num_bits(width) - 1);
  const uint32_t ones = ((half - 1) & 15) * 0x11111111, top = (half & 15) * 0x11111111;
#pragma unroll
  for (int e = 0; e < kRoom; e += 8) {
    if (e >= s.elements) break;
    uint32_t negative = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) negative |= (u[e + i] >> 31) & 15u << 4 * i;
    // A positive code is half + m, a negative one half - 1 - m.
    const uint32_t codes = finite ? magnitudes[e / 8] ^ (negative & ones) ^ (~negative & top) : 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (e + 2 * j < s.elements) {
        reinterpret_cast<uint8_t*>(row)[Shape::kLanes / 2 * (e + 2 * j) + lane] = static_cast<uint8_t>(codes >> 8 * j);
      }
    }
    if (format::fits_nibble(width)) continue;
    // The fifth bits of an octet are those of four lanes, two bits each.
    const uint32_t positive = finite ? ~negative : 0;
    uint32_t high = ((positive & 0x01010101) | (positive >> 3 & 0x02020202)) << 2 * (lane % 4);
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2) high |= __shfl_xor_sync(0xffffffff, high, bit);
    const int mine = lane % 4, octet = (Shape::kLanes * (e + 2 * mine) + 2 * (lane & ~3)) / 8;
    if (e + 2 * mine < s.elements) row[s.d / 8 + octet] = high >> 8 * mine & 255;
  }
}

// The same for codes of 8 bits under the best of all candidates; returns its fit. All lanes of the warp take part.
template <class Shape>
__device__ __forceinline__ Fit put_byte_codes(const int (&u)[kRoom], const Shape& s, int lane,
                                              const SharedCodebook& book, int steps, bool finite, uint32_t* row) {
  Fit best{0, 0, 0};
  float best_merit = -1;
  int kept = 0;
#pragma unroll 1
  for (int c = 0; c < steps; ++c) {
    const ByteSteps exact(book.step[c]);
    int dot = 0, squares = 0;
#pragma unroll
    for (int e = 0; e < kRoom; ++e) {
      if (e >= s.elements) break;
      const int level = static_cast<int>(exact.magnitude(static_cast<float>(u[e]) + 0.5f));
      dot += abs(u[e]) * level, squares += level * level;
    }
    const Fit fit = Fit::of_sums(sum_of_lanes<Shape::kLanes>(dot), sum_of_lanes<Shape::kLanes>(squares), book.step[c]);
    const float merit = fit.a > 0 ? divide(__fmul_rn(fit.a, fit.a), fit.b) : 0;
    if (merit > best_merit) best = fit, best_merit = merit, kept = c;
  }
  const ByteSteps exact(book.step[kept]);
#pragma unroll
  for (int e = 0; e < kRoom; e += 2) {
    if (e >= s.elements) break;
    uint32_t codes = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int m = static_cast<int>(exact.magnitude(static_cast<float>(u[e + i]) + 0.5f));
      codes |= ((u[e + i] < 0 ? -m : m) & 255) << 8 * i;
    }
    // An octet is four codes in each of two words.
    const int channel = LaneVector<Shape::kLanes>::channel(e, lane), octet = channel / 8, place = channel % 8;
    uint8_t* word = reinterpret_cast<uint8_t*>(row + octet + (place < 4 ? 0 : s.d / 8)) + place % 4;
    *reinterpret_cast<uint16_t*>(word) = static_cast<uint16_t>(finite ? codes : 0);
  }
  return best;
}

// Encodes a vector (section 5), which load(v) has loaded with its signs; it may be loaded again. Leaves its octets in
// `row` (codec/record.cuh), which the caller reads behind a barrier, and returns its scale. table: filled with the
// first candidates. threads: those of the block that take part, which are all that have not ended.
template <class Vector, typename Load>
__device__ __forceinline__ uint16_t encode_in_lanes(Vector& v, Load&& load, const typename Vector::Shape& s, int lane,
                                                    const SharedCodebook& shared, CandidateTable& table, int threads,
                                                    const Codebook& book, const EncodeConstants& constants,
                                                    uint32_t* row) {
  int exponent = 0;
  bool finite = true, zero = false;
  float squares;
#pragma unroll 1
  for (bool again = false;; again = true) {
    v.transform(s, false, lane);
    squares = v.sum_of_squares(s);
    if (again || __all_sync(0xffffffff, squares >= 0x1p-60f && squares <= 0x1p100f)) break;
    // A power of two is taken out only where a vector needs it (codec/encode_bulk.cuh says why it changes nothing
    // else). All vectors of the warp take part, whether they need it or not.
    load(v);
    uint32_t largest = 0;
    Vector::for_each_pair(s, [&](int e) {
      largest = max(largest, max(magnitude_bits(v.y[e]), magnitude_bits(v.y[e + 1])));
    });
    largest = max_of_lanes<Vector::Shape::kLanes>(largest);
    finite = largest < kInfinityBits, zero = largest == 0;
    exponent = prescale_exponent(largest);
    const float down = power_of_two(-exponent);
    Vector::for_each_pair(s, [&](int e) {
      v.multiply(e, {down, down});
      if (!finite) v.y[e] = v.y[e + 1] = 0;
    });
  }
  if (zero || !finite) squares = 1;
  const float length = root(squares), k = zero ? 0.0f : divide(constants.units, length);
  int u[kRoom] = {};
  Vector::for_each_pair(s, [&](int e) {
    u[e] = __float2int_rn(__fmul_rn(v.y[e], k)), u[e + 1] = __float2int_rn(__fmul_rn(v.y[e + 1], k));
  });

  Fit fit{0, 0, 0};
  if (format::levels_are_codes(book.width)) {
    fit = put_byte_codes(u, s, lane, shared, book.num_steps, finite, row);
  } else {
    LaneFit best;
#pragma unroll 1
    for (int first = 0; first < book.num_steps; first += CandidateTable::kMost) {
      const int steps = min(book.num_steps - first, CandidateTable::kMost);
      if (book.num_steps > CandidateTable::kMost) {
        __syncthreads();
        table.fill(shared, book, first, threads);
        __syncthreads();
      }
      if (format::fits_nibble(book.width)) {
        try_candidates<false>(u, s, lane, table, shared, first, steps, best);
      } else {
        try_candidates<true>(u, s, lane, table, shared, first, steps, best);
      }
    }
    fit = best.fit;
    put_codes(u, best.magnitudes, s, lane, book.width, finite, row);
  }
  uint16_t scale = zero ? 0 : fit.scale(book.scale_mode, length, exponent, constants);
  return finite ? scale : format::kNanScale;
}

// ---- Decoding -------------------------------------------------------------------------------------------------------

// Rotates the vector that put_generic_octet has left in `y` back and stores it at `offset`, if it exists. signs: null
// where there is no transform.
template <class Shape>
__device__ __forceinline__ void store_from_lanes(const float* y, const Shape& s, const float* signs,
                                                 const format::Channels& channels, void* out, Dtype dtype,
                                                 int64_t offset, bool exists, int lane) {
  using Vector = LaneVector<Shape::kLanes, Shape::kMixes>;
  Vector v;
  Vector::for_each_pair(s, [&](int e) {
    const float2 pair = *reinterpret_cast<const float2*>(y + Vector::channel(e, lane));
    v.y[e] = pair.x, v.y[e + 1] = pair.y;
  });
  v.transform(s, true, lane);
  if (!exists) return;
  if (signs) Vector::for_each_pair(s, [&](int e) { v.multiply(e, two(signs, Vector::channel(e, lane))); });
  if (channels.inverse) {
    Vector::for_each_pair(s, [&](int e) { v.multiply(e, two(channels.inverse, Vector::channel(e, lane))); });
  }
  if (channels.center) {
    Vector::for_each_pair(s, [&](int e) {
      const float2 c = two(channels.center, Vector::channel(e, lane));
      v.y[e] = __fadd_rn(v.y[e], c.x), v.y[e + 1] = __fadd_rn(v.y[e + 1], c.y);
    });
  }
  with_float_type(dtype, [&](auto tag) {
    auto* to = static_cast<typename decltype(tag)::type*>(out) + offset;
    Vector::for_each_pair(s, [&](int e) { store_floats<2>(v.y + e, to + Vector::channel(e, lane)); });
  });
}

}  // namespace turboquant::cuda
