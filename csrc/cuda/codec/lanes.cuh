// The codec for many vectors of every length up to 256 that pages can have, every dtype and width: eight lanes share a
// vector and hold it in registers. codec/generic.cuh, which holds a vector in shared memory, is for all other lengths
// and for few vectors; codec/encode_bulk.cuh and codec/encode_step.cu are faster for the lengths that most models use.
// The bytes are the same.
//
// d = m * n channels, n a multiple of 16. Element e of lane l is channel 16 (e / 2) + 2 l + e % 2, so that butterflies
// run in a lane, across lanes and in a lane again, which is their fixed order, and the m x m factor needs registers
// only. Lengths are numbers here and not template parameters: a kernel has room for ROOM elements, and vectors of
// several blocks fill more than half of it. Its loops skip elements that a vector does not have; all lanes agree on
// that.
#pragma once

#include "choices/codec.h"
#include "cuda/codec/generic.cuh"

namespace turboquant::cuda {

constexpr int kVectorLanes = 8;

struct LaneShape {
  int d, blocks;
  int elements, pairs;  // of a lane; pairs of elements of a lane in each block
  float norm;           // 1 / sqrt(n)

  explicit LaneShape(format::Split split)
      : d(split.blocks * split.block), blocks(split.blocks), elements(d / kVectorLanes), pairs(split.block / 16) {
    int log_block = 0;
    while (1 << log_block < split.block) ++log_block;
    norm = block_norm(log_block);
  }
};

// Lanes that share a vector.
__host__ __device__ constexpr int lanes_of(const GenericShape&) { return 32; }
__host__ __device__ constexpr int lanes_of(const LaneShape&) { return kVectorLanes; }

// fn(shape, ROOM) for `count` vectors of d = m * n channels: a LaneShape, or a GenericShape and no room.
template <typename Fn>
void with_vector_shape(format::Split split, int64_t count, Fn&& fn) {
  if (!choices::fits_lanes(split, count)) return fn(GenericShape(split), std::integral_constant<int, 0>{});
  const LaneShape shape(split);
  if (shape.elements <= 8) return fn(shape, std::integral_constant<int, 8>{});
  if (shape.elements <= 16) return fn(shape, std::integral_constant<int, 16>{});
  fn(shape, std::integral_constant<int, 32>{});
}

// The vectors that a block of up to `most_warps` warps has at a time, and the bytes of their shared memory.
struct VectorBlock {
  int vectors, shared_bytes;

  VectorBlock(int d, int lanes, int most_warps) {
    const int words = generic_words(d), groups = 32 / lanes;  // of a warp
    vectors = generic_warps(groups * words, most_warps) * groups, shared_bytes = 4 * vectors * words;
  }
};

// A lane's part of a vector.
template <int ROOM>
struct LaneVector {
  float y[ROOM] = {};

  // fn(e) for the even numbers e of all elements; e is known to the compiler.
  template <typename Fn>
  static __device__ __forceinline__ void for_each_pair(const LaneShape& s, Fn&& fn) {
#pragma unroll
    for (int e = 0; e < ROOM; e += 2) {
      if (e < s.elements) fn(e);
    }
  }
  static __device__ __forceinline__ int channel(int e, int lane) { return 8 * e + 2 * lane; }

  // Loads the vector at `offset` with center, scales and signs (section 5), for the rotation to follow.
  __device__ __forceinline__ void load(const LaneShape& s, const void* x, Dtype dtype, int64_t offset,
                                       const float* signs, const format::Channels& channels, int lane) {
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
    for_each_pair(s, [&](int e) { multiply(e, two(signs, channel(e, lane))); });
  }
  __device__ __forceinline__ void multiply(int e, float2 by) {
    y[e] = __fmul_rn(y[e], by.x), y[e + 1] = __fmul_rn(y[e + 1], by.y);
  }

