// The kernels of one head_dim: the bit pairs of the presets (torch_turboquant/config.py) and no others.
#pragma once

#include "decode.cuh"
#include "decode.h"

namespace turboquant::cuda {

template <class Keys, class Values, int D, int N>
DecodeKernel decode_entry() {
  using X = DecodeTraits<Keys, Values, D, N>;
  return {reinterpret_cast<const void*>(&decode_kernel<Keys, Values, D, N>),
          X::kRows,
          decode_blocks(N, D),
          decode_small_blocks(N, D),
          N * X::kFrags * 32 * 8,
          32 * X::kJoin};
}

template <class Keys, class Values, int D>
DecodeKernel decode_of_rows(int rows) {
  if (rows <= 4) return decode_entry<Keys, Values, D, 1>();
  if (rows <= 8) return decode_entry<Keys, Values, D, 2>();
  if constexpr (D == 64 || D == 128) {
    return decode_entry<Keys, Values, D, 4>();
  } else {  // blocks of eight rows: more would not fit into registers, or are rare
    return decode_entry<Keys, Values, D, 2>();
  }
}

// Whether a pair of bits and grids is (K, V); a grid of 8 bits is always uniform.
template <int D>
DecodeKernel find_decode_kernel(int key_bits, bool key_uniform, int value_bits, bool value_uniform, int rows) {
  const auto is = [&](int k, bool ku, int v, bool vu) {
    return key_bits == k && key_uniform == ku && value_bits == v && value_uniform == vu;
  };
  using K8 = KeyCodes<D, 8, true>;
  using K5 = KeyCodes<D, 5, true>;
  using K4U = KeyCodes<D, 4, true>;
  using K4 = KeyCodes<D, 4, false>;
  using K3 = KeyCodes<D, 3, false>;
  using K2 = KeyCodes<D, 2, false>;
  using V8 = ValueCodes<D, 8, true>;
  using V4U = ValueCodes<D, 4, true>;
  using V3U = ValueCodes<D, 3, true>;
  using V4 = ValueCodes<D, 4, false>;
  using V3 = ValueCodes<D, 3, false>;
  using V2 = ValueCodes<D, 2, false>;
  if (is(8, true, 8, true)) return decode_of_rows<K8, V8, D>(rows);
  if (is(8, true, 4, false)) return decode_of_rows<K8, V4, D>(rows);
  if (is(5, true, 4, true)) return decode_of_rows<K5, V4U, D>(rows);
  if (is(5, true, 3, true)) return decode_of_rows<K5, V3U, D>(rows);
  if (is(4, false, 4, false)) return decode_of_rows<K4, V4, D>(rows);
  if (is(4, true, 4, true)) return decode_of_rows<K4U, V4U, D>(rows);
  if (is(4, false, 3, false)) return decode_of_rows<K4, V3, D>(rows);
  if (is(4, false, 2, false)) return decode_of_rows<K4, V2, D>(rows);
  if (is(3, false, 3, false)) return decode_of_rows<K3, V3, D>(rows);
  if (is(3, false, 2, false)) return decode_of_rows<K3, V2, D>(rows);
  if (is(2, false, 2, false)) return decode_of_rows<K2, V2, D>(rows);
  return {};
}

}  // namespace turboquant::cuda
