// The running softmax of a lane's rows, and the weights of a unit of keys as integers.
//
// Weights times value scales are rounded to 16 bits in units of their own for each unit of keys: the largest product of
// the unit becomes about 65,500. Each weight then is a high and a low byte, two neighbouring columns of the product
// with the values.
#pragma once

#include "cuda/attention/split_kv/lane_tokens.cuh"

namespace turboquant::cuda::split_kv {

constexpr int kStageScores = 4;   // scores of a stage that a lane has of each of its rows
constexpr float kNoKey = -1e30f;  // a running maximum before the first key: below all scores, and finite when scaled

// Caps integer scores. Capped scores are powers of two: they are scaled by log2(e) already.
template <int N, int SCORES, class Queries>
__device__ __forceinline__ void cap_scores(const BlockView& block, const Queries& queries, float (&score)[N][SCORES]) {
  // __fdividef, because the rare path of an exact division would wait for all loads on their way, and because the
  // compiler would move an exact division in front of the loop, where it costs calls without a cap, too.
  const float limit = block.call.soft_cap * kLog2E, inverse = __fdividef(1.0f, limit);
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const QueryRow& row = queries.row(n);
#pragma unroll
    for (int i = 0; i < SCORES; ++i) {
      score[n][i] = limit * tanh_fast(fmaf(score[n][i], row.scale, row.shift) * inverse);
    }
  }
}

// Excludes the keys that a row does not see, whose bytes in the stage may be anything. token: the lane's first one in
// the first stage.
template <int N, int SCORES, class Queries>
__device__ __forceinline__ void mask_scores(const Queries& queries, LaneTokens tokens, int token,
                                            float (&score)[N][SCORES]) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const QueryRow& row = queries.row(n);
    const unsigned keys = max(row.end - row.first, 0);
#pragma unroll
    for (int i = 0; i < SCORES; ++i) {
      const int key = token + i / kStageScores * kStageTokens + i % 4 / 2 * tokens.pair_step() + i % 2;
      score[n][i] = static_cast<unsigned>(key - row.first) < keys ? score[n][i] : -INFINITY;
    }
  }
}

// The smallest and the largest value scale of a unit; NaN if one of them is.
struct ScaleRange {
  __half2 top, bottom;
  bool any = false;

  __device__ __forceinline__ void add(__half2 x) {
    top = any ? __hmax2_nan(top, x) : x, bottom = any ? __hmin2_nan(bottom, x) : x, any = true;
  }
  // Reduces over the lanes: `top` becomes (largest, -smallest).
  __device__ __forceinline__ void reduce() {
    top = __hmax2_nan(__lows2half2(top, __hneg2(bottom)), __highs2half2(top, __hneg2(bottom)));
#pragma unroll
    for (int bit = 4; bit < 32; bit *= 2) top = __hmax2_nan(top, __shfl_xor_sync(0xffffffff, top, bit));
  }
  __device__ __forceinline__ float most() const { return __low2float(top); }
  __device__ __forceinline__ float least() const { return -__high2float(top); }
};

// D: channels of a value. Keys may have other channels: scores come from any Queries.
template <int D, int N>
struct RunningSoftmax {
  static constexpr int kTiles = SplitKvTraits<D, N>::kTiles;

