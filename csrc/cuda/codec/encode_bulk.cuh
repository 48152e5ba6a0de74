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
//
// Here are tables and encoding. Vectors in lanes and their rotation are encode_bulk_vectors.cuh, stores are
// encode_bulk_stores.cuh, and encode_bulk.cu has the kernel.
#pragma once

#include <algorithm>

#include "cuda/codec/encode_bulk_vectors.cuh"
#include "cuda/common/mma.cuh"

namespace turboquant::cuda {

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

// The words of fill_level_bytes in registers. WIDE: for 16 magnitudes, else for 8.
template <bool WIDE>
struct LevelBytes {
  uint32_t word[WIDE ? 4 : 2];

  __device__ __forceinline__ explicit LevelBytes(const uint32_t* words) {
#pragma unroll
    for (int i = 0; i < (WIDE ? 4 : 2); ++i) word[i] = words[i];
  }
  __device__ __forceinline__ uint32_t of(uint32_t nibbles) const {
    return levels_of_nibbles<WIDE>(word[0], word[1], word[WIDE ? 2 : 0], word[WIDE ? 3 : 1], nibbles);
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

// Encodes with the best of several candidates; |u| < 2^17. Bit 16 is set in one coordinate of a vector at most, because
// the squares add up to 2^32: its share of the sums is added separately.
template <typename Traits, bool WIDE>
__device__ __forceinline__ Fit encode_search(const float (&y)[64], const float (&k)[2], int part, bool finite,
                                             const TableBook& with, LaneCodes& codes) {
  const SharedCodebook& book = *with.book;
  const float middle = table_middle<Traits, true>(with.table, finite);
  const uint32_t all_magnitudes = WIDE ? 0xFFFFFFFF : with.magnitudes(0x11111111);
  const LevelBytes<WIDE> levels(with.levels);

  uint32_t dot[kMostCandidates] = {}, square[kMostCandidates] = {};
  bool over = false;
  uint32_t entry_over = 0;  // of the coordinate with bit 16
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
    if (Traits::kDim > 128 && ((u[0] | u[1] | u[2] | u[3]) & 0x10000)) {
      over = true;
#pragma unroll
      for (int j = 0; j < 4; ++j) entry_over = u[j] & 0x10000 ? entry[j] : entry_over;
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

  if (Traits::kDim > 128 && over) {
#pragma unroll
    for (int s = 0; s < kMostCandidates; ++s) {
      dot[s] += static_cast<uint32_t>(book.level[entry_over >> 4 * s & with.magnitudes(1)]) << 16;
    }
  }
  // The lanes of a vector divide the candidates between them, and then exchange the best of each share.
  constexpr int kOwn = kMostCandidates / Traits::kLanes;
  divide_candidates<Traits::kLanes>(dot, square, part);
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
#pragma unroll
  for (int bit = 1; bit < Traits::kLanes; bit *= 2) {
    const float merit = __shfl_xor_sync(0xffffffff, best_merit, bit);
    const int other = __shfl_xor_sync(0xffffffff, kept, bit), other_dot = __shfl_xor_sync(0xffffffff, kept_dot, bit),
              other_square = __shfl_xor_sync(0xffffffff, kept_square, bit);
    if (merit > best_merit || (merit == best_merit && other < kept)) {  // of equal candidates, the first wins
      best_merit = merit, kept = other, kept_dot = other_dot, kept_square = other_square;
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

}  // namespace turboquant::cuda
