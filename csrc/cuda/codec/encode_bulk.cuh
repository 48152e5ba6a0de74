// The encoder for many vectors of 64, 128 or 256 channels. A lane of a warp holds 64 channels, and tables in shared
// memory replace the arithmetic that turns a coordinate into a code. The bytes are those of codec/generic.cuh.
//
// An encoder that keeps up with memory can spend some twenty instructions on a channel, so each step has its trick:
//
// * Lanes that share a vector exchange half of their registers for a butterfly between them, so that it costs half a
//   shuffle. Both lanes send the same register, because the previous stage leaves sums and differences in swapped order
//   in one of them.
// * A power of two in front of a vector changes no code. So a vector is scaled (format.md section 5, step 3) only when
//   the sum of its squares leaves a safe range; that test also finds zeros, infinities and NaN. Terms that round
//   differently with and without scaling are 2^-66 of the length and could show only through several nested ties.
// * Integers are held as subnormal floats: x * 2^-149 rounds to the nearest integer, ties to even, and leaves |u| in
//   the low bits with the sign on top. A product with 2^-4 that rounds down, plus the start of the table, is the
//   address of cell u >> 4 in the table.
// * The table has an entry for every cell that a coordinate can reach: sign and magnitude of the code in a nibble, for
//   up to eight candidates. Byte permutations look up the levels of four nibbles at a time, and dot products of bytes
//   add up. 8-bit codes have too many cells for this and are products that round.
#pragma once

#include <algorithm>

#include "choices/codec.h"
#include "cuda/codec/dispatch.cuh"
#include "cuda/codec/record.cuh"
#include "cuda/common/async_copy.cuh"
#include "cuda/common/mma.cuh"

namespace turboquant::cuda {

// ---- Vectors in lanes -----------------------------------------------------------------------------------------------

template <int LOG_N>
struct EncodeTraits {
  static constexpr int kDim = 1 << LOG_N, kPerLane = 64;
  static constexpr int kLanes = kDim / kPerLane, kVectors = 32 / kLanes;  // lanes of a vector, vectors of a warp
  static_assert(kLanes == 1 || kLanes == 2 || kLanes == 4);

  // After the rotation, half h of a lane is this group of 32 channels.
  static __device__ __forceinline__ int group(int part, int h) { return h * kLanes + part; }
};

// ---- Staged vectors -------------------------------------------------------------------------------------------------

// Words between vectors, and between the signs of the lanes of a vector: 16-byte accesses of eight neighbouring lanes
// meet different banks (with d = 256 in two halves).
template <typename Traits>
constexpr int kStageStride = choices::encode_stage_stride(Traits::kDim);
constexpr int kSignStride = choices::kSignStride;

// Issues the copies of all vectors of a warp to shared memory, 16 bytes at a time: neighbouring lanes move neighbouring
// bytes. Vector v is row row_of(v) of rows that lie `stride` bytes apart; row_of must be linear. Row indices are
// clamped to count - 1, which may be negative: that is still a row of the tensor, before the first one. Vectors are the
// first to leave the L2 cache, where stored bytes wait for others of their sectors.
template <typename Traits, typename RowOf>
__device__ __forceinline__ void start_rows(uint32_t* stage, const uint8_t* rows, uint32_t stride, int count, int lane,
                                           RowOf&& row_of) {
  constexpr int kChunks = Traits::kDim / 8, kTogether = 32 / kChunks, kTimes = Traits::kVectors / kTogether;
  const int first = lane / kChunks, chunk = lane % kChunks;
  const uint8_t* from = rows + 16 * chunk;
  uint32_t* to = stage + first * kStageStride<Traits> + 4 * chunk;
  const CopyOnce once;
  if (row_of(Traits::kVectors - 1) < count) {
    const auto at_row = [&](const uint8_t* base, uint32_t row) { return base + uint64_t{row} * stride; };
    from = at_row(from, row_of(first));
    asm("" : "+l"(from));  // keeps one multiplication per row instead of one for each term of its index
#pragma unroll
    for (int k = 0; k < kTimes; ++k) {
      once.copy_async(to + k * kTogether * kStageStride<Traits>, at_row(from, row_of(k * kTogether)));
    }
  } else {
#pragma unroll 1
    for (int k = 0; k < kTimes; ++k) {
      const int64_t row = min(row_of(first + k * kTogether), count - 1);
      once.copy_async(to + k * kTogether * kStageStride<Traits>, from + row * stride);
    }
  }
}

// A warp takes a *span* at a time: neighbouring tokens of one head. Vectors that take four lanes need two passes for
// one.
template <typename Traits>
constexpr int kSpanTokens = choices::encode_span_tokens(Traits::kDim);
template <typename Traits>
constexpr int kPasses = kSpanTokens<Traits> / Traits::kVectors;

// The token of the span that a vector of the warp is. With two passes, each has the tokens that share words of a value
// block.
template <typename Traits>
__device__ __forceinline__ int token_of_vector(int vector, int pass) {
  return Traits::kLanes == 4 ? vector % 4 + 4 * pass + 8 * (vector / 4) : vector;
}

// Sign bits of the channels, a row for each lane of a vector.
template <typename Traits>
__device__ __forceinline__ void fill_signs(uint32_t* rows, const float* signs, int thread, int threads) {
  for (int i = thread; i < Traits::kDim; i += threads) {
    rows[i / 64 * kSignStride + i % 64] = __float_as_uint(signs[i]) & 0x80000000;
  }
}

// A lane's staged channels as float32 with their signs; CENTERED: less the center, and scaled if there are scales. The
// fence after each 16 channels keeps the compiler from loading all 64 into registers at once. CENTERED is a template
// parameter because a test for every 16 channels would take up to a twelfth of the kernel's time from vectors without a
// center.
template <typename T, bool CENTERED>
__device__ __forceinline__ void read_staged(const uint32_t* row, const uint32_t* signs,
                                            const format::Channels& channels, float (&y)[64]) {
#pragma unroll
  for (int i = 0; i < 64; i += 16) {
    uint32_t word[8], sign[16];
#pragma unroll
    for (int k = 0; k < 8; k += 4) {
      const uint4 w = *reinterpret_cast<const uint4*>(row + i / 2 + k);
      word[k] = w.x, word[k + 1] = w.y, word[k + 2] = w.z, word[k + 3] = w.w;
    }
#pragma unroll
    for (int k = 0; k < 16; k += 4) {
      const uint4 s = *reinterpret_cast<const uint4*>(signs + i + k);
      sign[k] = s.x, sign[k + 1] = s.y, sign[k + 2] = s.z, sign[k + 3] = s.w;
    }
    float* to = y + i;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if constexpr (std::is_same_v<T, __half>) {
        const float2 pair = __half22float2(reinterpret_cast<const __half2&>(word[k]));
        to[2 * k] = __uint_as_float(__float_as_uint(pair.x) ^ sign[2 * k]);
        to[2 * k + 1] = __uint_as_float(__float_as_uint(pair.y) ^ sign[2 * k + 1]);
      } else {  // adding the sign bit flips the sign
        to[2 * k] = __uint_as_float(word[k] * 65536u + sign[2 * k]);
        to[2 * k + 1] = __uint_as_float((word[k] & 0xFFFF0000) ^ sign[2 * k + 1]);
      }
    }
    if constexpr (CENTERED) {  // -(a - b) = (-a) - (-b)
#pragma unroll
      for (int k = 0; k < 16; k += 4) {
        const float4 c = __ldg(reinterpret_cast<const float4*>(channels.center + i + k));
        to[k] = __fsub_rn(to[k], __uint_as_float(__float_as_uint(c.x) ^ sign[k]));
        to[k + 1] = __fsub_rn(to[k + 1], __uint_as_float(__float_as_uint(c.y) ^ sign[k + 1]));
        to[k + 2] = __fsub_rn(to[k + 2], __uint_as_float(__float_as_uint(c.z) ^ sign[k + 2]));
        to[k + 3] = __fsub_rn(to[k + 3], __uint_as_float(__float_as_uint(c.w) ^ sign[k + 3]));
      }
      if (channels.scale) {
#pragma unroll
        for (int k = 0; k < 16; k += 4) {
          const float4 c = __ldg(reinterpret_cast<const float4*>(channels.scale + i + k));
          to[k] = __fmul_rn(to[k], c.x), to[k + 1] = __fmul_rn(to[k + 1], c.y);
          to[k + 2] = __fmul_rn(to[k + 2], c.z), to[k + 3] = __fmul_rn(to[k + 3], c.w);
        }
      }
    }
    asm volatile("" ::: "memory");
  }
}

