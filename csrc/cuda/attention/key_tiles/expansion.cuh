// From codes to operands in registers. Scores are products of bytes: a word of codes becomes one or two words of bytes.
// Sums of values are products of float16: a code in the low bits of a float16 whose other bits are 0 is the subnormal
// number code * 2^-24, and tensor cores multiply subnormal numbers exactly.
#pragma once

#include <iterator>

#include "cuda/attention/operands.cuh"

namespace turboquant::cuda::key_tiles {

// Keys of one pair of codes. level = kStep * (what a byte counts) - kOffset.
template <int D, class K>
struct KeyBytes : K {
  using typename K::Prepared;
  static constexpr float kStep = K::kMasks ? 2 : 1;
  static constexpr float kOffset = K::kMasks ? format::num_levels(K::kCodes.width) - 1 : K::kTwoTables ? -1 : 0;
  static constexpr int kProducts = K::Operands::kFrags;  // of 32 channels

  // The operand of product I from the rows of g and h (8 rows further down). minus: with two tables only. Of a uniform
  // grid all bytes count alike, since one sum takes them.
  template <int I>
  static __device__ __forceinline__ void expand(const Prepared& g, const Prepared& h,
                                                const LevelTable<K::kTwoTables>& table, uint32_t (&a)[4],
                                                uint32_t (&minus)[4]) {
    if constexpr (K::kMasks) {
      constexpr int j = I / 2 * 2;
      a[0] = codes<I % 2, j>(g), a[1] = codes<I % 2, j>(h), a[2] = codes<I % 2, j + 1>(g),
      a[3] = codes<I % 2, j + 1>(h);
    } else {
      K::template expand<I>(g, h, table, a, minus);
    }
  }

 private:
  // The even (SIDE 0) or odd channels of word J.
  template <int SIDE, int J>
  static __device__ __forceinline__ uint32_t codes(const Prepared& x) {
    const uint32_t low = (SIDE ? x.w[J] >> 4 : x.w[J]) & kLowNibbles;
    if constexpr (!K::kPlane) return low;
    return low | (shifted<4 - SIDE - 2 * J>(x.plane) & 0x10101010);
  }
};

// The codes of keys that the kernel takes.
constexpr format::Codes kKeyCodes[] = {choices::kUniform4, choices::kUniform5};

// f(KeyBytes) for the codes of an index.
template <int D, int I = 0, typename F>
__host__ __device__ __forceinline__ void with_key_codes(int index, F&& f) {
  if constexpr (I + 1 == std::size(kKeyCodes)) {
    f(KeyBytes<D, KeyCodes<D, kKeyCodes[I]>>{});
  } else if (index == I) {
    f(KeyBytes<D, KeyCodes<D, kKeyCodes[I]>>{});
  } else {
    with_key_codes<D, I + 1>(index, f);
  }
}

// Values of one pair of codes: a word of four tokens and 16 channels becomes the operand of a product of 16 tokens.
// level = kStep * code - kOffset.
template <class V>
struct ValueHalves : V {
  static_assert(V::kMasks && V::kNibbles, "no such values");
  static constexpr float kStep = 2, kOffset = format::num_levels(V::kCodes.width) - 1;

  // The lower eight channels of the word are rows g of the product. Rows g + 8 hold both: the lower channel, and 16
  // times the upper one, which `upper` takes apart.
  static __device__ __forceinline__ void expand(uint32_t word, uint32_t (&a)[4]) {
    a[1] = select_bytes(word, 0, 0x4140), a[3] = select_bytes(word, 0, 0x4342);
    a[0] = a[1] & 0x000F000F, a[2] = a[3] & 0x000F000F;
  }
  static __device__ __forceinline__ float upper(float lower, float both) { return (both - lower) * (1.0f / 16); }
};

}  // namespace turboquant::cuda::key_tiles
