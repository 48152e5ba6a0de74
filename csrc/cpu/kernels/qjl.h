// The sketch of a vector: its inner products with the rows of a dense projection, each summed by the fixed tree of
// docs/format.md section 5, and their signs as bits.
#pragma once

#include "cpu/kernels.h"
#include "cpu/simd.h"

namespace turboquant::cpu::TURBOQUANT_LEVEL {

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

}  // namespace turboquant::cpu::TURBOQUANT_LEVEL