// ---- Rotation -------------------------------------------------------------------------------------------------------

// Butterflies of a vector. Halves of a lane may come out with the opposite sign (is_negated), which is corrected for
// free.
template <typename Traits>
__device__ __forceinline__ void rotate_lanes(float (&y)[64], int part) {
  lane_butterflies<1, 32>(y);
  // Products with 1 and -1 are exact, so that only sums and differences round. A lane whose first partner is below it
  // has the differences first.
  const float first = part & 1 ? -1.0f : 1.0f;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const float p = y[i], q = y[i + 32];
    y[i] = __fmaf_rn(first, q, p);
    y[i + 32] = __fmaf_rn(-first, q, p);
  }
#pragma unroll
  for (int bit = 1; bit < Traits::kLanes; bit *= 2) {
    // The next partner needs its halves in swapped order.
    const bool swapped = part & 2 * bit;
    const float next_side = swapped ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const float own = y[i];
      const float other = __shfl_xor_sync(0xffffffff, y[i + 32], bit);
      y[i] = __fmaf_rn(next_side, other, own);
      y[i + 32] = __fmaf_rn(-next_side, other, own);
    }
  }
}

// Whether half h of a lane has the opposite sign: the upper of two partners subtracts in the opposite order.
template <typename Traits>
__device__ __forceinline__ bool is_negated(int part, int h) {
  if (Traits::kLanes == 1) return false;
  if (Traits::kLanes == 2) return h == 1 && part == 1;
  return h == 0 ? part == 3 : part == 2;
}

// Sum of squares of N channels over neighbouring pairs (format.md section 5, step 4), depth first: few live registers.
template <int N>
__device__ __forceinline__ float square_tree(const float* y) {
  if constexpr (N == 1) {
    return __fmul_rn(y[0], y[0]);
  } else {
    return __fadd_rn(square_tree<N / 2>(y), square_tree<N / 2>(y + N / 2));
  }
}

template <typename Traits>
__device__ __forceinline__ float sum_of_squares(const float (&y)[64]) {
  float t[2] = {square_tree<32>(y), square_tree<32>(y + 32)};
#pragma unroll
  for (int bit = 1; bit < Traits::kLanes; bit *= 2) {
#pragma unroll
    for (int h = 0; h < 2; ++h) t[h] = __fadd_rn(t[h], __shfl_xor_sync(0xffffffff, t[h], bit));
  }
  return __fadd_rn(t[0], t[1]);
}

// A rotated vector, besides its coordinates y in the lanes' registers: its length, and the power of two that was taken
// out.
struct Rotated {
  float length;
  int exponent;
  bool finite;  // else y is zero
};

