// Codebooks: levels and boundaries, checked and prepared for the kernels.
#pragma once

#include <cfloat>
#include <cmath>

#include "cpu/common/torch.h"
#include "cpu/kernels.h"

namespace turboquant::cpu {

// The levels of all codes, as kernels take them; empty where codes are levels.
struct Levels {
  int8_t of[kTableLevels] = {};
  // levels: int8 [2^bits], or null for the uniform grid
  Levels(format::Width width, const int8_t* levels) {
    if (format::levels_are_codes(width)) return;
    for (int code = 0; code < format::num_levels(width); ++code) {
      of[code] = static_cast<int8_t>(format::level_of_code(width, levels, code));
    }
  }
};

// The greatest absolute value that a code can mean, even the byte 0x80, which is never written. levels: Levels::of
inline int greatest_level(format::Width width, const int8_t* levels) {
  return format::levels_are_codes(width) ? format::kMaxByteLevel + 1 : levels[format::num_levels(width) - 1];
}

// Levels, and boundaries of every candidate step, prepared once per call.
class Codebook {
 public:
  // steps: [num_steps], borrowed
  Codebook(format::Width width, const int8_t* levels, const float* steps, int num_steps)
      : width_(width), num_steps_(num_steps), steps_(steps), levels_(width, levels) {
    if (format::levels_are_codes(width)) return;  // the kernel computes their boundaries
    const int bits = format::num_bits(width);
    boundaries_.resize(kTreeNodes * num_steps);
    for (int s = 0; s < num_steps; ++s) {
      // With the widest units all boundaries but 0 are beyond every coordinate. Wider ones could become infinite.
      constexpr float kWidest = 1 << 20;
      const float grain = static_cast<float>(format::boundary_grain(width));
      const float units = std::min(steps[s] * (format::kUnitsPerSigma / 2 / grain), kWidest);
      for (int node = 1; node < format::num_levels(width); ++node) {
        int depth = 0;
        while (node >> (depth + 1)) ++depth;
        const int upper = (2 * (node - (1 << depth)) + 1) << (bits - 1 - depth);  // the rank above the boundary
        const float boundary = std::nearbyint(static_cast<float>(levels_.of[upper - 1] + levels_.of[upper]) * units);
        // The limit changes no code: it is beyond every coordinate.
        boundaries_[kTreeNodes * s + node] = static_cast<int16_t>(std::clamp(boundary, -32767.0f, 32767.0f));
      }
    }
  }

  // For vectors of d channels. Borrows from this object.
  Quantiser quantiser(int64_t d, format::ScaleMode scale_mode) const {
    const double root = std::sqrt(static_cast<double>(d));
    return {.width = width_,
            .scale_mode = scale_mode,
            .num_steps = num_steps_,
            .steps = steps_,
            .boundaries = boundaries_.data(),
            .levels = levels_.of,
            .units = static_cast<float>(format::kUnitsPerSigma * root),
            .over = static_cast<float>(32 / root),
            .times = static_cast<float>(32 * root)};
  }

 private:
  format::Width width_;
  int num_steps_;
  const float* steps_;
  Levels levels_;
  std::vector<int16_t> boundaries_;  // [num_steps, kTreeNodes], see kernels.h
};

// Levels must increase and be symmetric. The CPU can read them without waiting for a device, so it checks that.
inline const int8_t* checked_levels(const OptionalTensor& levels, const Tensor& first, int64_t bits, const char* name) {
  check_levels(levels, first, bits, name);
  if (!levels) return nullptr;
  const int8_t* l = data_of<int8_t>(*levels);
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
  const float* s = data_of<float>(steps);
  const int n = static_cast<int>(steps.size(0));
  bool good = true;
  for (int i = 0; i < n; ++i) good &= s[i] > (i ? s[i - 1] : 0.0f) && s[i] <= FLT_MAX;
  STD_TORCH_CHECK(good, steps_name, " must be positive, finite and increasing");
  return Codebook(format::as_width(bits), l, s, n);
}

}  // namespace turboquant::cpu
