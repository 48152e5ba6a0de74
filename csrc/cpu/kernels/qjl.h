// The sketch of a vector: its inner products with the rows of a dense projection, each summed by the fixed tree of
// docs/format.md section 5, and their signs as bits.
#pragma once

#include "cpu/kernels.h"
#include "cpu/kernels/vector_codec.h"
#include "cpu/simd.h"

namespace turboquant::cpu::TURBOQUANT_LEVEL {

inline Prescaled prescale(float* x, format::Split split) {
  const int d = split.blocks * split.block;
  Ints most = broadcast(0);
  for (int c = 0; c < d; c += 16) most = max(most, as_ints(abs(load_some<false>(x + c, d - c))));
  const int32_t bits = greatest(most);
  if (bits >= kNotFinite) {
    memset(x, 0, sizeof(float) * d);
    return {.length = __builtin_nanf(""), .up = 1};
  }
  const int e = scale_exponent(bits_to_float(static_cast<uint32_t>(bits)));
  const Floats down = broadcast(power_of_two(-e));
  alignas(64) float squares[kMaxRow];
  for (int c = 0; c < d; c += 16) {
    const Floats v = load_some<false>(x + c, d - c) * down;
    store_some<false>(x + c, v, d - c);
    store(squares + c, v * v);
  }
  return {.length = __builtin_sqrtf(tree_sum(squares, split)), .up = power_of_two(e)};
}

// Sixteen sums of VECTORS neighbouring products each, of 16 * VECTORS channels.
template <int VECTORS>
ALWAYS_INLINE Floats sums_of_neighbours(const float* row, const float* x) {
  if constexpr (VECTORS == 1) {
    return load(row) * load(x);
  } else {
    constexpr int kHalf = 8 * VECTORS;
    return pair_sums(sums_of_neighbours<VECTORS / 2>(row, x), sums_of_neighbours<VECTORS / 2>(row + kHalf, x + kHalf));
  }
}
// The same of a block of n channels, a power of two from 16 on.
inline Floats sums_of_block(const float* row, const float* x, int n) {
  switch (n) {
    case 16: return sums_of_neighbours<1>(row, x);
    case 32: return sums_of_neighbours<2>(row, x);
    case 64: return sums_of_neighbours<4>(row, x);
    case 128: return sums_of_neighbours<8>(row, x);
    case 256: return sums_of_neighbours<16>(row, x);
    default: return pair_sums(sums_of_block(row, x, n / 2), sums_of_block(row + n / 2, x + n / 2, n / 2));
  }
}

// Up to sixteen rows, `stride` apart.
inline void project_rows(const float* rows, int count, int64_t stride, format::Split split, const float* x,
                         float* out) {
  Floats total = broadcast(0.0f);
  for (int b = 0; b < split.blocks; ++b) {
    const int64_t block = static_cast<int64_t>(b) * split.block;
    Floats part[16];
    for (int r = 0; r < 16; ++r) {
      part[r] = r < count ? sums_of_block(rows + r * stride + block, x + block, split.block) : broadcast(0.0f);
    }
#pragma GCC unroll 4
    for (int n = 8; n > 0; n /= 2) {  // in the end lane r holds the sum of row r
#pragma GCC unroll 8
      for (int i = 0; i < n; ++i) part[i] = pair_sums(part[2 * i], part[2 * i + 1]);
    }
    total = b ? total + part[0] : part[0];
  }
  float lane[16];
  store(lane, total);
  memcpy(out, lane, count * sizeof(float));
}

// A row whose blocks are shorter than a vector.
inline float project_row(const float* row, format::Split split, const float* x) {
  float total = 0;
  for (int b = 0; b < split.blocks; ++b) {
    float t[8] = {};
    for (int i = 0; i < split.block; ++i) t[i] = row[b * split.block + i] * x[b * split.block + i];
    for (int n = split.block / 2; n > 0; n /= 2) {
      for (int i = 0; i < n; ++i) t[i] = t[2 * i] + t[2 * i + 1];
    }
    total = b ? total + t[0] : t[0];
  }
  return total;
}

inline void project(const float* matrix, int64_t rows, format::Split split, const float* x, float* out) {
  const int64_t d = static_cast<int64_t>(split.blocks) * split.block;
  if (split.block < 16) {
    for (int64_t i = 0; i < rows; ++i) out[i] = project_row(matrix + i * d, split, x);
    return;
  }
  for (int64_t i = 0; i < rows; i += 16) {
    project_rows(matrix + i * d, rows - i < 16 ? static_cast<int>(rows - i) : 16, d, split, x, out + i);
  }
}

// count: a multiple of 8
inline void sign_bits(const float* x, int64_t count, uint8_t* bits) {
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const uint16_t some = mask_bits(broadcast(0.0f) <= load(x + i));
    memcpy(bits + i / 8, &some, 2);
  }
  if (i == count) return;
  float rest[16] = {};
  memcpy(rest, x + i, 8 * sizeof(float));
  bits[i / 8] = static_cast<uint8_t>(mask_bits(broadcast(0.0f) <= load(rest)));
}