// read(y) reads the vector, signs applied; it is called again if the vector must be scaled.
template <typename Traits, typename Read>
__device__ __forceinline__ Rotated rotate_vector(float (&y)[64], int part, Read&& read) {
  Rotated v{0, 0, true};
  bool scaled = false;
#pragma unroll 1
  while (true) {
    read(y);
    if (scaled) {  // rare
      uint32_t largest = 0;
#pragma unroll
      for (int i = 0; i < 64; ++i) largest = max(largest, magnitude_bits(y[i]));
      largest = max_of_lanes<Traits::kLanes>(largest);
      v.finite = largest < kInfinityBits;
      v.exponent = prescale_exponent(largest);
      const float down = power_of_two(-v.exponent);
#pragma unroll
      for (int i = 0; i < 64; ++i) y[i] = v.finite ? __fmul_rn(y[i], down) : 0.0f;
    }
    rotate_lanes<Traits>(y, part);
    const float squares = sum_of_squares<Traits>(y);
    if (__all_sync(0xffffffff, squares >= 0x1p-60f && squares <= 0x1p100f)) {
      v.length = root(squares);
      return v;
    }
    if (scaled) {
      v.length = __fsqrt_rn(squares);
      return v;
    }
    scaled = true;
  }
}

// ---- Tables ---------------------------------------------------------------------------------------------------------

// Cells u >> 4 on either side of zero that a vector can reach, and the words of a table. SEARCH: of several candidates.
template <typename Traits>
constexpr int kReach = choices::encode_table_reach(Traits::kDim);
template <typename Traits>
constexpr int kCells = 2 * kReach<Traits>;
template <typename Traits, bool SEARCH>
constexpr int kTableWords = choices::encode_table_words(Traits::kDim, SEARCH);

constexpr int kMostCandidates = choices::kMostCandidates;

// Fills a table: an entry for every cell, a byte or (SEARCH) a word, and behind them the entry of code 0. The caller
// has synchronised after filling the book, and does so again. A nibble holds a magnitude and above it, where there is
// room, the sign (set: not negative); the sign of 5-bit codes is bit 4 of a byte. A thread searches for all candidates,
// or for all cells of a word, side by side: the searches are independent, which hides their latency.
template <typename Traits, bool SEARCH>
__device__ __forceinline__ void fill_code_table(uint32_t* table, const SharedCodebook& book, Width width, int steps,
                                                int thread, int threads) {
  constexpr int kCandidates = SEARCH ? kMostCandidates : 1, kTogether = SEARCH ? 1 : 4;
  const int bits = format::num_bits(width), inner = (1 << (bits - 1)) - 1;
  const bool only_magnitudes = SEARCH && format::has_fifth_bit(width);
  const uint32_t sign = only_magnitudes ? 0 : (SEARCH ? 0x11111111 : 0x01010101) << (bits - 1);
  constexpr int kZero = kReach<Traits> / kTogether;  // the word of cell 0
  for (int word = thread; word < kZero; word += threads) {
    int magnitude[kTogether][kCandidates] = {};
#pragma unroll 1
    for (int step = (inner + 1) / 2; step > 0; step /= 2) {
#pragma unroll
      for (int c = 0; c < kTogether; ++c) {
#pragma unroll
        for (int s = 0; s < kCandidates; ++s) {
          int& m = magnitude[c][s];
          if (book.boundary[s < steps ? s : 0][m + step - 1] <= word * kTogether + c) m += step;
        }
      }
    }
    uint32_t entries = 0;
#pragma unroll
    for (int c = 0; c < kTogether; ++c) {
#pragma unroll
      for (int s = 0; s < kCandidates; ++s) entries |= magnitude[c][s] << (8 * c + 4 * s);
    }
    table[kZero + word] = entries | sign;
    table[kZero - 1 - word] = SEARCH ? entries : __byte_perm(entries, 0, 0x0123);
  }
  if (thread == 0) table[2 * kZero] = SEARCH ? (only_magnitudes ? 0 : inner * 0x11111111) : inner;
}

// The nearest integer, as a subnormal float.
__device__ __forceinline__ float subnormal_integer(float x) { return __fmul_rn(x, 0x1p-149f); }

// The table's entry for such an integer. middle: the address of cell 0, counted in entries, as such an integer, too. A
// vector that is not finite has zeros instead of coordinates: its `middle` is the address of the entry of code 0.
template <typename Traits, bool SEARCH>
__device__ __forceinline__ float table_middle(const uint8_t* table, bool finite) {
  const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(table));
  float middle = __uint_as_float((SEARCH ? at / 4 : at) + (finite ? kReach<Traits> : kCells<Traits>));
  asm("" : "+f"(middle));  // in a register: beside an immediate operand, it would be copied for every cell
  return middle;
}
template <bool SEARCH>
__device__ __forceinline__ uint32_t look_up(float u, float middle) {
  const uint32_t at = __float_as_uint(__fmaf_rd(u, 0.0625f, middle));
  uint32_t entry;
  if constexpr (SEARCH) {
    asm("ld.shared.u32 %0, [%1];" : "=r"(entry) : "r"(4 * at));
  } else {
    asm("ld.shared.u8 %0, [%1];" : "=r"(entry) : "r"(at));
  }
  return entry;
}

// ---- Encoding -------------------------------------------------------------------------------------------------------

// A codebook, its table and its levels, as warps encode with them.
struct TableBook {
  const SharedCodebook* book;
  const uint8_t* table;
  const uint32_t* levels;  // of fill_level_bytes
  Width width;
  int steps;

  // A mask of all bits of a magnitude, repeated for each candidate or channel of a word by the factor `each`.
  __device__ __forceinline__ uint32_t magnitudes(uint32_t each) const {
    return each * ((1u << (format::num_bits(width) - 1)) - 1);
  }
};

// A lane's codes: the low four bits of eight channels in a word, and the fifth bits of 32 channels in a word.
struct LaneCodes {
  uint32_t low[8], high[2];
};

