// The kernels of one head_dim, for 4, 8 and 16 rows; each takes all pairs of bits of the presets (CodePairs).
#pragma once

#include "cuda/attention/split_kv.cuh"
#include "cuda/attention/split_kv_kernel.cuh"

namespace turboquant::cuda {

template <int D, int N>
DecodeKernel decode_entry(const CodeFacts& codes) {
  using X = DecodeTraits<D, N>;
  return {reinterpret_cast<const void*>(&decode_kernel<D, N>),
          X::kRows,
          decode_blocks(N, D),
          decode_small_blocks(N, D),
          N * X::kFrags * 32 * 8,
          32 * X::kJoin,
          codes};
}

template <int D>
DecodeKernel decode_of_rows(const CodeFacts& codes, int rows) {
  // The most rows of a block: more would not fit into registers, or are rare.
  constexpr int kMost = D == 64 || D == 128 ? 4 : D <= 256 ? 2 : 1;
  if (rows <= 4 || kMost == 1) return decode_entry<D, 1>(codes);
  if (rows <= 8 || kMost == 2) return decode_entry<D, std::min(kMost, 2)>(codes);
  return decode_entry<D, kMost>(codes);
}

template <int D, int I = 0>
DecodeKernel find_split_kv_kernel(int key_bits, bool key_uniform, int value_bits, bool value_uniform, int rows) {
  if constexpr (I == std::tuple_size_v<CodePairs<D>>) {
    return {};
  } else {
    using Pair = std::tuple_element_t<I, CodePairs<D>>;
    using K = typename Pair::Keys;
    using V = typename Pair::Values;
    if (K::kBits == key_bits && K::kUniform == key_uniform && V::kBits == value_bits && V::kUniform == value_uniform) {
      return decode_of_rows<D>(CodeFacts::of<Pair>(I), rows);
    }
    return find_split_kv_kernel<D, I + 1>(key_bits, key_uniform, value_bits, value_uniform, rows);
  }
}

}  // namespace turboquant::cuda
