// The signed orthonormal Walsh-Hadamard transform of one vector, in the fixed order of docs/format.md section 2, and the
// fixed summation tree of section 5. Everything that rotates on the CPU calls these.
#pragma once

#include <cmath>

#include "../format.h"

namespace turboquant::cpu {

// float32(1 / sqrt(n)): what makes the butterflies of a block orthonormal.
inline float block_norm(format::Split split) {
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(split.block)));
}

// The butterflies of every block. y: [blocks * block]
inline void butterflies(float* y, format::Split split) {
  for (int b = 0; b < split.blocks; ++b) {
    float* x = y + b * split.block;
    for (int h = 1; h < split.block; h *= 2) {
      for (int i = 0; i < split.block; i += 2 * h) {
        for (int j = i; j < i + h; ++j) {
          const float p = x[j], q = x[j + h];
          x[j] = p + q;
          x[j + h] = p - q;
        }
      }
    }
  }
}

// The orthonormal m x m factor across blocks.
inline void mix_blocks(float* y, format::Split split) {
  const int m = split.blocks, n = split.block;
  if (m == 1) return;
  for (int i = 0; i < n; ++i) {
    float in[format::kMaxBlocks];
    for (int j = 0; j < m; ++j) in[j] = y[j * n + i];
    for (int b = 0; b < m; ++b) {
      float sum = format::hartley(m, 0) * in[0];
      for (int j = 1; j < m; ++j) sum += format::hartley(m, b * j % m) * in[j];
      y[b * n + i] = sum;
    }
  }
}

// core(y) but for the factor 1 / sqrt(n): what an encoder needs, whose codes do not depend on the length.
inline void transform_unscaled(float* y, format::Split split) {
  butterflies(y, split);
  mix_blocks(y, split);
}

// core(y), in place.
inline void transform(float* y, format::Split split) {
  butterflies(y, split);
  const float norm = block_norm(split);
  for (int c = 0; c < split.blocks * split.block; ++c) y[c] *= norm;
  mix_blocks(y, split);
}

// Multiplication by the signs, the other half of the rotation.
inline void apply_signs(float* y, const float* signs, int d) {
  for (int c = 0; c < d; ++c) y[c] *= signs[c];
}

inline void rotate(float* y, const float* signs, format::Split split) {
  apply_signs(y, signs, split.blocks * split.block);
  transform(y, split);
}

inline void rotate_back(float* y, const float* signs, format::Split split) {
  transform(y, split);
  apply_signs(y, signs, split.blocks * split.block);
}

// Sum of p[d] over neighbouring pairs, then over blocks in order; destroys p.
inline float tree_sum(float* p, format::Split split) {
  float total = 0;
  for (int b = 0; b < split.blocks; ++b) {
    float* t = p + b * split.block;
    for (int n = split.block / 2; n > 0; n /= 2) {
      for (int i = 0; i < n; ++i) t[i] = t[2 * i] + t[2 * i + 1];
    }
    total = b ? total + t[0] : t[0];
  }
  return total;
}

}  // namespace turboquant::cpu