// The levels of magnitudes, a byte each, in shared memory, by the first threads of a block; the caller synchronises.
__device__ __forceinline__ void fill_level_bytes(uint32_t (&words)[4], const SharedCodebook& book, int thread) {
  if (thread >= 4) return;
  words[thread] = 0;
#pragma unroll
  for (int b = 0; b < 4; ++b) words[thread] |= static_cast<uint32_t>(book.level[4 * thread + b]) << 8 * b;
}

// The same in registers. WIDE: for 16 magnitudes, else for 8.
template <bool WIDE>
struct LevelBytes {
  uint32_t word[WIDE ? 4 : 2];

  __device__ __forceinline__ explicit LevelBytes(const uint32_t* words) {
#pragma unroll
    for (int i = 0; i < (WIDE ? 4 : 2); ++i) word[i] = words[i];
  }

  // The levels of the four low nibbles; bit 3 is 0 unless WIDE. A nibble with bit 3 makes a permutation repeat the sign
  // bit of a level, which is 0: so each half of the levels gives 0 for the magnitudes of the other half.
  __device__ __forceinline__ uint32_t of(uint32_t nibbles) const {
    const uint32_t level = select_bytes(word[0], word[1], nibbles);
    if constexpr (!WIDE) return level;
    return level | select_bytes(word[WIDE ? 2 : 0], word[WIDE ? 3 : 1], nibbles ^ 0x8888);
  }
};

// Turns nibbles of signs and magnitudes into codes of up to four bits: half + m, or half - 1 - m.
__device__ __forceinline__ void codes_of_signs(uint32_t (&x)[8], int bits) {
  const uint32_t ones = (1u << (bits - 1)) - 1;
#pragma unroll
  for (int o = 0; o < 8; ++o) x[o] ^= (~(x[o] >> (bits - 1)) & 0x11111111) * ones;
}

// Encodes with one candidate: codes and sums in one pass. k: the factor of each half. |u| < 2^17; bit 16 is rare, and
// its share of the sum is added separately.
template <typename Traits, bool WIDE>
__device__ __forceinline__ Fit encode_single(const float (&y)[64], const float (&k)[2], bool finite,
                                             const TableBook& with, LaneCodes& codes) {
  const float middle = table_middle<Traits, false>(with.table, finite);
  const uint32_t all_magnitudes = with.magnitudes(0x11111111);
  const LevelBytes<WIDE> levels(with.levels);
  uint32_t dot[2] = {}, square[2] = {}, over = 0;
#pragma unroll
  for (int o = 0; o < 8; ++o) {
    uint32_t u[8], part[2] = {};  // entries: bytes of even and odd channels, or nibbles of four channels each
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float integer = subnormal_integer(__fmul_rn(y[8 * o + i], k[o / 4]));
      const uint32_t entry = look_up<false>(integer, middle);
      u[i] = __float_as_uint(integer);
      if constexpr (Traits::kDim > 128) over |= u[i];
      if constexpr (WIDE) {
        part[i % 2] += entry << 8 * (i / 2);
      } else {
        part[i / 4] += entry << 4 * (i % 4);
      }
    }
    uint32_t first, second;
    if constexpr (WIDE) {
      const uint32_t magnitudes = select_bits(0x0F0F0F0F, part[0], part[1] << 4);
      const uint32_t positive = select_bits(0x0F0F0F0F, part[0] >> 4, part[1]);  // the lowest bits of nibbles
      const uint32_t pairs = (positive | positive >> 3) & 0x03030303;
      const uint32_t byte = __dp4a(pairs, 0x40100401u, 0u);
      codes.low[o] = magnitudes ^ ~(positive * 15);
      codes.high[o / 4] = (o % 4 ? codes.high[o / 4] : 0) + (byte << 8 * (o % 4));
      first = levels.of(magnitudes), second = levels.of(magnitudes >> 16);
    } else {
      codes.low[o] = part[1] * 65536 + part[0];
      first = levels.of(part[0] & all_magnitudes), second = levels.of(part[1] & all_magnitudes);
    }
    square[0] = __dp4a(first, first, square[0]);
    square[1] = __dp4a(second, second, square[1]);
    dot[0] = __dp2a_lo(select_bytes(u[0], u[1], 0x5410), first, dot[0]);
    dot[1] = __dp2a_lo(select_bytes(u[4], u[5], 0x5410), second, dot[1]);
    dot[0] = __dp2a_hi(select_bytes(u[2], u[3], 0x5410), first, dot[0]);
    dot[1] = __dp2a_hi(select_bytes(u[6], u[7], 0x5410), second, dot[1]);
  }
  if constexpr (!WIDE) codes_of_signs(codes.low, format::num_bits(with.width));
  if (Traits::kDim > 128 && (over & 0x10000)) {
#pragma unroll 1
    for (int o = 0; o < 8; ++o) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float one = 0;
#pragma unroll
        for (int j = 0; j < 8; ++j) one = o == j ? y[8 * j + i] : one;
        const uint32_t u = __float_as_uint(subnormal_integer(__fmul_rn(one, k[o / 4])));
        // Beyond every boundary of sensible steps the code is known; but a step may be extreme, so the table decides.
        const uint32_t entry = look_up<false>(__uint_as_float(u), middle);
        if (u & 0x10000) dot[0] += static_cast<uint32_t>(with.book->level[entry & with.magnitudes(1)]) << 16;
      }
    }
  }
  return Fit::of_sums(sum_of_lanes<Traits::kLanes>(static_cast<int>(dot[0] + dot[1])),
                      sum_of_lanes<Traits::kLanes>(static_cast<int>(square[0] + square[1])), with.book->step[0]);
}

