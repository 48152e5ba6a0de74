// Encoding and decoding of one vector (docs/format.md sections 4 to 6), shared by the standalone codec and the paged cache.
//
// After rotation and scaling to length sqrt(d), coordinates become integers in units of 2^-12 sigma. Finding a code is
// then an integer comparison and every sum over channels that decides anything is an integer sum: the bytes do not
// depend on the order in which a device adds.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <vector>

#include "../format.h"
#include "hadamard.h"
#include "runtime.h"

namespace turboquant::cpu {

enum class ScaleMode { kNorm = 0, kPreserve = 1, kMse = 2, kUnbiased = 3 };

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

// Levels and boundaries of every candidate step, prepared once per call.
class Codebook {
 public:
  // levels: int8 [2^bits] or null (uniform grid); steps: [num_steps]
  Codebook(int bits, const int8_t* levels, const float* steps, int num_steps)
      : bits_(bits), steps_(steps, steps + num_steps), levels_(format::num_levels(bits)) {
    const int n = format::num_levels(bits);
    for (int r = 0; r < n; ++r) levels_[r] = levels ? levels[r] : format::uniform_level(bits, r);
    const int grain = format::boundary_grain(bits);
    for (float step : steps_) {
      const float units = step * (format::kUnitsPerSigma / 2 / static_cast<float>(grain));
      for (int r = 0; r + 1 < n; ++r) {
        const float boundary = std::nearbyint(static_cast<float>(levels_[r] + levels_[r + 1]) * units);
        boundaries_.push_back(grain *
                              static_cast<int>(std::clamp(boundary, -format::kMaxBoundary, format::kMaxBoundary)));
      }
    }
  }

  int bits() const { return bits_; }
  int num_steps() const { return static_cast<int>(steps_.size()); }
  float step(int s) const { return steps_[s]; }
  int level(int rank) const { return levels_[rank]; }

  // rank[c] = how many boundaries of candidate s are <= u[c].
  void quantise(int s, const int32_t* u, int32_t* rank, int d) const {
    const int n = static_cast<int>(levels_.size()) - 1;
    const int32_t* boundary = boundaries_.data() + static_cast<size_t>(s) * n;
    if (n > 32) {
      for (int c = 0; c < d; ++c)
        rank[c] = static_cast<int32_t>(std::upper_bound(boundary, boundary + n, u[c]) - boundary);
      return;
    }
    std::fill(rank, rank + d, 0);
    for (int i = 0; i < n; ++i) {  // few boundaries: whole rows of comparisons, which compilers vectorise
      const int32_t t = boundary[i];
      for (int c = 0; c < d; ++c) rank[c] += t <= u[c];
    }
  }

 private:
  int bits_;
  std::vector<float> steps_;
  std::vector<int32_t> levels_;      // [ranks]
  std::vector<int32_t> boundaries_;  // [num_steps, ranks - 1]
};

// Encodes vectors of one kind (keys, values or standalone). Not shared between threads: it owns its scratch.
class Encoder {
 public:
  Encoder(const Codebook& book, const float* signs, format::Split split, ScaleMode mode)
      : book_(book), signs_(signs), split_(split), mode_(mode), d_(split.blocks * split.block), u_(d_), rank_(d_),
        best_(d_), squares_(d_) {}

  // x: [d] float32 with the center already subtracted, destroyed. codes: [d]. Returns the float16 bits of the scale.
  uint16_t operator()(float* x, uint8_t* codes) {
    const float amax = finite_amax(x, d_);
    if (!(amax <= FLT_MAX)) {
      std::memset(codes, 0, d_);
      return format::kNanScale;
    }
    const int e = prescale_exponent(amax);
    const float down = power_of_two(-e);
    for (int c = 0; c < d_; ++c) x[c] *= down;
    apply_signs(x, signs_, d_);
    transform_unscaled(x, split_);
    for (int c = 0; c < d_; ++c) squares_[c] = x[c] * x[c];
    const float length = std::sqrt(tree_sum(squares_.data(), split_));

    if (amax == 0) {
      std::fill(u_.begin(), u_.end(), 0);
    } else {
      const float k = static_cast<float>(format::kUnitsPerSigma * std::sqrt(static_cast<double>(d_))) / length;
      for (int c = 0; c < d_; ++c) u_[c] = static_cast<int32_t>(std::nearbyint(x[c] * k));
    }
    const Fit fit = search();
    for (int c = 0; c < d_; ++c) codes[c] = format::code_of_rank(book_.bits(), best_[c]);
    if (amax == 0 || fit.a <= 0) return 0;
    return half_bits(std::min(scale(fit, length * block_norm(split_)) * power_of_two(e), format::kMaxHalf));
  }

 private:
  // Best candidate so far: its sums in float32, its step, its merit.
  struct Fit {
    float a, b, step, merit;
  };

  // Leaves the ranks of the candidate with the least squared error in best_; ties keep the smaller step.
  Fit search() {
    Fit best{0, 0, 0, -1};
    for (int s = 0; s < book_.num_steps(); ++s) {
      book_.quantise(s, u_.data(), rank_.data(), d_);
      int32_t dot = 0, square = 0;
      for (int c = 0; c < d_; ++c) {
        const int32_t level = book_.level(rank_[c]);
        dot += u_[c] * level;
        square += level * level;
      }
      const float a = static_cast<float>(dot) * (1 / format::kUnitsPerSigma), b = static_cast<float>(square);
      const float merit = dot > 0 ? a * a / b : 0;
      if (merit > best.merit) {
        best = {a, b, book_.step(s), merit};
        std::swap(rank_, best_);
      }
    }
    return best;
  }

  // docs/format.md section 5, step 7, before the power of two is put back.
  float scale(const Fit& fit, float r) const {
    const double root = std::sqrt(static_cast<double>(d_));
    const float over = static_cast<float>(32 / root), times = static_cast<float>(32 * root);
    switch (mode_) {
      case ScaleMode::kNorm: return r * over * fit.step;
      case ScaleMode::kPreserve: return r * 32 / std::sqrt(fit.b);
      case ScaleMode::kMse: return r * over * (fit.a / fit.b);
      default: return r * times / fit.a;
    }
  }

  const Codebook& book_;
  const float* signs_;
  format::Split split_;
  ScaleMode mode_;
  int d_;
  std::vector<int32_t> u_, rank_, best_;
  std::vector<float> squares_;
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

inline void subtract(float* x, const float* y, int64_t d) {
  for (int64_t c = 0; c < d; ++c) x[c] -= y[c];
}
inline void add(float* x, const float* y, int64_t d) {
  for (int64_t c = 0; c < d; ++c) x[c] += y[c];
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

// What every code of a width stands for, as float32 levels times kLevelUnit: one look-up per channel.
class LevelTable {
 public:
  LevelTable(int bits, const int8_t* levels) : value_(1 << bits) {
    for (int code = 0; code < 1 << bits; ++code) {
      value_[code] = static_cast<float>(format::level_of_code(bits, levels, code));
    }
  }
  // out[c] = (scale / 32) * level: the vector in the rotated space. Exact in float32.
  void decode(const uint8_t* codes, float scale, float* out, int d) const {
    const float unit = scale * format::kLevelUnit;
    for (int c = 0; c < d; ++c) out[c] = unit * value_[codes[c]];
  }

 private:
  std::vector<float> value_;  // [2^bits]
};

}  // namespace turboquant::cpu