  // core(y); the factor of section 2, step 2 only if `normed`. All lanes of the warp take part.
  __device__ __forceinline__ void transform(const LaneShape& s, bool normed, int lane) {
    for_each_pair(s, [&](int e) { butterfly(e, e + 1); });
#pragma unroll
    for (int bit = 1; bit < kVectorLanes; bit *= 2) {
      const float side = lane & bit ? -1.0f : 1.0f;  // as in `butterflies`
      for_each_pair(s, [&](int e) {
#pragma unroll
        for (int i = e; i < e + 2; ++i) y[i] = __fmaf_rn(side, y[i], __shfl_xor_sync(0xffffffff, y[i], bit));
      });
    }
    between_pairs<1>(s), between_pairs<2>(s), between_pairs<4>(s), between_pairs<8>(s);
    if (normed) for_each_pair(s, [&](int e) { multiply(e, {s.norm, s.norm}); });
    switch (s.blocks) {
      case 1: return;
      case 3: return mix<3>(s);
      case 5: return mix<5>(s);
      case 7: return mix<7>(s);
      default: return mix<9>(s);
    }
  }

  // tree(y * y), known to all lanes of the vector. All lanes of the warp take part.
  __device__ __forceinline__ float sum_of_squares(const LaneShape& s) const {
    float t[ROOM / 2 + 1] = {};
    for_each_pair(s, [&](int e) {
      float& sum = t[e / 2];
      sum = __fadd_rn(__fmul_rn(y[e], y[e]), __fmul_rn(y[e + 1], y[e + 1]));
#pragma unroll
      for (int bit = 1; bit < kVectorLanes; bit *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffff, sum, bit));
    });
    for (int pairs = s.pairs; pairs > 1; pairs /= 2) {
#pragma unroll
      for (int i = 0; i < ROOM / 4; ++i) t[i] = __fadd_rn(t[2 * i], t[2 * i + 1]);
    }
    float total = t[0];
#pragma unroll
    for (int b = 1; b < 9 && b < ROOM / 2; ++b) {
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
  __device__ __forceinline__ void between_pairs(const LaneShape& s) {
    if constexpr (2 * H < ROOM) {
      if (s.pairs <= H) return;
      for_each_pair(s, [&](int e) {
        if ((e / 2 & H) == 0 && e + 2 * H < ROOM) butterfly(e, e + 2 * H), butterfly(e + 1, e + 2 * H + 1);
      });
    }
  }
  template <int M>
  __device__ __forceinline__ void mix(const LaneShape& s) {
    mix_of<M, 2>(s), mix_of<M, 4>(s), mix_of<M, 8>(s);
  }
  // The m x m factor where a lane has EACH elements of a block.
  template <int M, int EACH>
  __device__ __forceinline__ void mix_of(const LaneShape& s) {
    if constexpr (M * EACH <= ROOM && 2 * M * EACH > ROOM) {  // other vectors have another kernel
      if (2 * s.pairs == EACH) mix_blocks<M, EACH>(y);
    }
  }
};

// ---- Encoding -------------------------------------------------------------------------------------------------------

// A vector as octets of codes, from a byte for each code in shared memory.
struct ByteCodes {
  const uint8_t* bytes;
  uint16_t scale;

  __device__ __forceinline__ Octet octet(int o, Width width) const {
    const uint2 codes = reinterpret_cast<const uint2*>(bytes)[o];
    if (format::levels_are_codes(width)) return {codes.x, codes.y};
    return {nibbles(codes.x) | nibbles(codes.y) << 16, fifth_bits(codes.x) | fifth_bits(codes.y) << 4};
  }

