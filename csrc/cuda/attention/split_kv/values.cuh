// Sums of weighted values of a unit: products of codes, expanded to bytes in registers, with the weights' operands.
//   [16 channels x 32 tokens] . [32 tokens x 4 rows (high, low byte)]
#pragma once

#include "cuda/attention/split_kv/softmax.cuh"

namespace turboquant::cuda::split_kv {

template <int D, int N>
class ValueProducts {
  using X = SplitKvTraits<D, N>;

 public:
  explicit __device__ __forceinline__ ValueProducts(const BlockView& block) : block_(block) {}

  // stages: of the unit or a part of it, in bytes from the start of shared memory.
  // weight, factor: see RunningSoftmax::weigh.
  template <class Values, int STAGES, class Table>
  __device__ __forceinline__ void multiply(const int (&stages)[STAGES], const Table& table,
                                           const uint2 (&weight)[N][STAGES], const float (&factor)[N],
                                           RunningSoftmax<D, N>& softmax) const {
#pragma unroll
    for (int group = 0; group < Values::kGroups; ++group) {
      typename Values::Words a[STAGES], b[STAGES];
#pragma unroll
      for (int stage = 0; stage < STAGES; ++stage) {
        const uint8_t* block = block_.shared + stages[stage] + block_.layout.values;
        Values::load(block, group, block_.lane, a[stage]);
        Values::load(block + block_.layout.next_values, group, block_.lane, b[stage]);
      }
      multiply_tiles<Values, 0>(a, b, group, table, weight, factor, softmax);
    }
  }

 private:
  // a, b: the two value blocks of each stage.
  template <class Values, int I, int STAGES, class Table>
  __device__ __forceinline__ void multiply_tiles(const typename Values::Words (&a)[STAGES],
                                                 const typename Values::Words (&b)[STAGES], int group,
                                                 const Table& table, const uint2 (&weight)[N][STAGES],
                                                 const float (&factor)[N], RunningSoftmax<D, N>& softmax) const {
    if constexpr (I < 4) {
      if (4 * group + I >= X::kTiles) return;
      int sums[N][4] = {};
#pragma unroll
      for (int stage = 0; stage < STAGES; ++stage) {
        uint32_t plus[4], minus[4];
        Values::template expand<I>(a[stage], b[stage], table, plus, minus);
#pragma unroll
        for (int n = 0; n < N; ++n) {
          mma_bytes<Values::kMasks, true>(sums[n], plus, weight[n][stage]);
          if constexpr (Values::kTwoTables) mma_bytes<false, true>(sums[n], minus, weight[n][stage]);
        }
      }
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int x = sums[n][2 * h] * 256 + sums[n][2 * h + 1];
          float& to = softmax.sums[4 * group + I][n][h];
          to = fmaf(static_cast<float>(x), factor[n], to);  // Join divides by the factor kUpper of the upper rows
        }
      }
      multiply_tiles<Values, I + 1>(a, b, group, table, weight, factor, softmax);
    }
  }

  const BlockView block_;
};

}  // namespace turboquant::cuda::split_kv
