// Which tokens of a stage a lane scores.
#pragma once

#include "cuda/attention/split_kv/block.cuh"

namespace turboquant::cuda::split_kv {

// Two pairs of neighbouring tokens: the first pair begins at an even token below 16 (below 24 where Values::kMixed),
// the second one kPairStep tokens later. They are chosen so that a lane which transposes the weights of its tokens
// (`transposed`) then holds those that the value operands want, in their order.
template <class Values>
struct LaneTokens {
  static constexpr int kPairStep = Values::kMixed ? 8 : 16;

  static __device__ __forceinline__ int first(int g) {
    return Values::kMixed ? (g & 1 ? g + 15 : g) : (g & 1 ? g + 7 : g);
  }

  // For a section of a stage whose rows are `row` bytes, with `next` bytes from tokens 0-15 to tokens 16-31: where the
  // first pair begins, and the distance from there to the second pair.
  static __device__ __forceinline__ int offset(int g, int row, int next) {
    const int token = first(g);
    return (token & 15) * row + (token >> 4) * next;
  }
  static __device__ __forceinline__ int pair_offset(int row, int next) { return Values::kMixed ? 8 * row : next; }
};

}  // namespace turboquant::cuda::split_kv
