// Encoding of many vectors: 32 lanes of a warp, 32 vectors (or 16, 8, .. where one is too long for a lane's registers), and
// tables in shared memory instead of arithmetic for what a coordinate becomes. The bytes are those of codec.cuh.
//
// An encoder that keeps up with memory has some twenty instructions for a channel, so each step has its trick:
//
// * A lane holds neighbouring channels, all of them up to 128: no shuffles, and what is done once per vector is done once.
// * A power of two in front of a vector changes no code. So vectors are scaled (format.md section 5, step 3) only when their
//   squares would leave a safe range; that also finds zeros, infinities and NaN. Terms that the two ways round differently are
//   2^-66 of the length and could show only through several nested ties.
// * Integers live as subnormal floats: x * 2^-149 rounds to the nearest integer, ties to even, and leaves |u| in the low bits
//   with the sign on top. A product with 2^-4 that rounds down, plus the table's start, is the place of cell u >> 4 in the table.
// * An entry for every cell that a coordinate can reach holds the code at the top, where a funnel shift takes it, and the level's
//   magnitude at the bottom: sums of |u| * entry and entry^2 are right in their low bits.
// * The search for the step does not try the candidates one by one. The boundaries of all of them, sorted, divide the magnitudes
//   into bins; a vector adds up count and sum of |u| of each bin, and every candidate's sums follow from those.
#pragma once

#include "codec.cuh"

namespace turboquant::cuda {

// ---- Vectors in lanes -------------------------------------------------------------------------------------------------

// At most 192 channels in a lane, which are neighbours: the m blocks of a vector lie in one lane, or it has one block.
constexpr int tile_lanes(int m, int log_n) {
  int lanes = 1;
  while ((m << log_n) / lanes > (m > 1 ? 192 : 128)) lanes *= 2;
  return lanes;
}

template <int M, int LOG_N>
using TileTraits = HadamardTraits<M, LOG_N, tile_lanes(M, LOG_N), (1 << LOG_N) / tile_lanes(M, LOG_N)>;

// ---- Staged vectors ---------------------------------------------------------------------------------------------------

// Words of a lane's row in shared memory, such that 16-byte accesses of eight neighbouring lanes meet different banks.
template <typename Traits>
__host__ __device__ constexpr int stage_stride(int element_size) {
  return (Traits::kPerLane * element_size / 4 + 3) / 8 * 8 + 4;
}

// 16 bytes from global to shared memory that arrive while the warp goes on, where the device can do that.
__device__ __forceinline__ void copy_16(uint32_t* to, const uint8_t* from) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))), "l"(from)
               : "memory");
#else
  *reinterpret_cast<uint4*>(to) = __ldg(reinterpret_cast<const uint4*>(from));
#endif
}
__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
  __syncwarp();
}

// Starts copying `count` vectors, 32 / kLanes at most, row_stride bytes apart, neighbouring lanes neighbouring bytes.
template <typename Traits, int ELEMENT_SIZE>
__device__ __forceinline__ void stage_vectors(uint32_t* stage, const uint8_t* first, int64_t row_stride, int count, int lane) {
  constexpr int vectors = 32 / Traits::kLanes, chunks = Traits::kDim * ELEMENT_SIZE / 16;  // 16 bytes each
  constexpr int per_lane = chunks / Traits::kLanes, stride = stage_stride<Traits>(ELEMENT_SIZE);
  const auto place = [&](int v, int c) { return stage + (v * Traits::kLanes + c / per_lane) * stride + c % per_lane * 4; };
  if constexpr (32 % chunks == 0) {  // whole rows at a time
    constexpr int rows = 32 / chunks;
    const int v = lane / chunks, c = lane % chunks;
    const uint8_t* from = first + v * row_stride + c * 16;
    uint32_t* to = place(v, c);
    const int64_t step = rows * row_stride;
    if (count >= vectors) {
#pragma unroll
      for (int k = 0; k < vectors / rows; ++k) {
        copy_16(to + k * rows * Traits::kLanes * stride, from);
        from += step;
        asm volatile("" : "+l"(from));  // one addition after the other is cheaper than what compilers make of it
      }
    } else {
#pragma unroll 1
      for (int k = 0; k * rows + v < count; ++k) copy_16(to + k * rows * Traits::kLanes * stride, from + k * step);
    }
  } else {
#pragma unroll 4
    for (int i = lane; i < vectors * chunks; i += 32) {
      const int v = i / chunks, c = i % chunks;
      if (v < count) copy_16(place(v, c), first + v * row_stride + c * 16);
    }
  }
}