// Encodes with the best of several candidates; |u| < 2^16.
template <typename Traits, bool WIDE>
__device__ __forceinline__ Fit encode_search(const float (&y)[64], const float (&k)[2], int part, bool finite,
                                             const TableBook& with, LaneCodes& codes) {
  const SharedCodebook& book = *with.book;
  const float middle = table_middle<Traits, true>(with.table, finite);
  const uint32_t all_magnitudes = WIDE ? 0xFFFFFFFF : with.magnitudes(0x11111111);
  const LevelBytes<WIDE> levels(with.levels);

  uint32_t dot[kMostCandidates] = {}, square[kMostCandidates] = {};
  // Nibbles of two channels under the candidates of even and odd numbers, a byte for each candidate.
  uint32_t pairs[2][32];
  codes.high[0] = codes.high[1] = 0;
#pragma unroll
  for (int i = 0; i < 64; i += 4) {
    uint32_t u[4], entry[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float x = subnormal_integer(__fmul_rn(y[i + j], k[i / 32]));
      u[j] = __float_as_uint(x);
      entry[j] = look_up<true>(x, middle);
    }
    if constexpr (WIDE) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float z = __fadd_rn(__uint_as_float(u[j]), 0.0f);  // -0 is positive
        codes.high[i / 32] = __funnelshift_l(__float_as_uint(z), codes.high[i / 32], 1);
      }
    }
    const uint32_t first = select_bytes(u[0], u[1], 0x5410), second = select_bytes(u[2], u[3], 0x5410);
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      pairs[0][(i + j) / 2] = select_bits(0x0F0F0F0F, entry[j], entry[j + 1] << 4);
      pairs[1][(i + j) / 2] = select_bits(0x0F0F0F0F, entry[j] >> 4, entry[j + 1]);
    }
#pragma unroll
    for (int s = 0; s < kMostCandidates; ++s) {
      const uint32_t* of = pairs[s % 2] + i / 2;
      // The upper half of this word belongs to another candidate.
      const uint32_t nibbles = select_bytes(of[0], of[1], s < 4 ? 0x5140 : 0x7362) & all_magnitudes;
      const uint32_t level = levels.of(s & 2 ? nibbles >> 16 : nibbles);
      square[s] = __dp4a(level, level, square[s]);
      dot[s] = __dp2a_lo(first, level, dot[s]);
      dot[s] = __dp2a_hi(second, level, dot[s]);
    }
  }

  // Two lanes of a vector divide the candidates between them, and then exchange the best of each half.
  static_assert(Traits::kLanes <= 2);
  constexpr int kOwn = kMostCandidates / Traits::kLanes;
  const bool upper = part > 0;
  if constexpr (Traits::kLanes == 2) {
    const auto add = [upper](uint32_t& sum, uint32_t second) {
      const uint32_t other = __shfl_xor_sync(0xffffffff, upper ? sum : second, 1);
      sum = (upper ? second : sum) + other;
    };
#pragma unroll
    for (int s = 0; s < kOwn; ++s) add(dot[s], dot[s + kOwn]), add(square[s], square[s + kOwn]);
  }
  float best_merit = -1;
  int kept = 0, kept_dot = 0, kept_square = 0;
#pragma unroll
  for (int s = 0; s < kOwn; ++s) {
    const Fit fit = Fit::of_sums(static_cast<int>(dot[s]), static_cast<int>(square[s]), 0);
    const float merit = fit.a > 0 ? divide(__fmul_rn(fit.a, fit.a), fit.b) : 0;
    if (s + part * kOwn < with.steps && merit > best_merit) {
      best_merit = merit;
      kept = s + part * kOwn, kept_dot = static_cast<int>(dot[s]), kept_square = static_cast<int>(square[s]);
    }
  }
  if constexpr (Traits::kLanes == 2) {
    const float merit = __shfl_xor_sync(0xffffffff, best_merit, 1);
    const int other = __shfl_xor_sync(0xffffffff, kept, 1), other_dot = __shfl_xor_sync(0xffffffff, kept_dot, 1),
              other_square = __shfl_xor_sync(0xffffffff, kept_square, 1);
    if (merit > best_merit || (upper && merit == best_merit)) {  // of equal candidates, the first wins
      kept = other, kept_dot = other_dot, kept_square = other_square;
    }
  }
  const Fit best = Fit::of_sums(kept_dot, kept_square, book.step[kept]);

  const uint32_t bytes = 0x40 + kept / 2 * 0x11;  // the candidate's byte of each of two words
#pragma unroll
  for (int o = 0; o < 8; ++o) {
    uint32_t of[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) of[j] = kept % 2 ? pairs[1][4 * o + j] : pairs[0][4 * o + j];
    codes.low[o] = select_bytes(select_bytes(of[0], of[1], bytes), select_bytes(of[2], of[3], bytes), 0x5410);
  }
  if constexpr (!WIDE) codes_of_signs(codes.low, format::num_bits(with.width));
  if constexpr (WIDE) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t negative = __brev(codes.high[h]);
      codes.high[h] = finite ? ~negative : 0;
#pragma unroll
      for (int o = 0; o < 4; ++o) codes.low[4 * h + o] ^= nibbles_of_bits(negative >> 8 * o & 255) * 15;
    }
  }
  return best;
}

// ---- Encoding in 8 bits ---------------------------------------------------------------------------------------------

// The candidates of 8-bit codes. Most steps have a factor, close to the step's reciprocal, whose products with places
// round to the magnitudes: no boundary has to be looked at. It is 0 for a step that has none (such as one whose
// boundaries lie in the middle of two integers, and are rounded up and down by turns).
struct ByteBook {
  float step[kMostCandidates], factor[kMostCandidates], limit[kMostCandidates];

