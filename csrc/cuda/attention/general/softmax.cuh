// The running softmax of a warp's rows: scores become weights, and what has been summed follows when the reference
// changes.
//
// A weight is 2^(score - reference). The reference is an integer that follows a row's largest score: it is raised only
// when a score is more than 2^6 above it, so sums are seldom rescaled, and always by powers of two. A weight times its
// value's scale is rounded to float16 in units of 2^exponent, with an exponent that puts the largest possible product
// between 2^4 and 2^15: what underflows there is below 2^-29 of the row's largest weight so far.
#pragma once

#include "cuda/attention/general/mask.cuh"
#include "cuda/attention/general/value_sums.cuh"
#include "cuda/attention/softmax_math.cuh"

namespace turboquant::cuda::general {

// What a warp needs to know of a step's keys before it weighs them.
struct KeySummary {
  bool all_exist;
  bool finite;       // the scales of all values
  uint32_t largest;  // bits of the largest finite scale of a value
};

template <typename S>
__device__ __forceinline__ KeySummary summarise(const KeyScalars<S>& keys, int lane) {
  bool all_exist = true, finite = true;
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < S::kKeys; i += 32) {
    if (S::kKeys % 32 == 0 || lane < S::kKeys) {
      const uint32_t bits = magnitude_bits(keys.value_scale[i + lane]);
      all_exist = all_exist && keys.position[i + lane] >= 0;
      finite = finite && bits < kInfinityBits;
      if (bits < kInfinityBits) largest = max(largest, bits);
    }
  }
  all_exist = __all_sync(0xffffffff, all_exist);
  finite = __all_sync(0xffffffff, finite);
  return {all_exist, finite, max_of_lanes(largest)};
}

template <typename S>
class Softmax {
 public:
  __device__ __forceinline__ explicit Softmax(const BlockContext<S>& block) : block_(block), mask_(block) {
#pragma unroll
    for (int i = 0; i < S::kLaneRows; ++i) reference_[i] = kNoReference, total_[i] = 0;
  }

  // The exponent of the sums from a step on, by the bits of the largest scale of its values. It stays as it is while
  // that scale is between 2^4 and 2^8 in units of 2^exponent: products with weights of up to 2^kHeadroom then fit
  // float16. It does not fall by more than 40 below the greatest exponent so far, because the sums would overflow.
  __device__ __forceinline__ int next_exponent(uint32_t largest) {
    int exponent = exponent_;
    if (largest) {
      const int above = exponent_of_bits(largest) - exponent;
      if (above < 4 || above > 7) exponent = max(exponent_of_bits(largest) - 6, greatest_exponent_ - 40);
      greatest_exponent_ = max(greatest_exponent_, exponent);
    }
    return exponent;
  }
  // To be called after all strips of a step have been weighed with the exponent.
  __device__ __forceinline__ void set_exponent(int exponent) { exponent_ = exponent; }

