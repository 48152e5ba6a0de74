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

  // Attends to some stages with the codes of a pair. begin: the first token. stages: in bytes from the start of shared
  // memory; wait(stage) returns when a stage has arrived.
  template <class Pair, int STAGES, class Queries, typename Wait>
  __device__ __forceinline__ void attend(const Queries& queries, int begin, const int (&stages)[STAGES], Wait&& wait,
                                         RunningSoftmax<D, N>& softmax) const {
    using Keys = typename Pair::Keys;
    using Values = typename Pair::Values;
    const LaneTokens tokens{Values::kMixed};
    const LevelTable<Keys::kTwoTables> key_table(Keys::kUniform ? nullptr : key_levels());
    const LevelTable<Values::kTwoTables> value_table(Values::kUniform ? nullptr : value_levels());
    Scores<STAGES> scores;
    score<Keys>(queries, tokens, stages, wait, key_table, scores);
    uint2 weight[N][STAGES];
    float factor[N];
    weigh(queries, tokens, Values::kTop != 0, begin, scores, softmax, weight, factor);
    values_.template multiply<Values>(stages, value_table, weight, factor, softmax);
  }

  // The same with the codes of the call. Code for keys and code for values exist once for all pairs, with a branch
  // before either.
  template <int STAGES, class Queries, typename Wait>
  __device__ __forceinline__ void attend_any(const Queries& queries, int begin, const int (&stages)[STAGES],
                                             Wait&& wait, RunningSoftmax<D, N>& softmax) const {
    const CodeFacts& codes = block_.plan.codes;
    Scores<STAGES> scores;
    with_index<0, kKeysOfPairs.size>(codes.keys, [&](auto i) {
      constexpr KeysOfPair kKeys = kKeysOfPairs.of[i];
      using Keys = KeyCodes<D, kKeys.codes>;
      const LevelTable<Keys::kTwoTables> table(Keys::kUniform ? nullptr : key_levels());
      score<Keys>(queries, LaneTokens{kKeys.mixed}, stages, wait, table, scores);
    });
    uint2 weight[N][STAGES];
    float factor[N];
    const bool has_top = true;  // maybe: Join multiplies by CodeFacts::value_top, which may be 0
    weigh(queries, LaneTokens{codes.mixed}, has_top, begin, scores, softmax, weight, factor);
    with_index<0, kValuesOfPairs.size>(codes.values, [&](auto i) {
      using Values = ValueCodes<D, kValuesOfPairs.of[i]>;
      const LevelTable<Values::kTwoTables> table(Values::kUniform ? nullptr : value_levels());
      values_.template multiply<Values>(stages, table, weight, factor, softmax);
    });
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
  template <int STAGES>
  struct Scores {
    float score[N][kStageScores * STAGES], value_scale[kStageScores * STAGES];
    ScaleRange range;
  };

  template <class Keys, int STAGES, class Queries, typename Wait, class Table>
  __device__ __forceinline__ void score(const Queries& queries, LaneTokens tokens, const int (&stages)[STAGES],
                                        Wait&& wait, const Table& table, Scores<STAGES>& to) const {
#pragma unroll
    for (int i = 0; i < STAGES; ++i) {
      wait(stages[i]);
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const uint8_t* stage = block_.shared + stages[i];
        float s[N][2];
        keys_.template multiply<Keys>(queries, stage, tokens, pair, table, s);
        const int next = block_.layout.next_scales;
        const uint8_t* from = stage + block_.layout.value_scales + tokens.offset(block_.g, 2, next);
        if (pair) from += tokens.pair_offset(2, next);
        const __half2 both = *reinterpret_cast<const __half2*>(from);
        const float2 v = __half22float2(both);
        to.range.add(both);
        const int j = kStageScores * i + 2 * pair;
        to.value_scale[j] = v.x, to.value_scale[j + 1] = v.y;
#pragma unroll
        for (int n = 0; n < N; ++n) to.score[n][j] = s[n][0], to.score[n][j + 1] = s[n][1];
      }
    }
  }

  template <int STAGES, class Queries>
  __device__ __forceinline__ void weigh(const Queries& queries, LaneTokens tokens, bool has_top, int begin,
                                        Scores<STAGES>& scores, RunningSoftmax<D, N>& softmax,
                                        uint2 (&weight)[N][STAGES], float (&factor)[N]) const {
    if (block_.call.soft_cap > 0) cap_scores(block_, queries, scores.score);
    const bool masked = !queries.all_see(begin, begin + STAGES * kStageTokens);
    if (masked) mask_scores(queries, tokens, begin + tokens.first(block_.g), scores.score);
    softmax.weigh(queries, tokens, has_top, scores.score, scores.value_scale, scores.range, masked, weight, factor);
  }

  const BlockView block_;
  const KeyProducts<D, N> keys_;
  const ValueProducts<D, N> values_;
};

}  // namespace turboquant::cuda::split_kv