  // By all lanes of a warp, candidate s.
  __device__ __forceinline__ void fill(const SharedCodebook& book, int s, int lane) {
    constexpr float kReach = 1 << 17;  // beyond every coordinate
    const ByteSteps exact(book.step[s]);
    const float nearest = __fdividef(1, 2 * exact.half);
    bool found = false;
#pragma unroll 1
    for (int k = 0; k < 16 && !found; ++k) {  // the neighbours of the reciprocal, the nearest ones first
      const float tried = __int_as_float(__float_as_int(nearest) + (k % 2 ? (k + 1) / 2 : -(k / 2)));
      bool right = true;
#pragma unroll 1
      for (int m = lane; m < format::kMaxByteLevel; m += 32) {
        // Magnitudes grow with places, so they are right if they are on either side of every boundary.
        const float boundary = exact.boundary(static_cast<float>(m)), below = fminf(boundary, kReach) - 0.5f;
        const auto magnitude = [&](float place) { return product(place, exact.limit, tried) - kInteger; };
        if (boundary < kReach) right = right && magnitude(boundary + 0.5f) > m;
        if (boundary > 0) right = right && magnitude(below) <= m;
      }
      found = __all_sync(0xffffffff, right);
      if (found && lane == 0) factor[s] = tried;
    }
    if (lane > 0) return;
    step[s] = book.step[s], limit[s] = exact.limit;
    if (!found) factor[s] = 0;
  }

  // The magnitude of a place, or its level if the place has its sign, as an integer in the low bits.
  static __device__ __forceinline__ float product(float place, float limit, float factor) {
    return __fmaf_rn(fminf(fmaxf(place, -limit), limit), factor, kInteger);
  }
  static __device__ __forceinline__ float product_of_size(float place, float limit, float factor) {
    return __fmaf_rn(fminf(fabsf(place), limit), factor, kInteger);
  }
};

// Encodes in 8 bits; y becomes the places of its coordinates. The loop over candidates is short enough to stay in the
// instruction cache.
template <typename Traits>
__device__ __forceinline__ Fit encode_bytes(float (&y)[64], const float (&k)[2], bool finite, const ByteBook& book,
                                            int steps, uint32_t (&codes)[16]) {
  uint32_t size[32], over = 0;  // |u| of two channels, without bit 16, which is rare
#pragma unroll
  for (int i = 0; i < 64; i += 2) {
    uint32_t whole[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float u = nearest_integer(__fmul_rn(y[i + j], k[i / 32]));
      whole[j] = __float_as_uint(__fadd_rn(fabsf(u), 0x1p23f));
      if constexpr (Traits::kDim > 128) over |= whole[j];
      y[i + j] = __fadd_rn(u, 0.5f);
    }
    size[i / 2] = select_bytes(whole[0], whole[1], 0x5410);
  }

  Fit best{0, 0, 0};
  float best_merit = -1;
  int kept = 0;
#pragma unroll 1
  for (int s = 0; s < steps; ++s) {
    uint32_t dot[2] = {}, square[2] = {};
    const auto add = [&](auto&& magnitude) {
#pragma unroll
      for (int i = 0; i < 64; i += 4) {
        const uint32_t level =
            low_bytes(magnitude(y[i]), magnitude(y[i + 1]), magnitude(y[i + 2]), magnitude(y[i + 3]));
        square[i / 4 % 2] = __dp4a(level, level, square[i / 4 % 2]);
        dot[0] = __dp2a_lo(size[i / 2], level, dot[0]);
        dot[1] = __dp2a_hi(size[i / 2 + 1], level, dot[1]);
      }
    };
    const float factor = book.factor[s], limit = book.limit[s];
    const ByteSteps exact(book.step[s]);
    if (factor > 0) [[likely]] {
      add([&](float place) { return ByteBook::product_of_size(place, limit, factor); });
    } else {
      add([&](float place) { return __fadd_rn(exact.magnitude(place), kInteger); });
    }
    if constexpr (Traits::kDim > 128) {
      if (over & 0x10000) {
#pragma unroll
        for (int i = 0; i < 64; ++i) {
          const bool large = y[i] > 65536 || y[i] < -65535;
          if (large) dot[0] += static_cast<uint32_t>(exact.magnitude(y[i])) << 16;
        }
      }
    }
    const Fit fit = Fit::of_sums(sum_of_lanes<Traits::kLanes>(static_cast<int>(dot[0] + dot[1])),
                                 sum_of_lanes<Traits::kLanes>(static_cast<int>(square[0] + square[1])), book.step[s]);
    const float merit = fit.a > 0 ? divide(__fmul_rn(fit.a, fit.a), fit.b) : 0;
    if (merit > best_merit) best = fit, best_merit = merit, kept = s;
  }

  const auto put = [&](auto&& level) {
#pragma unroll
    for (int i = 0; i < 64; i += 4) {
      const uint32_t word = low_bytes(level(y[i]), level(y[i + 1]), level(y[i + 2]), level(y[i + 3]));
      codes[i / 4] = finite ? word : 0;
    }
  };
  const float factor = book.factor[kept], limit = book.limit[kept];
  if (__all_sync(0xffffffff, factor > 0)) [[likely]] {
    put([&](float place) { return ByteBook::product(place, limit, factor); });
  } else {
    const ByteSteps exact(book.step[kept]);
    put([&](float place) { return __fadd_rn(copysignf(exact.magnitude(place), place), kInteger); });
  }
  return best;
}

// ---- Stores ---------------------------------------------------------------------------------------------------------

// Stores words with an instruction for global memory: the compiler cannot prove that pages are global and would use a
// generic store.
template <int N>
__device__ __forceinline__ void put_words(uint8_t* to, const uint32_t (&word)[N]) {
  if constexpr (N == 4) {
    __stwb(reinterpret_cast<uint4*>(to), make_uint4(word[0], word[1], word[2], word[3]));
  } else if constexpr (N == 2) {
    __stwb(reinterpret_cast<uint2*>(to), make_uint2(word[0], word[1]));
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) __stwb(reinterpret_cast<uint32_t*>(to) + i, word[i]);
  }
}

