// Single float32 vectors, as the ops handle them between kernels.
#pragma once

#include "cpu/kernels.h"

namespace turboquant::cpu {

inline void rotate(float* y, const float* signs, format::Split split) { kernels().rotate(y, signs, split); }
inline void rotate_back(float* y, const float* signs, format::Split split) { kernels().rotate_back(y, signs, split); }

inline void multiply(float* x, const float* y, int64_t d) {
  for (int64_t c = 0; c < d; ++c) x[c] *= y[c];
}

// Dot product in sixteen partial sums, so that compilers vectorise it without reassociating anything themselves.
inline float dot(const float* a, const float* b, int64_t d) {
  float part[16] = {};
  int64_t c = 0;
  for (; c + 16 <= d; c += 16) {
    for (int i = 0; i < 16; ++i) part[i] += a[c + i] * b[c + i];
  }
  for (; c < d; ++c) part[c % 16] += a[c] * b[c];
  for (int n = 8; n > 0; n /= 2) {
    for (int i = 0; i < n; ++i) part[i] += part[i + n];
  }
  return part[0];
}

}  // namespace turboquant::cpu