// ---- Signs ------------------------------------------------------------------------------------------------------------

// Sign bits of the channels in the order of a lane's registers, a row for each lane of a vector.
template <typename Traits>
struct SignRows {
  static constexpr int kStride = Traits::kPerLane + 4;
  static constexpr int kWords = Traits::kLanes * kStride;

  static __device__ __forceinline__ void fill(uint32_t* rows, const float* signs, int thread, int threads) {
    for (int i = thread; i < Traits::kDim; i += threads) {
      const int lane = i / Traits::kPerLane, k = i % Traits::kPerLane;
      const int channel = Traits::channel(lane, k / Traits::kVec) + k % Traits::kVec;
      rows[lane * kStride + k] = __float_as_uint(signs[channel]) & 0x80000000;
    }
  }
};

// A lane's staged channels as float32 with their signs.
template <typename Traits, typename T>
__device__ __forceinline__ void read_staged(const uint32_t* row, const uint32_t* sign_row, float (&y)[Traits::kPerLane]) {
  constexpr int per_word = 4 / sizeof(T), per_chunk = 16 / sizeof(T);
#pragma unroll
  for (int i = 0; i < Traits::kPerLane; i += per_chunk) {
    const uint4 chunk = *reinterpret_cast<const uint4*>(row + i / per_word);
    const uint32_t word[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
    uint32_t sign[per_chunk];
#pragma unroll
    for (int k = 0; k < per_chunk; k += 4) {
      const uint4 s = *reinterpret_cast<const uint4*>(sign_row + i + k);
      sign[k] = s.x, sign[k + 1] = s.y, sign[k + 2] = s.z, sign[k + 3] = s.w;
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if constexpr (std::is_same_v<T, float>) {
        y[i + k] = __uint_as_float(word[k] ^ sign[k]);
      } else if constexpr (std::is_same_v<T, __half>) {
        const float2 pair = __half22float2(reinterpret_cast<const __half2&>(word[k]));
        y[i + 2 * k] = __uint_as_float(__float_as_uint(pair.x) ^ sign[2 * k]);
        y[i + 2 * k + 1] = __uint_as_float(__float_as_uint(pair.y) ^ sign[2 * k + 1]);
      } else {  // a sign bit is added, which flips it
        y[i + 2 * k] = __uint_as_float(word[k] * 65536u + sign[2 * k]);
        y[i + 2 * k + 1] = __uint_as_float((word[k] & 0xFFFF0000) ^ sign[2 * k + 1]);
      }
    }
  }
}

// The same for a center: -(a - b) = (-a) - (-b).
template <typename Traits>
__device__ __forceinline__ void subtract_center(const float* center, const uint32_t* sign_row, int part,
                                                float (&y)[Traits::kPerLane]) {
#pragma unroll
  for (int i = 0; i < Traits::kPerLane; i += 4) {
    const float4 c = __ldg(reinterpret_cast<const float4*>(center + Traits::channel(part, i / Traits::kVec) + i % Traits::kVec));
    const uint4 s = *reinterpret_cast<const uint4*>(sign_row + i);
    y[i] = __fsub_rn(y[i], __uint_as_float(__float_as_uint(c.x) ^ s.x));
    y[i + 1] = __fsub_rn(y[i + 1], __uint_as_float(__float_as_uint(c.y) ^ s.y));
    y[i + 2] = __fsub_rn(y[i + 2], __uint_as_float(__float_as_uint(c.z) ^ s.z));
    y[i + 3] = __fsub_rn(y[i + 3], __uint_as_float(__float_as_uint(c.w) ^ s.w));
  }
}

// ---- Tables -----------------------------------------------------------------------------------------------------------

// Cells u >> 4 on either side of zero that a vector can reach: |u| <= 4096 sqrt(d), rounding aside.
constexpr int table_reach(int d) {
  int reach = 0;
  while (reach * reach < 65536 * d) ++reach;  // 256 sqrt(d)
  return reach + 2;
}

// What a vector makes of a codebook in shared memory. All tables are indexed by the cell, from -reach (near tables: -kNear).
struct TilePlan {
  static constexpr int kNear = 1024;     // cells on either side, 4 sigma: beyond all boundaries of sensible steps
  static constexpr int kMostBins = 256;  // the number of a bin is a byte
  int reach, steps, inner;  // inner: positive boundaries of a candidate
  bool search;

  __host__ __device__ constexpr TilePlan(int d, const Codebook& book, bool several)
      : reach(table_reach(d)), steps(book.num_steps), inner((1 << (book.bits - 1)) - 1), search(several) {}

  // Words. No search: entries. Search: bins of cells (uint8), codes of near cells (uint8, without the fifth bit) of each candidate,
  // and four words for every boundary: where the bins above it begin, and by how much the level and its square grow there.
  __host__ __device__ constexpr int bins() const { return steps * inner + 1; }
  __host__ __device__ constexpr int bin_words() const { return (2 * reach / 4 + 4) & ~3; }
  __host__ __device__ constexpr int code_words() const { return steps * 2 * kNear / 4; }
  __host__ __device__ constexpr int words() const {
    return ((search ? bin_words() + code_words() + 4 * steps * inner : 2 * reach) + 3) & ~3;
  }
  // Words of a warp: count and sum of every bin of every lane.
  __host__ __device__ constexpr int bin_sum_words() const { return search ? 32 * bins() : 0; }
};

// Fills a plan's tables from the codebook's boundaries; the caller has synchronised before and does so again.
__device__ __forceinline__ void fill_tables(uint32_t* tables, const TilePlan& plan, const SharedCodebook& book, int thread,
                                            int threads) {
  const int half = plan.inner + 1, total = plan.steps * plan.inner;
  const auto code_of = [&](int s, int cell) {
    const int positive = cell ^ cell >> 31;
    int magnitude = 0;
    for (int j = 0; j < plan.inner; ++j) magnitude += book.boundary[s * plan.inner + j] <= positive;
    return cell < 0 ? half - 1 - magnitude : half + magnitude;
  };
  if (!plan.search) {
    for (int i = thread; i < 2 * plan.reach; i += threads) {
      const int code = code_of(0, i - plan.reach), magnitude = code < half ? half - 1 - code : code - half;
      tables[i] = static_cast<uint32_t>(code & 15) << 28 | book.level[magnitude];
    }
    return;
  }
  uint8_t* bin = reinterpret_cast<uint8_t*>(tables);
  for (int i = thread; i < 2 * plan.reach; i += threads) {
    const int cell = i - plan.reach, positive = cell ^ cell >> 31;
    int below = 0;
    for (int j = 0; j < total; ++j) below += book.boundary[j] <= positive;
    bin[i] = static_cast<uint8_t>(below);
  }
  uint8_t* code = reinterpret_cast<uint8_t*>(tables + plan.bin_words());
  for (int i = thread; i < plan.steps * 2 * TilePlan::kNear; i += threads) {
    code[i] = code_of(i / (2 * TilePlan::kNear), i % (2 * TilePlan::kNear) - TilePlan::kNear) & 15;
  }
  int4* growth = reinterpret_cast<int4*>(tables + plan.bin_words() + plan.code_words());
  for (int i = thread; i < total; i += threads) {
    int below = 0;
    for (int j = 0; j < total; ++j) below += book.boundary[j] <= book.boundary[i];
    const int level = book.level[i % plan.inner], next = book.level[i % plan.inner + 1];
    growth[i] = {32 * below, next - level, next * next - level * level, 0};
  }
}

// ---- Encoding ---------------------------------------------------------------------------------------------------------

// Sum of squares of N channels over neighbouring pairs (format.md section 5, step 4), depth first: few live registers.
template <int N>
__device__ __forceinline__ float square_tree(const float* y) {
  if constexpr (N == 1) return __fmul_rn(y[0], y[0]);
  else return __fadd_rn(square_tree<N / 2>(y), square_tree<N / 2>(y + N / 2));
}

// Over the lanes of a vector, its blocks in order.
template <typename Traits>
__device__ __forceinline__ float sum_of_squares(const float (&y)[Traits::kPerLane]) {
  static_assert(Traits::kChunks == 1);
  float total = 0;
#pragma unroll
  for (int b = 0; b < Traits::kBlocks; ++b) {
    float t = square_tree<Traits::kVec>(y + b * Traits::kVec);
#pragma unroll
    for (int bit = 1; bit < Traits::kLanes; bit *= 2) t = __fadd_rn(t, __shfl_xor_sync(0xffffffff, t, bit));
    total = b ? __fadd_rn(total, t) : t;
  }
  return total;
}

// A rotated vector: y in the lanes' registers, its length, and the power of two that was taken out.
struct Rotated {
  float length;
  int exponent;
  bool finite;  // else y is zero
};

// read(y): what the vector was stored as, signs applied.
template <typename Traits, typename Read>
__device__ __forceinline__ Rotated rotate_vector(float (&y)[Traits::kPerLane], int part, Read&& read) {
  Rotated v{0, 0, true};
  bool scaled = false;
#pragma unroll 1
  while (true) {
    read(y);
    if (scaled) {  // rare
      uint32_t largest = 0;
#pragma unroll
      for (int i = 0; i < Traits::kPerLane; ++i) largest = max(largest, __float_as_uint(y[i]) & 0x7FFFFFFF);
      largest = group_max<Traits::kLanes>(largest);
      v.finite = largest < 0x7F800000;
      v.exponent = min(max(static_cast<int>(largest >> 23) - 127, -100), 100);
      const float down = power_of_two(-v.exponent);
#pragma unroll
      for (int i = 0; i < Traits::kPerLane; ++i) y[i] = v.finite ? __fmul_rn(y[i], down) : 0.0f;
    }
    transform_unscaled<Traits>(y, part);
    const float squares = sum_of_squares<Traits>(y);
    v.length = __fsqrt_rn(squares);
    if (scaled || __all_sync(0xffffffff, squares >= 0x1p-60f && squares <= 0x1p100f)) return v;
    scaled = true;
  }
}

// Rounds to the nearest integer, as a subnormal float.
__device__ __forceinline__ float subnormal_integer(float x) { return __fmul_rn(x, 0x1p-149f); }

// The cell of such an integer, u >> 4, plus `start` (a subnormal integer).
__device__ __forceinline__ float subnormal_cell(float u, float start) { return __fmaf_rd(u, 0.0625f, start); }

// What a warp needs to encode with a codebook.
struct TableBook {
  const SharedCodebook* book;
  const uint32_t* tables;
  int bits, mode;
};

// A lane's codes as octets; the fifth bits on their own.
template <typename Traits>
struct LaneOctets {
  static constexpr int kCount = Traits::kPerLane / 8;
  uint32_t low[kCount], high[kCount];
};

// The fifth bit of a code is the sign of its coordinate, whatever the candidate. negative(i): a float with the sign of
// coordinate i, zeros being positive.
template <typename Traits, typename Negative>
__device__ __forceinline__ void add_fifth_bits(LaneOctets<Traits>& octets, Negative&& negative) {
#pragma unroll
  for (int o = 0; o < octets.kCount; ++o) {
    uint32_t signs = 0;
#pragma unroll
    for (int i = 7; i >= 0; --i) signs = __funnelshift_l(__float_as_uint(negative(8 * o + i)), signs, 1);
    octets.high[o] = signs ^ 255;
  }
}

// One candidate: codes and sums in one pass.
template <typename Traits>
__device__ __forceinline__ Fit encode_single(const float (&y)[Traits::kPerLane], float k, const TableBook& with,
                                             LaneOctets<Traits>& octets) {
  const float start = __uint_as_float(table_reach(Traits::kDim));
  uint32_t dot = 0, square = 0;
#pragma unroll
  for (int o = 0; o < octets.kCount; ++o) {
    octets.low[o] = 0;
#pragma unroll
    for (int i = 7; i >= 0; --i) {
      const float u = subnormal_integer(__fmul_rn(y[8 * o + i], k));
      const uint32_t entry = with.tables[__float_as_uint(subnormal_cell(u, start))];
      octets.low[o] = __funnelshift_l(entry, octets.low[o], 4);
      dot += __float_as_uint(u) * entry;
      square += entry * entry;
    }
  }
  if (with.bits == 5) add_fifth_bits<Traits>(octets, [&](int i) { return __fadd_rn(__fmul_rn(y[i], k), 0.5f); });
  constexpr uint32_t exact = (1u << 28) - 1;  // the bits below the codes
  return Fit::of_sums(group_sum<Traits::kLanes>(dot & exact), group_sum<Traits::kLanes>(square & exact), with.book->step[0]);
}

// Boundaries beyond the near tables: nothing is looked up.
__device__ __noinline__ uint32_t far_code(const SharedCodebook* book, int inner, int s, int cell) {
  const int positive = cell ^ cell >> 31;
  int magnitude = 0;
  for (int j = 0; j < inner; ++j) magnitude += book->boundary[s * inner + j] <= positive;
  return (cell < 0 ? inner - magnitude : inner + 1 + magnitude) & 15;
}

// Several candidates. y becomes subnormal integers. sums: this lane's bins, 32 words apart, zeros before.
template <typename Traits>
__device__ __forceinline__ Fit encode_search(float (&y)[Traits::kPerLane], float k, const TableBook& with, const TilePlan& plan,
                                             bool near, uint32_t* sums, LaneOctets<Traits>& octets) {
  constexpr uint32_t sum_bits = 23, sum_mask = (1u << sum_bits) - 1;
  const SharedCodebook& book = *with.book;
  const float start = __uint_as_float(table_reach(Traits::kDim));
  const uint8_t* bin = reinterpret_cast<const uint8_t*>(with.tables);
#pragma unroll
  for (int i = 0; i < Traits::kPerLane; ++i) {
    y[i] = subnormal_integer(__fmul_rn(y[i], k));
    const int at = bin[__float_as_uint(subnormal_cell(y[i], start))];
    // One in the bits from 23 up (the least normal number), |u| below them.
    atomicAdd(sums + 32 * at, __float_as_uint(__fadd_rn(fabsf(y[i]), 0x1p-126f)));
  }

  // sums[b]: of bin b and all above it
  uint32_t running = 0;
#pragma unroll 4
  for (int b = plan.bins() - 1; b >= 0; --b) {
    running += sums[32 * b];
    sums[32 * b] = running;
  }
  const int4* growth = reinterpret_cast<const int4*>(with.tables + plan.bin_words() + plan.code_words());
  const int level = book.level[0];
  const int first_dot = level * static_cast<int>(running & sum_mask), first_square = level * level * Traits::kPerLane;
  Fit best{0, 0, 0};
  float best_merit = -1;
  int kept = 0;
#pragma unroll 1
  for (int s = 0; s < plan.steps; ++s) {
    int dot = first_dot, square = first_square;
#pragma unroll 4
    for (int j = 0; j < plan.inner; ++j, ++growth) {
      const int4 at = *growth;
      const uint32_t above = sums[at.x];
      dot += at.y * static_cast<int>(above & sum_mask);
      square += at.z * static_cast<int>(above >> sum_bits);
    }
    const Fit fit = Fit::of_sums(group_sum<Traits::kLanes>(dot), group_sum<Traits::kLanes>(square), book.step[s]);
    const float merit = fit.merit();
    if (merit > best_merit) {
      best = fit;
      best_merit = merit;
      kept = s;
    }
  }

  if (near) {
    const uint8_t* codes = reinterpret_cast<const uint8_t*>(with.tables + plan.bin_words());
    const int first = kept * 2 * TilePlan::kNear;
    const float zero = __uint_as_float(first + TilePlan::kNear), lowest = __uint_as_float(first),
                highest = __uint_as_float(first + 2 * TilePlan::kNear - 1);
#pragma unroll
    for (int o = 0; o < octets.kCount; ++o) {
      octets.low[o] = 0;
#pragma unroll
      for (int i = 7; i >= 0; --i) {
        const float cell = fminf(fmaxf(subnormal_cell(y[8 * o + i], zero), lowest), highest);
        octets.low[o] = octets.low[o] * 16 + codes[__float_as_uint(cell)];
      }
    }
  } else {
#pragma unroll
    for (int o = 0; o < octets.kCount; ++o) {
      octets.low[o] = 0;
#pragma unroll
      for (int i = 7; i >= 0; --i) {
        const int cell = static_cast<int>(__float_as_uint(subnormal_cell(y[8 * o + i], start))) - table_reach(Traits::kDim);
        octets.low[o] = octets.low[o] * 16 + far_code(&book, plan.inner, kept, cell);
      }
    }
  }
  if (with.bits == 5) add_fifth_bits<Traits>(octets, [&](int i) { return __fmaf_rn(y[i], 2, 0x1p-149f); });  // 2 u + 1
  return best;
}

// ---- Rows of packed words -----------------------------------------------------------------------------------------------

// What becomes of a vector's codes.
enum class RowKind { kKey, kValue, kDense };

// A token's part of a value block in shared memory: eight words for each chunk, those of even channels (of 16 that share a byte),
// then those of odd ones, four words at most of each. A chunk is 64 channels (2 bits: 128), the last one what is left; the words
// of its `words` units (3 bits: the three words that share the bits of the fourth set) lie next to each other in the block.
// 2 bits, d mod 32 = 16: one word more.
struct ValueChunks {
  int d, bits;

  __host__ __device__ constexpr int units() const { return bits == 3 ? d / 16 : d * bits / 64; }
  __host__ __device__ constexpr int count() const { return (units() + 3) / 4; }
  __host__ __device__ constexpr bool tail() const { return bits == 2 && d % 32; }
  __host__ __device__ constexpr int row_words() const { return 8 * count() + tail(); }
  // Words of a chunk in a lane's part of the block, and where the chunk begins there.
  __host__ __device__ constexpr int words(int chunk) const {
    const int left = units() - 4 * chunk;
    return left < 4 ? left : bits == 3 ? 3 : 4;
  }
  __host__ __device__ constexpr int begin(int chunk) const { return (bits == 3 ? 384 : 512) * chunk; }
};

// Words of a vector's row.
__host__ __device__ constexpr int tile_row_words(RowKind kind, int d, int bits) {
  return kind == RowKind::kValue ? ValueChunks{d, bits}.row_words()
                                 : kind == RowKind::kDense ? d * bits / 32
                                                           : (format::Record{d, 32, bits, 4}.key_row_bytes() +
                                                              format::Record{d, 32, bits, 4}.key_plane_bytes()) / 4;
}

// N words to 16-byte aligned shared memory; more are written where that makes whole 16 bytes and they are padding.
template <int N>
__device__ __forceinline__ void put_words(uint32_t* to, const uint32_t (&word)[N]) {
  constexpr int whole = N / 4 * 4;
#pragma unroll
  for (int i = 0; i < whole; i += 4) {
    *reinterpret_cast<uint4*>(to + i) = make_uint4(word[i], word[i + 1], word[i + 2], word[i + 3]);
  }
#pragma unroll
  for (int i = whole; i < N; ++i) to[i] = word[i];
}

// A lane's octets into its vector's row. part: which lane of the vector.
template <typename Traits>
__device__ __forceinline__ void write_row(const LaneOctets<Traits>& octets, RowKind kind, int bits, int part, uint32_t* row) {
  constexpr int n = LaneOctets<Traits>::kCount, d = Traits::kDim;
  const auto& low = octets.low;
  const auto& high = octets.high;
  if (kind == RowKind::kValue) {
    // Octet a in the low nibbles, b in the high ones: even channels, odd channels.
    const auto even = [](uint32_t a, uint32_t b) { return (a & 0x0F0F0F0F) | (b << 4 & 0xF0F0F0F0); };
    const auto odd = [](uint32_t a, uint32_t b) { return (a >> 4 & 0x0F0F0F0F) | (b & 0xF0F0F0F0); };
    if (bits == 2) {
      uint32_t out[(n / 4 + 3) / 4 * 8] = {};
      const auto close = [](uint32_t a, uint32_t b) {
        return (a & 0x03030303) | (a >> 2 & 0x0C0C0C0C) | (b << 4 & 0x30303030) | (b << 2 & 0xC0C0C0C0);
      };
#pragma unroll
      for (int u = 0; u < n / 4; ++u) {
        const uint32_t* o = low + 4 * u;
        out[u / 4 * 8 + u % 4] = close(even(o[0], o[1]), even(o[2], o[3]));
        out[u / 4 * 8 + 4 + u % 4] = close(odd(o[0], o[1]), odd(o[2], o[3]));
      }
      put_words(row + part * (n / 16 * 8), out);
      if constexpr (n % 4) {
        const auto spread = [](uint32_t x) { return (x & 3) | (x & 0x30) << 4 | (x & 0x300) << 8 | (x & 0x3000) << 12; };
        const uint32_t a = low[n - 2], b = low[n - 1];
        row[ValueChunks{d, 2}.row_words() - 1] = spread(a) | spread(b) << 2 | spread(a >> 16) << 4 | spread(b >> 16) << 6;
      }
      return;
    }
    uint32_t out[(n / 2 + 3) / 4 * 8] = {};
#pragma unroll
    for (int u = 0; u < n / 2; ++u) {
      out[u / 4 * 8 + u % 4] = even(low[2 * u], low[2 * u + 1]);
      out[u / 4 * 8 + 4 + u % 4] = odd(low[2 * u], low[2 * u + 1]);
    }
    if (bits == 3) {  // the fourth set's bits into the others
#pragma unroll
      for (int c = 0; c < n / 8; ++c) {
#pragma unroll
        for (int h = 0; h < 8; h += 4) {
#pragma unroll
          for (int j = 0; j < 3; ++j) out[8 * c + h + j] |= out[8 * c + h + 3] << (3 - j) & 0x88888888;
        }
      }
    }
    put_words(row + part * (n / 8 * 8), out);
    return;
  }
  if (bits == 4 || (bits == 5 && kind == RowKind::kKey)) {
    put_words(row + part * n, low);
    if (bits == 4) return;
    uint32_t out[(n + 3) / 4];
    const auto spread = [](uint32_t b) { return (b & 3) | (b & 0x0C) << 6 | (b & 0x30) << 12 | (b & 0xC0) << 18; };
#pragma unroll
    for (int g = 0; g < n / 4; ++g) {
      const uint32_t* o = high + 4 * g;
      out[g] = spread(o[0]) | spread(o[1]) << 2 | spread(o[2]) << 4 | spread(o[3]) << 6;
    }
    if constexpr (n % 4) {
      const uint32_t a = high[n - 2], b = high[n - 1];
      out[n / 4] = spread(a & 15) | spread(a >> 4) << 2 | spread(b & 15) << 4 | spread(b >> 4) << 6;
    }
#pragma unroll
    for (int g = 0; g < (n + 3) / 4; ++g) row[d / 8 + part * (n / 4) + g] = out[g];
    return;
  }
  if (bits == 2) {
    uint32_t out[n / 2];
#pragma unroll
    for (int i = 0; i < n / 2; ++i) out[i] = close_nibbles(low[2 * i], 2) | close_nibbles(low[2 * i + 1], 2) << 16;
#pragma unroll
    for (int i = 0; i < n / 2; ++i) row[part * (n / 2) + i] = out[i];
    return;
  }
  if (bits == 3 && kind == RowKind::kKey) {
    uint32_t out[n / 4 * 3 + (n % 4 ? 2 : 0)];
#pragma unroll
    for (int g = 0; g < n / 4; ++g) {
#pragma unroll
      for (int j = 0; j < 3; ++j) out[3 * g + j] = low[4 * g + j] | (low[4 * g + 3] << (3 - j) & 0x88888888);
    }
    if constexpr (n % 4) {
      const uint32_t last = low[n - 1] >> 16;
      out[n / 4 * 3] = low[n - 2] | (last << 3 & 0x8888) | (last << 18 & 0x88880000);
      out[n / 4 * 3 + 1] = (low[n - 1] & 0xFFFF) | (last << 1 & 0x8888);
    }
    put_words(row + part * (n / 4 * 3), out);
    return;
  }
  // Dense rows of 1, 3 and 5 bits, four octets at a time.
#pragma unroll
  for (int g = 0; g < n / 4; ++g) {
    uint64_t string[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) string[i] = dense_string({low[4 * g + i], bits == 5 ? high[4 * g + i] : 0}, bits);
    uint32_t* to = row + (part * (n / 4) + g) * bits;
    if (bits == 1) {
      to[0] = static_cast<uint32_t>(string[0] | string[1] << 8 | string[2] << 16 | string[3] << 24);
    } else if (bits == 3) {
      to[0] = static_cast<uint32_t>(string[0] | string[1] << 24);
      to[1] = static_cast<uint32_t>(string[1] >> 8 | string[2] << 16);
      to[2] = static_cast<uint32_t>(string[2] >> 16 | string[3] << 8);
    } else {
      to[0] = static_cast<uint32_t>(string[0]);
      to[1] = static_cast<uint32_t>(string[0] >> 32 | string[1] << 8);
      to[2] = static_cast<uint32_t>(string[1] >> 24 | string[2] << 16);
      to[3] = static_cast<uint32_t>(string[2] >> 16 | string[3] << 24);
      to[4] = static_cast<uint32_t>(string[3] >> 8);
    }
  }
}

}  // namespace turboquant::cuda
