// The kernels of one head_dim, for blocks of 4, 8 and 16 rows; each takes all pairs of codes (CodePairs).
#pragma once

#include "choices/attention.h"
#include "cuda/attention/split_kv.cuh"
#include "cuda/attention/split_kv/kernel.cuh"

namespace turboquant::cuda::split_kv {

template <int D, int N>
KernelEntry kernel_entry(const CodeFacts& codes) {
  using X = SplitKvTraits<D, N>;
  constexpr bool kFew = takes_few_units(D), kAlone = kFew && !has_few_units_apart(D, N);
  return {.kernel = reinterpret_cast<const void*>(&attend_kernel<D, N, kAlone>),
          .with_few_units = reinterpret_cast<const void*>(&attend_kernel<D, N, kFew>),
          .rows = X::kRows,
          .blocks = resident_blocks(N, D),
          .small_blocks = resident_small_blocks(N, D),
          .operand_bytes = N * X::kFrags * 32 * static_cast<int>(sizeof(uint2)),
          .state_floats = X::kState,
          .codes = codes};
}

template <int D, int... I>
CodeFacts facts_of_pair(int pair, std::integer_sequence<int, I...>) {
  constexpr CodeFacts kFacts[] = {CodeFacts::of<std::tuple_element_t<I, CodePairs<D>>>(I)...};
  return kFacts[pair];
}

template <int D>
KernelEntry find_kernel(int pair, int rows) {
  static_assert(is_split_kv_head_dim(D));
  const CodeFacts codes = facts_of_pair<D>(pair, std::make_integer_sequence<int, kSplitKvNumPairs>{});
  // The most products of four rows. More would not fit into registers, or would rarely be used.
  constexpr int kMost = split_kv_block_rows(D) / 4;
  if constexpr (split_kv_least_rows(D) == 4) {
    if (rows <= 4 || kMost == 1) return kernel_entry<D, 1>(codes);
  }
  if (rows <= 8 || kMost == 2) return kernel_entry<D, std::min(kMost, 2)>(codes);
  return kernel_entry<D, kMost>(codes);
}

}  // namespace turboquant::cuda::split_kv
