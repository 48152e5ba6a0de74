// The products of some stages of codes, those of a unit or one alone: scores, weights, and sums of weighted values.
#pragma once

#include "cuda/attention/split_kv/keys.cuh"
#include "cuda/attention/split_kv/values.cuh"

namespace turboquant::cuda::split_kv {

template <int D, int N>
class UnitProducts {
 public:
  explicit __device__ __forceinline__ UnitProducts(const BlockView& block)
      : block_(block), keys_(block), values_(block) {}

  // begin: the first token. stages: in bytes from the start of shared memory; wait(stage) returns when a stage has
  // arrived.
  template <class Pair, int STAGES, class Queries, typename Wait>
  __device__ __forceinline__ void attend(const Queries& queries, int begin, const int (&stages)[STAGES], Wait&& wait,
                                         RunningSoftmax<D, N>& softmax) const {
    using Keys = typename Pair::Keys;
    using Values = typename Pair::Values;
    using Tokens = LaneTokens<Values>;
    const LevelTable<Keys::kTwoTables> key_table(Keys::kUniform ? nullptr : key_levels());
    const LevelTable<Values::kTwoTables> value_table(Values::kUniform ? nullptr : value_levels());
    float score[N][kStageScores * STAGES], value_scale[kStageScores * STAGES];
    ScaleRange range;
#pragma unroll
    for (int i = 0; i < STAGES; ++i) {
      wait(stages[i]);
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const uint8_t* stage = block_.shared + stages[i];
        float s[N][2];
        keys_.template multiply<Pair>(queries, stage, pair, key_table, s);
        const int next = block_.layout.next_scales;
        const uint8_t* from = stage + block_.layout.value_scales + Tokens::offset(block_.g, 2, next);
        if (pair) from += Tokens::pair_offset(2, next);
        const __half2 both = *reinterpret_cast<const __half2*>(from);
        const float2 v = __half22float2(both);
        range.add(both);
        const int j = kStageScores * i + 2 * pair;
        value_scale[j] = v.x, value_scale[j + 1] = v.y;
#pragma unroll
        for (int n = 0; n < N; ++n) score[n][j] = s[n][0], score[n][j + 1] = s[n][1];
      }
    }
    if (block_.call.soft_cap > 0) cap_scores(block_, queries, score);
    const bool masked = !queries.all_see(begin, begin + STAGES * kStageTokens);
    if (masked) mask_scores<Values>(queries, begin + Tokens::first(block_.g), score);
    uint2 weight[N][STAGES];
    float factor[N];
    softmax.template weigh<Values>(queries, score, value_scale, range, masked, weight, factor);
    values_.template multiply<Values>(stages, value_table, weight, factor, softmax);
  }

  // Level entries of keys and of values, [kMaxLevels] each: for grids of levels.
  __device__ __forceinline__ int8_t* key_levels() const { return reinterpret_cast<int8_t*>(block_.signs() + 2 * D); }
  __device__ __forceinline__ int8_t* value_levels() const { return key_levels() + kMaxLevels; }
  // Copies the tables that there are: a thread has an entry of the levels of keys, or, of the next threads, of values.
  __device__ __forceinline__ void copy_level(int thread) const {
    const Attention& a = block_.call;
    const bool is_value = thread >= kMaxLevels;
    const int8_t* from = is_value ? a.value_levels : a.key_levels;
    if (thread >= 2 * kMaxLevels || !from) return;
    key_levels()[thread] = level_entry(from, is_value ? a.record.value_bits : a.record.key_bits, thread % kMaxLevels);
  }

 private:
  const BlockView block_;
  const KeyProducts<D, N> keys_;
  const ValueProducts<D, N> values_;
};

}  // namespace turboquant::cuda::split_kv