// Stores a group of 32 channels in the row of a key, and its fifth bits in the plane.
template <Width WIDTH>
__device__ __forceinline__ void put_key_group(const uint32_t* low, uint32_t high, int group, uint8_t* row,
                                              uint8_t* plane) {
  uint8_t* to = row + 4 * min(format::num_bits(WIDTH), 4) * group;
  if constexpr (WIDTH == Width::k4 || format::has_plane(WIDTH)) {
    put_words<4>(to, {low[0], low[1], low[2], low[3]});
    if constexpr (format::has_plane(WIDTH)) {
      put_words<1>(plane + 4 * group, {spread_pairs(high) | spread_pairs(high >> 8) << 2 |
                                       spread_pairs(high >> 16) << 4 | spread_pairs(high >> 24) << 6});
    }
  } else if constexpr (format::is_spread(WIDTH)) {
    uint32_t out[3];
#pragma unroll
    for (int j = 0; j < 3; ++j) out[j] = low[j] | (low[3] << (3 - j) & 0x88888888);
    put_words<3>(to, out);
  } else {
    static_assert(WIDTH == Width::k2, "no such keys");
    put_words<2>(to, {close_nibbles(low[0], 2) | close_nibbles(low[1], 2) << 16,
                      close_nibbles(low[2], 2) | close_nibbles(low[3], 2) << 16});
  }
}

// Stores a group of 32 channels in a dense row.
template <Width WIDTH>
__device__ __forceinline__ void put_dense_group(const uint32_t* low, uint32_t high, int group, uint8_t* row) {
  uint8_t* to = row + 4 * format::num_bits(WIDTH) * group;
  uint64_t string[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    string[i] = dense_string({low[i], format::has_fifth_bit(WIDTH) ? high >> 8 * i & 255 : 0}, WIDTH);
  }
  if constexpr (WIDTH == Width::k4) {
    put_words<4>(to, {low[0], low[1], low[2], low[3]});
  } else if constexpr (WIDTH == Width::k1) {
    put_words<1>(to, {static_cast<uint32_t>(string[0] | string[1] << 8 | string[2] << 16 | string[3] << 24)});
  } else if constexpr (WIDTH == Width::k2) {
    put_words<2>(to, {static_cast<uint32_t>(string[0] | string[1] << 16),
                      static_cast<uint32_t>(string[2] | string[3] << 16)});
  } else if constexpr (WIDTH == Width::k3) {
    put_words<3>(to, {static_cast<uint32_t>(string[0] | string[1] << 24),
                      static_cast<uint32_t>(string[1] >> 8 | string[2] << 16),
                      static_cast<uint32_t>(string[2] >> 16 | string[3] << 8)});
  } else {
    static_assert(WIDTH == Width::k5, "no such rows");
    put_words<5>(to, {static_cast<uint32_t>(string[0]), static_cast<uint32_t>(string[0] >> 32 | string[1] << 8),
                      static_cast<uint32_t>(string[1] >> 24 | string[2] << 16),
                      static_cast<uint32_t>(string[2] >> 16 | string[3] << 24), static_cast<uint32_t>(string[3] >> 8)});
  }
}

// Undoes the exchanges of rotate_lanes: a lane's octets, from two groups that are kLanes groups apart, become those of
// neighbouring groups.
template <typename Traits>
__device__ __forceinline__ void to_neighbours(uint32_t (&low)[8], int part) {
#pragma unroll
  for (int bit = Traits::kLanes / 2; bit > 0; bit /= 2) {
    const bool upper = part & bit;
#pragma unroll
    for (int o = 0; o < 4; ++o) {
      const uint32_t other = __shfl_xor_sync(0xffffffff, upper ? low[o] : low[o + 4], bit);
      low[o] = upper ? other : low[o];
      low[o + 4] = upper ? low[o + 4] : other;
    }
  }
}

// The bytes of a token in its value block. A lane has N words for even and N for odd channels (parity 0 and 1): channel
// g = 2 i + parity is byte i of word n, and byte b of word n of the block at kLaneBytes * (4 g + q) plus an offset.
template <typename Traits, Width WIDTH>
struct ValueWords {
  static constexpr int kCount = format::is_spread(WIDTH) ? format::kSpreadUnits : format::num_bits(WIDTH) / 2;
  static constexpr int kUnits = Traits::kDim * format::num_bits(WIDTH) / 64;
  static constexpr int kLaneBytes =
      4 * (format::is_spread(WIDTH) ? format::kSpreadUnits : std::min(format::kChunkUnits, kUnits));
  uint32_t even[kCount], odd[kCount];
};

// Stores the words of tokens that are a value block, in its order. The four tokens that share words are in four lanes,
// which transpose 4 x 4 bytes among them: a lane gets the words of i = its b.
template <typename Traits, Width WIDTH>
struct WholeBlock {
  using Words = ValueWords<Traits, WIDTH>;
  uint8_t* block;
  int number;  // of the lane's token

  __device__ __forceinline__ void put(Words& w, int offset) const {
    constexpr int near = Traits::kLanes,
                  far = Traits::kLanes == 4 ? 16 : 8 * Traits::kLanes;  // the lane of token ^ 1, token ^ 8
    const int q = value_q(number), b = value_b(number);
    const uint32_t first = b & 1 ? 0x3715 : 0x6240, second = b & 2 ? 0x3276 : 0x5410;
#pragma unroll
    for (int n = 0; n < Words::kCount; ++n) {
      w.even[n] = select_bytes(w.even[n], __shfl_xor_sync(0xffffffff, w.even[n], near), first);
      w.even[n] = select_bytes(w.even[n], __shfl_xor_sync(0xffffffff, w.even[n], far), second);
      w.odd[n] = select_bytes(w.odd[n], __shfl_xor_sync(0xffffffff, w.odd[n], near), first);
      w.odd[n] = select_bytes(w.odd[n], __shfl_xor_sync(0xffffffff, w.odd[n], far), second);
    }
    uint8_t* to = block + offset + Words::kLaneBytes * (8 * b + q);
    put_words(to, w.even);
    put_words(to + 4 * Words::kLaneBytes, w.odd);
  }
};

