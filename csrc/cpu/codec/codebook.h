// Vectors on torch's side of the seam: codebooks, checked and prepared for the kernels of codec.h, and what the ops do with a
// single vector.
#pragma once

#include <cfloat>
#include <cmath>

#include "cpu/common/torch.h"
#include "cpu/kernels.h"

namespace turboquant::cpu {

// What the codes of a width stand for, as the kernels take it: int8 [32], codes up to 5 bits.
struct Levels {
  int8_t of[32] = {};
  // levels: int8 [2^bits] or null (uniform grid)
  Levels(int bits, const int8_t* levels) {
    for (int code = 0; bits <= 5 && code < 1 << bits; ++code) {
      of[code] = static_cast<int8_t>(format::level_of_code(bits, levels, code));
    }
  }
};

// Levels and boundaries of every candidate step, prepared once per call.
class Codebook {
 public:
  // steps: [num_steps], borrowed
  Codebook(int bits, const int8_t* levels, const float* steps, int num_steps)
      : bits_(bits), num_steps_(num_steps), steps_(steps), levels_(bits, levels) {
    if (bits == 8) return;  // its boundaries are computed where they are needed
    boundaries_.resize(64 * num_steps);
    for (int s = 0; s < num_steps; ++s) {
      const float units = steps[s] * (format::kUnitsPerSigma / 2 / static_cast<float>(format::boundary_grain(bits)));
      for (int node = 1; node < 1 << bits; ++node) {
        int depth = 0;
        while (node >> (depth + 1)) ++depth;
        const int upper = (2 * (node - (1 << depth)) + 1) << (bits - 1 - depth);  // the rank above the boundary
        const float boundary = std::nearbyint(static_cast<float>(levels_.of[upper - 1] + levels_.of[upper]) * units);
        // beyond every coordinate, a limit changes nothing
        boundaries_[64 * s + node] = static_cast<int16_t>(std::clamp(boundary, -32767.0f, 32767.0f));
      }
    }
  }

  // For vectors of d channels; borrows from this.
  Quantiser quantiser(int64_t d, int64_t scale_mode) const {
    const double root = std::sqrt(static_cast<double>(d));
    return {bits_,
            num_steps_,
            static_cast<int>(scale_mode),
            steps_,
            boundaries_.data(),
            levels_.of,
            static_cast<float>(format::kUnitsPerSigma * root),
            static_cast<float>(32 / root),
            static_cast<float>(32 * root)};
  }

 private:
  int bits_, num_steps_;
  const float* steps_;
  Levels levels_;
  std::vector<int16_t> boundaries_;  // [num_steps, 64], kernels.h
};

// Levels must increase and be symmetric; the CPU can look, so it does.
inline const int8_t* checked_levels(const OptionalTensor& levels, const Tensor& first, int64_t bits, const char* name) {
  check_levels(levels, first, bits, name);
  if (!levels) return nullptr;
  const int8_t* l = static_cast<const int8_t*>(levels->data_ptr());
  const int n = 1 << bits;
  bool good = true;
  for (int i = 0; i < n; ++i) good &= l[i] == -l[n - 1 - i] && (i == 0 || l[i - 1] < l[i]);
  STD_TORCH_CHECK(good, name, " must increase and be symmetric (level i = -level ", n - 1, " - i)");
  return l;
}

inline Codebook checked_codebook(const Tensor& first, const OptionalTensor& levels, const Tensor& steps, int64_t bits,
                                 const char* levels_name, const char* steps_name) {
  const int8_t* l = checked_levels(levels, first, bits, levels_name);
  check_steps(steps, first, steps_name);
  const float* s = static_cast<const float*>(steps.data_ptr());
  const int n = static_cast<int>(steps.size(0));
  bool good = true;
  for (int i = 0; i < n; ++i) good &= s[i] > (i ? s[i - 1] : 0.0f) && s[i] <= FLT_MAX;
  STD_TORCH_CHECK(good, steps_name, " must be positive, finite and increasing");
  return Codebook(static_cast<int>(bits), l, s, n);
}

// A checked constant's numbers, or null.
inline const float* floats_of(const OptionalTensor& t) {
  return t ? static_cast<const float*>(t->data_ptr()) : nullptr;
}

// ---- Single vectors --------------------------------------------------------------------------------------------------

inline void rotate(float* y, const float* signs, format::Split split) { kernels().rotate(y, signs, split); }
inline void rotate_back(float* y, const float* signs, format::Split split) { kernels().rotate_back(y, signs, split); }

// 2^e for |e| <= 126, exactly.
inline float power_of_two(int e) {
  const uint32_t bits = static_cast<uint32_t>(e + 127) << 23;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// The exponent by which a vector is scaled before any sum of squares, so that nothing over- or underflows.
inline int prescale_exponent(float amax) {
  uint32_t bits;
  std::memcpy(&bits, &amax, sizeof bits);
  return std::clamp(static_cast<int>(bits >> 23 & 255) - 127, -100, 100);
}

// max |x|, or infinity when any channel is NaN or infinite.
inline float finite_amax(const float* x, int d) {
  float amax = 0;
  bool finite = true;
  for (int c = 0; c < d; ++c) {
    const float a = std::fabs(x[c]);
    finite &= a <= FLT_MAX;
    amax = a > amax ? a : amax;
  }
  return finite ? amax : INFINITY;
}

inline void add(float* x, const float* y, int64_t d) {
  for (int64_t c = 0; c < d; ++c) x[c] += y[c];
}

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
