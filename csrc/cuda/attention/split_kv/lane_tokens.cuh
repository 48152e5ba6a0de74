// Which tokens of a stage a lane scores.
#pragma once

#include "cuda/attention/split_kv/block.cuh"

namespace turboquant::cuda::split_kv {

// Two pairs of neighbouring tokens: the first pair begins at an even token below 16 (below 24 where `mixed`, see
// ValueCodes::kMixed), the second one pair_step() later. They are chosen so that a lane which transposes the weights of
// its tokens (`transposed`) then holds those that the value operands want, in their order.
struct LaneTokens {
  bool mixed;

  __device__ __forceinline__ int pair_step() const { return mixed ? 8 : 16; }
  __device__ __forceinline__ int first(int g) const { return mixed ? (g & 1 ? g + 15 : g) : (g & 1 ? g + 7 : g); }

  // For a section of a stage whose rows are `row` bytes, with `next` bytes from tokens 0-15 to tokens 16-31: where the
  // first pair begins, and the distance from there to the second pair.
  __device__ __forceinline__ int offset(int g, int row, int next) const {
    const int token = first(g);
    return (token & 15) * row + (token >> 4) * next;
  }
  __device__ __forceinline__ int pair_offset(int row, int next) const { return mixed ? 8 * row : next; }
};

}  // namespace turboquant::cuda::split_kv