// Stores the words of any tokens, a byte at a time. First the lanes of as many neighbouring tokens as there are words
// exchange them, so that lane n of them has word n of each token: what they then store at once lies side by side.
template <typename Traits, Width WIDTH>
struct ScatteredTokens {
  using Words = ValueWords<Traits, WIDTH>;
  static constexpr int kTogether = Words::kCount == 3 ? 4 : Words::kCount;
  uint8_t* at[kTogether];  // of each token the first byte that it owns; null: it is not stored
  int own;                 // the lane's token among these

  // block: null if the lane's token is not stored. All lanes of the warp take part.
  __device__ __forceinline__ ScatteredTokens(uint8_t* block, int number, int lane)
      : own(lane / Traits::kLanes % kTogether) {
    if (block) block += Words::kLaneBytes * value_q(number) + value_b(number);
#pragma unroll
    for (int t = 0; t < kTogether; ++t) {
      const int from = lane + (t - own) * Traits::kLanes;
      at[t] = reinterpret_cast<uint8_t*>(__shfl_sync(0xffffffff, reinterpret_cast<uint64_t>(block), from));
    }
  }

  __device__ __forceinline__ void put(const Words& w, int offset) const {
    uint32_t even[kTogether], odd[kTogether];
#pragma unroll
    for (int n = 0; n < kTogether; ++n) {
      even[n] = n < Words::kCount ? w.even[n % Words::kCount] : 0;
      odd[n] = n < Words::kCount ? w.odd[n % Words::kCount] : 0;
    }
    exchange(even);
    exchange(odd);
#pragma unroll
    for (int t = 0; t < kTogether; ++t) {
      if (at[t] == nullptr || own >= Words::kCount) continue;
      uint8_t* to = at[t] + offset + 4 * own;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        __stwb(to + Words::kLaneBytes * 8 * i, static_cast<uint8_t>(even[t] >> 8 * i));
        __stwb(to + Words::kLaneBytes * (8 * i + 4), static_cast<uint8_t>(odd[t] >> 8 * i));
      }
    }
  }

 private:
  // Word n of lane t becomes word t of lane n.
  __device__ __forceinline__ void exchange(uint32_t (&word)[kTogether]) const {
#pragma unroll
    for (int bit = 1; bit < kTogether; bit *= 2) {
      const bool upper = own & bit;
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        if (n & bit) continue;
        const uint32_t other = __shfl_xor_sync(0xffffffff, upper ? word[n] : word[n | bit], bit * Traits::kLanes);
        word[n] = upper ? other : word[n];
        word[n | bit] = upper ? word[n | bit] : other;
      }
    }
  }
};

// Stores a lane's codes in value blocks: eight words of LaneCodes::low, or 16 of 8-bit codes.
template <typename Traits, Width WIDTH, typename Tokens>
__device__ __forceinline__ void put_value(const uint32_t* codes, int part, const Tokens& tokens) {
  // Bytes with a channel of octet a in the low nibble and of octet b in the high one: of even channels, of odd
  // channels.
  const auto even = [](uint32_t a, uint32_t b) { return select_bits(0x0F0F0F0F, a, b << 4); };
  const auto odd = [](uint32_t a, uint32_t b) { return select_bits(0x0F0F0F0F, a >> 4, b); };
  using Words = ValueWords<Traits, WIDTH>;
  if constexpr (format::is_spread(WIDTH)) {  // a set of 64 channels
    uint32_t e[4], o[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      e[j] = even(codes[2 * j], codes[2 * j + 1]), o[j] = odd(codes[2 * j], codes[2 * j + 1]);
    }
    Words w;
#pragma unroll
    for (int j = 0; j < 3; ++j) {
      w.even[j] = e[j] | (e[3] << (3 - j) & 0x88888888);
      w.odd[j] = o[j] | (o[3] << (3 - j) & 0x88888888);
    }
    tokens.put(w, format::kSpreadBytes * part);
  } else {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t* c = codes + (format::levels_are_codes(WIDTH) ? 8 : 4) * h;
      Words w;
      if constexpr (format::levels_are_codes(WIDTH)) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          w.even[n] = select_bytes(c[2 * n], c[2 * n + 1], 0x6420);
          w.odd[n] = select_bytes(c[2 * n], c[2 * n + 1], 0x7531);
        }
      } else if constexpr (WIDTH == Width::k4) {
        w = {{even(c[0], c[1]), even(c[2], c[3])}, {odd(c[0], c[1]), odd(c[2], c[3])}};
      } else {
        static_assert(WIDTH == Width::k2, "no such values");
        w = {{close_twos(even(c[0], c[1]), even(c[2], c[3]))}, {close_twos(odd(c[0], c[1]), odd(c[2], c[3]))}};
      }
      // A half of a lane is a group of 32 channels, whose words lie in a chunk.
      const int word = Traits::group(part, h) * Words::kCount;
      tokens.put(w, format::kChunkBytes * (word / format::kChunkUnits) + 4 * (word % format::kChunkUnits));
    }
  }
}

// Stores a group of 32 channels of 8-bit codes in a row, of a key or dense.
__device__ __forceinline__ void put_byte_group(const uint32_t* codes, int group, uint8_t* row) {
  put_words<4>(row + 32 * group, {codes[0], codes[1], codes[2], codes[3]});
  put_words<4>(row + 32 * group + 16, {codes[4], codes[5], codes[6], codes[7]});
}

}  // namespace turboquant::cuda