 private:
  // The low nibbles of four bytes, side by side.
  static __device__ __forceinline__ uint32_t nibbles(uint32_t x) {
    x = (x & 0x000F000F) | (x & 0x0F000F00) >> 4;
    return (x & 0xFF) | (x >> 8 & 0xFF00);
  }
  // Bits 4 of four bytes, side by side.
  static __device__ __forceinline__ uint32_t fifth_bits(uint32_t x) { return (x >> 4 & 0x01010101) * 0x10204080 >> 28; }
};

// Encodes a vector (section 5), which load(v) has loaded with its signs; it may be loaded again. bytes: room for its
// codes in shared memory, at a multiple of 8 bytes; the caller synchronises the warp before it reads them. All lanes of
// the warp take part.
template <int ROOM, typename Load>
__device__ __forceinline__ ByteCodes encode_in_lanes(LaneVector<ROOM>& v, Load&& load, const LaneShape& s, int lane,
                                                     const SharedCodebook& shared, const Codebook& book,
                                                     const EncodeConstants& constants, uint8_t* bytes) {
  using Vector = LaneVector<ROOM>;
  v.transform(s, false, lane);
  float squares = v.sum_of_squares(s);
  // A power of two is taken out only where a vector needs it (codec/encode_bulk.cuh says why it changes nothing else).
  int exponent = 0;
  bool finite = true, zero = false;
  if (!__all_sync(0xffffffff, squares >= 0x1p-60f && squares <= 0x1p100f)) {
    uint32_t largest = 0;
    load(v);
    Vector::for_each_pair(s, [&](int e) {
      largest = max(largest, max(magnitude_bits(v.y[e]), magnitude_bits(v.y[e + 1])));
    });
    largest = max_of_lanes<kVectorLanes>(largest);
    finite = largest < kInfinityBits, zero = largest == 0;
    exponent = prescale_exponent(largest);
    const float down = power_of_two(-exponent);
    Vector::for_each_pair(s, [&](int e) {
      v.multiply(e, {down, down});
      if (!finite) v.y[e] = v.y[e + 1] = 0;
    });
    v.transform(s, false, lane);
    squares = v.sum_of_squares(s);  // by all lanes, whether their vectors need it or not
    if (zero || !finite) squares = 1;
  }
  const float length = root(squares), k = zero ? 0.0f : divide(constants.units, length);
  int u[ROOM] = {};
  Vector::for_each_pair(s, [&](int e) {
    u[e] = __float2int_rn(__fmul_rn(v.y[e], k)), u[e + 1] = __float2int_rn(__fmul_rn(v.y[e + 1], k));
  });

  Fit best{0, 0, 0};
  float best_merit = -1;
  uint32_t kept[ROOM / 4] = {};  // magnitudes, a byte each
#pragma unroll 1
  for (int c = 0; c < book.num_steps; ++c) {
    uint32_t packed[ROOM / 4] = {};
    int dot = 0, level_squares = 0;
#pragma unroll
    for (int e = 0; e < ROOM; e += 4) {
      if (e >= s.elements) break;
      int magnitude[4];
      shared.magnitudes<4>(book.width, c, u + e, magnitude);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int level = e + i < s.elements ? shared.level_of(book.width, magnitude[i]) : 0;
        dot += abs(u[e + i]) * level, level_squares += level * level;
        packed[e / 4] |= static_cast<uint32_t>(magnitude[i]) << 8 * i;
      }
    }
    const Fit fit =
        Fit::of_sums(sum_of_lanes<kVectorLanes>(dot), sum_of_lanes<kVectorLanes>(level_squares), shared.step[c]);
    const float merit = fit.merit();
    if (merit > best_merit) {
      best = fit, best_merit = merit;
#pragma unroll
      for (int i = 0; i < ROOM / 4; ++i) kept[i] = packed[i];
    }
  }
  const int half = 1 << (format::num_bits(book.width) - 1);
  const bool signed_bytes = format::levels_are_codes(book.width);
  const auto code_of = [&](int e) {
    const int m = kept[e / 4] >> 8 * (e % 4) & 255;
    const int code = signed_bytes ? (u[e] < 0 ? -m : m) : (u[e] < 0 ? half - 1 - m : half + m);
    return finite ? code & 255 : 0;
  };
  Vector::for_each_pair(s, [&](int e) {
    *reinterpret_cast<uint16_t*>(bytes + Vector::channel(e, lane)) =
        static_cast<uint16_t>(code_of(e) | code_of(e + 1) << 8);
  });
  uint16_t scale = zero ? 0 : best.scale(book.scale_mode, length, exponent, constants);
  if (!finite) scale = format::kNanScale;
  return {bytes, scale};
}

// ---- Decoding -------------------------------------------------------------------------------------------------------

// Rotates the vector that put_generic_octet has left in `y` back and stores it at `offset`, if it exists.
template <int ROOM>
__device__ __forceinline__ void store_from_lanes(const float* y, const LaneShape& s, const float* signs,
                                                 const format::Channels& channels, void* out, Dtype dtype,
                                                 int64_t offset, bool exists, int lane) {
  using Vector = LaneVector<ROOM>;
  Vector v;
  Vector::for_each_pair(s, [&](int e) {
    const float2 pair = *reinterpret_cast<const float2*>(y + Vector::channel(e, lane));
    v.y[e] = pair.x, v.y[e + 1] = pair.y;
  });
  v.transform(s, true, lane);
  if (!exists) return;
  Vector::for_each_pair(s, [&](int e) { v.multiply(e, two(signs, Vector::channel(e, lane))); });
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