  // Of rows 4 n + t:
  float max[N];      // the largest integer score, maybe less (see weigh)
  float total[N];    // the denominator, over the lane's own tokens
  float weights[N];  // the sum of rounded weights times value scales, over the lane's own tokens
  float sums[kTiles][N][2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < N; ++n) max[n] = kNoKey, total[n] = weights[n] = 0;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int n = 0; n < N; ++n) sums[i][n][0] = sums[i][n][1] = 0;
    }
  }

  // Takes the scores of some stages into the maximum and the denominator, and makes operands of the weights.
  // has_top: ValueCodes::kTop may not be 0, so `weights` is needed. masked: some keys may be excluded, and their value
  // scales do not matter.
  // weight: the columns of each stage. factor: what a sum of integers is multiplied by to count in `sums`.
  template <int STAGES, class Queries>
  __device__ __forceinline__ void weigh(const Queries& queries, LaneTokens tokens, bool has_top,
                                        const float (&score)[N][kStageScores * STAGES],
                                        const float (&value_scale)[kStageScores * STAGES], ScaleRange& range,
                                        bool masked, uint2 (&weight)[N][STAGES], float (&factor)[N]) {
    float most[N];
    range.reduce();
    bool far = false;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      most[n] = kNoKey;
#pragma unroll
      for (int i = 0; i < kStageScores * STAGES; ++i) most[n] = fmaxf(most[n], score[n][i]);
      most[n] = over_tokens(most[n], [](float x, float y) { return fmaxf(x, y); });
      far |= (most[n] - max[n]) * queries.scale(n) > 16;
    }
    // The maximum may lag behind, because weights up to 2^16 do no harm. So most units need no rescaling.
    if (__any_sync(0xffffffff, far)) for_each<N>([&](auto n) { rescale<n>(most[n], queries.scale(n)); });
    // If the scales of a unit differ much, the largest of them is a bad bound for the largest product of a weight and a
    // scale.
    const bool exact = masked || !(range.least() * 8 >= range.most());
    const float log_largest = log2_of(range.most());
    const auto weigh_rows = [&](auto exactly) {
      for_each<N>([&](auto n) {
        factor[n] = weigh_row<n, STAGES>(tokens, has_top, queries.scale(n), score[n], most[n], value_scale, log_largest,
                                         exactly, weight[n]);
      });
    };
    // With several products of four rows, one branch around all of them lets the compiler interleave their
    // instructions. With one product, a branch inside is shorter code.
    if constexpr (N == 1) {
      weigh_rows(exact);
    } else if (exact) {
      weigh_rows(std::true_type{});
    } else {
      weigh_rows(std::false_type{});
    }
  }

  // Raises the maximum of row 4 n + t to `most`. scale: of its scores.
  template <int n>
  __device__ __forceinline__ void rescale(float most, float scale) {
    most = fmaxf(most, max[n]);
    const float by = exp2_fast((max[n] - most) * scale);
    max[n] = most;
    total[n] *= by, weights[n] *= by;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) sums[i][n][0] *= by, sums[i][n][1] *= by;
  }

 private:
  // The weights of row 4 n + t; returns its factor. log_largest: of the value scales. exact (maybe a constant): finds
  // the largest product of a weight and a scale instead of bounding it by the largest scale.
  template <int n, int STAGES, typename Bool>
  __device__ __forceinline__ float weigh_row(LaneTokens tokens, bool has_top, float scale,
                                             const float (&score)[kStageScores * STAGES], float most,
                                             const float (&value_scale)[kStageScores * STAGES], float log_largest,
                                             Bool exact, uint2 (&weight)[STAGES]) {
    constexpr int kScores = kStageScores * STAGES;
    float v[kScores];
#pragma unroll
    for (int i = 0; i < kScores; ++i) v[i] = value_scale[i];
    if (exact) {
      float largest = 0;
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        v[i] = score[i] == -INFINITY ? 0 : v[i];
        largest = max_or_nan(largest, exp2_fast((score[i] - most) * scale) * v[i]);
      }
      log_largest = log2_of(over_tokens(largest, [](float x, float y) { return max_or_nan(x, y); }));
    }
    // `offset` turns weights into integers and `down` turns their sums back, so that its own rounding does not matter.
    constexpr float kLog2Largest = 15.999f, kInteger = 8388608;  // adding 2^23 leaves an integer in the low bits
    const float offset = fmaf(-most, scale, kLog2Largest - log_largest);
    const float down = most > kNoKey ? exp2_fast(fmaf(-max[n], scale, -offset))
                                     : 0;  // a unit without keys counts 0, whatever its weights are
    float sum_of_weights = 0;
    uint32_t integer[kScores], sum = 0;
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const float p = exp2_fast(fmaf(score[i], scale, offset));
      sum_of_weights += p;
      integer[i] = __float_as_uint(fmaf(p, v[i], kInteger));
      sum += integer[i];
    }
    total[n] = fmaf(sum_of_weights, down, total[n]);
    if (has_top) {
      weights[n] = fmaf(static_cast<float>(static_cast<int>(sum - kScores * 0x4B000000u)), down, weights[n]);
    }
    // A 16-bit element of the tile to be transposed holds the high or the low byte of two tokens, so that one
    // transposition moves the weights of both.
    const auto column = [&](int i) {
      const uint32_t x = transposed(select_bytes(integer[i], integer[i + 1], 0x4051));
      return tokens.mixed ? select_bytes(x, x, 0x3120) : x;
    };
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) {
      weight[stage] = uint2{column(4 * stage), column(4 * stage + 2)};
    }
    return down;
  }

  static __device__ __forceinline__ float log2_of(float largest) { return __log2f(max_or_nan(largest, 1e-30f)); }
};

}  // namespace turboquant::cuda::split_kv