  // A strip of x, products of queries and keys, becomes weights times values' scales in units of 2^exponent; its sums
  // come to the same reference and exponent. hidden: some row does not see some key. finite: KeySummary::finite
  __device__ __forceinline__ void weigh(int strip, int step, bool exact, bool hidden, bool finite, int exponent,
                                        typename Scores<S>::Strip& x, ValueSums<S>& sums) {
    const KeyScalars<S>& keys = block_.shared.scalars(step);
    RowPair row;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = block_.thread.lane_row(2 * strip + h);
      row.factor[h] = block_.shared.constants().factor[r], row.shift[h] = block_.shared.constants().shift[r];
    }
    scale_keys(keys, x);
    if (block_.a.soft_cap > 0) cap(x, row);
    if (hidden) mask_.hide(strip, step, exact, -INFINITY, x);
    raise_reference(strip, exponent, x, row, sums);
    to_weights(strip, keys, exponent, x, row);
    if (!finite) mask_.hide(strip, step, exact, 0, x);
  }

  // ---- Results, after all keys have been weighed

  struct Row {
    float reference, total, unit;  // sums are in units of `unit`
  };
  // Row i of the lane; all lanes take part.
  __device__ __forceinline__ Row row(int i) const {
    float total = total_[i];
    total += __shfl_xor_sync(0xffffffff, total, 1);
    total += __shfl_xor_sync(0xffffffff, total, 2);
    return {reference_[i], total, clamped_power_of_two(exponent_)};
  }

 private:
  static constexpr float kNoReference = -1e30f;  // of a row that has seen no key
  static constexpr float kHeadroom = 6;          // by which a score may exceed its reference
  static constexpr float kBelow = 2;             // a raised reference is 2 to 3 below its score

  // The two rows of a strip in a lane: base-2 score = x * factor + shift.
  struct RowPair {
    float factor[2], shift[2];
  };

  __device__ __forceinline__ void scale_keys(const KeyScalars<S>& keys, typename Scores<S>::Strip& x) const {
#pragma unroll
    for (int o = 0; o < S::kKeyOctets; ++o) {
      const float2 scale = reinterpret_cast<const float2*>(keys.key_scale)[4 * o + block_.thread.t];
      x[4 * o] *= scale.x, x[4 * o + 1] *= scale.y, x[4 * o + 2] *= scale.x, x[4 * o + 3] *= scale.y;
    }
  }

  // x becomes scores, limited by tanh; `row` no longer changes them.
  __device__ __forceinline__ void cap(typename Scores<S>::Strip& x, RowPair& row) const {
    const float cap = block_.a.soft_cap * kLog2E, inverse = 1 / cap;
#pragma unroll
    for (int k = 0; k < 4 * S::kKeyOctets; ++k) {
      x[k] = cap * tanhf((x[k] * row.factor[k / 2 % 2] + row.shift[k / 2 % 2]) * inverse);
    }
    row.factor[0] = row.factor[1] = 1, row.shift[0] = row.shift[1] = 0;
  }

  // Raises the references of rows with a score that is far above them, brings totals and sums to the new references and
  // exponent, and subtracts the references from row.shift.
  __device__ __forceinline__ void raise_reference(int strip, int exponent, const typename Scores<S>::Strip& x,
                                                  RowPair& row, ValueSums<S>& sums) {
    float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int o = 0; o < S::kKeyOctets; ++o) {
#pragma unroll
      for (int h = 0; h < 2; ++h) top[h] = fmaxf(top[h], fmaxf(x[4 * o + 2 * h], x[4 * o + 2 * h + 1]));
    }
    bool changed = exponent != exponent_;
    float raised[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      top[h] = fmaxf(top[h], __shfl_xor_sync(0xffffffff, top[h], 1));
      top[h] = fmaxf(top[h], __shfl_xor_sync(0xffffffff, top[h], 2));
      const float score = top[h] * row.factor[h] + row.shift[h], reference = reference_[2 * strip + h];
      raised[h] = score > reference + kHeadroom ? floorf(score) - kBelow : reference;
      changed = changed || raised[h] != reference;
    }
    if (__any_sync(0xffffffff, changed)) {
      const float down = clamped_power_of_two(exponent_ - exponent);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float keep = exp2_fast(reference_[2 * strip + h] - raised[h]);
        total_[2 * strip + h] *= keep;
        reference_[2 * strip + h] = raised[h];
        sums.scale_row(strip, h, keep * down);
      }
    }
    row.shift[0] -= raised[0], row.shift[1] -= raised[1];
  }

  // x becomes weights times values' scales. row.shift: with the reference subtracted
  __device__ __forceinline__ void to_weights(int strip, const KeyScalars<S>& keys, int exponent,
                                             typename Scores<S>::Strip& x, const RowPair& row) {
    const float inverse = clamped_power_of_two(-exponent);
#pragma unroll
    for (int o = 0; o < S::kKeyOctets; ++o) {
      float2 scale = reinterpret_cast<const float2*>(keys.value_scale)[4 * o + block_.thread.t];
      scale.x *= inverse, scale.y *= inverse;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float* pair = x + 4 * o + 2 * h;
        pair[0] = exp2_fast(pair[0] * row.factor[h] + row.shift[h]);
        pair[1] = exp2_fast(pair[1] * row.factor[h] + row.shift[h]);
        total_[2 * strip + h] += pair[0] + pair[1];
        pair[0] *= scale.x, pair[1] *= scale.y;
      }
    }
  }

  const BlockContext<S>& block_;
  const Mask<S> mask_;
  float reference_[S::kLaneRows], total_[S::kLaneRows];  // total: of the columns that this lane holds
  int exponent_ = -1000, greatest_exponent_ = -1000;
};

}  // namespace turboquant::cuda::general