// ---- Many sketches --------------------------------------------------------------------------------------------------
//
// Only the signs of sums are stored, and few sums are so close to zero that their order or precision decides about the
// sign. So the sums of many vectors are estimated in an order that suits the processor, and those that may be one of
// these few are computed again by the tree.
//
// How far the two may be apart, in units of 2^-24 |vector| |row|, which is at least 2^-24 times the sum of all
// magnitudes (Cauchy and Schwarz): one for each rounding that a product goes through. The estimate has kSegment + 1 of
// them in a segment of channels and one more for each segment, the tree at most 23 for products, levels and blocks.
constexpr int kSegment = 128;

inline void sketch_panels(const SketchPanels& p, int64_t begin, int64_t end) {
  const int64_t d = static_cast<int64_t>(p.split.blocks) * p.split.block;
  const float unit = 1.01f * static_cast<float>(kSegment + 1 + (d + kSegment - 1) / kSegment + 23) * 0x1p-24f;
  for (int64_t i = begin; i < end; ++i) {
    float* to = p.panels + i * d * kPanelRows;
    const float* from = p.matrix + i * kPanelRows * d;
    const int64_t left = p.rows - i * kPanelRows, rows = left < kPanelRows ? left : kPanelRows;
    Floats square = broadcast(0.0f);
    for (int64_t c = 0; c < d; ++c) {
      float channel[kPanelRows] = {};
      for (int64_t r = 0; r < rows; ++r) channel[r] = from[r * d + c];
      const Floats x = load(channel);
      store(to + c * kPanelRows, x);
      square = add_product(square, x, x);
    }
    float of_row[kPanelRows];
    store(of_row, square);
    for (int r = 0; r < kPanelRows; ++r) {
      // Numbers of other sizes may leave what sums of float32 can hold.
      const bool plain = of_row[r] >= 0x1p-100f && of_row[r] <= 0x1p100f;
      p.bounds[i * kPanelRows + r] = plain ? unit * __builtin_sqrtf(of_row[r]) : kInfinity;
    }
  }
}

// The sums of kSums vectors of d channels with the rows of a panel.
ALWAYS_INLINE void estimate(const float* panel, const float* x, int64_t d, Floats (&sums)[kSums]) {
#pragma GCC unroll kSums
  for (int v = 0; v < kSums; ++v) sums[v] = broadcast(0.0f);
  for (int64_t begin = 0; begin < d; begin += kSegment) {
    const int64_t end = begin + kSegment < d ? begin + kSegment : d;
    Floats own[kSums];
#pragma GCC unroll kSums
    for (int v = 0; v < kSums; ++v) own[v] = broadcast(0.0f);
    for (int64_t c = begin; c < end; ++c) {
      const Floats row = load(panel + c * kPanelRows);
#pragma GCC unroll kSums
      for (int v = 0; v < kSums; ++v) own[v] = add_product(own[v], broadcast(x[v * d + c]), row);
    }
#pragma GCC unroll kSums
    for (int v = 0; v < kSums; ++v) sums[v] = sums[v] + own[v];
  }
}

// How long a vector is for the bounds of its sums: infinitely, where none is trusted.
inline float trusted_length(float length) {
  if (length == 0) return -1;  // sums of zeros are zeros, unless a row has a NaN or an infinity: its bound is infinite
  // Shorter vectors are those that a limited power of two left short. Their products may be too small for float32.
  return length >= 0x1p-30f && length <= 0x1p50f ? length : kInfinity;
}

inline void sketch_signs(const SketchPanels& p, const float* x, const float* length, int64_t count, uint8_t* bits) {
  static_assert(kSketchVectors % kSums == 0);
  const int64_t d = static_cast<int64_t>(p.split.blocks) * p.split.block, row_bytes = p.rows / 8;
  for (int64_t row = 0; row < p.rows; row += kPanelRows) {
    const float* panel = p.panels + row * d;
    const Floats bound = load(p.bounds + row);
    const int rows = p.rows - row < kPanelRows ? static_cast<int>(p.rows - row) : kPanelRows;
    for (int64_t first = 0; first < count; first += kSums) {
      Floats sums[kSums];
      estimate(panel, x + first * d, d, sums);
      for (int64_t v = first; v < count && v < first + kSums; ++v) {
        const Floats sum = sums[v - first];
        const Mask trusted = broadcast(trusted_length(length[v])) * bound < abs(sum);
        unsigned signs = mask_bits(broadcast(0.0f) <= sum);
        unsigned doubts = ~mask_bits(trusted) & ((1u << rows) - 1);
        if (length[v] != length[v]) signs = doubts = 0;
        for (; doubts; doubts &= doubts - 1) {
          const int r = __builtin_ctz(doubts);
          float exact;
          project(p.matrix + (row + r) * d, 1, p.split, x + v * d, &exact);
          signs = (signs & ~(1u << r)) | static_cast<unsigned>(exact >= 0) << r;
        }
        const uint16_t some = static_cast<uint16_t>(signs);
        memcpy(bits + v * row_bytes + row / 8, &some, rows / 8);
      }
    }
  }
}

}  // namespace turboquant::cpu::TURBOQUANT_LEVEL
