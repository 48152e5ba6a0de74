// What all parts of the split-KV kernel share: a thread's view of its block, and exchanges between lanes.
#pragma once

#include <utility>

#include "cuda/attention/softmax_math.cuh"
#include "cuda/attention/split_kv/plan.cuh"
#include "cuda/common/device.cuh"

namespace turboquant::cuda::split_kv {

// A thread's view of its block. Lane (g, t) = (lane / 4, lane % 4) holds, of every product of four rows, row t: its
// tokens in the scores, its channels in the output.
struct BlockView {
  const Attention& call;
  const StageLayout& layout;
  const SplitKvPlan& plan;
  uint8_t* shared;
  int warp, lane, g, t;

  __device__ __forceinline__ BlockView(const Attention& a, const StageLayout& l, const SplitKvPlan& p, uint8_t* memory,
                                       unsigned thread)
      : call(a), layout(l), plan(p), shared(memory), warp(thread / 32), lane(thread % 32), g(lane / 4), t(lane % 4) {}

  __device__ __forceinline__ float* signs() const { return reinterpret_cast<float*>(shared + plan.signs); }
  __device__ __forceinline__ QueryRow* rows() const { return reinterpret_cast<QueryRow*>(shared + plan.rows); }
  __device__ __forceinline__ float* join() const { return reinterpret_cast<float*>(shared + plan.join); }
  __device__ __forceinline__ float* result() const { return reinterpret_cast<float*>(shared + plan.result); }
};

// computed_here for a lane. Without it, what follows from a lane is spilled across the loop over segments.
__device__ __forceinline__ int lane_computed_here(int lane) {
  lane = computed_here(lane);
  __builtin_assume(lane >= 0 && lane < 32);  // or quotients of it would be rounded as those of negative numbers are
  return lane;
}

// Reduces over the lanes that share t, which hold the tokens of the same rows.
template <typename Op>
__device__ __forceinline__ float over_tokens(float x, Op&& op) {
#pragma unroll
  for (int bit = 4; bit < 32; bit *= 2) x = op(x, __shfl_xor_sync(0xffffffff, x, bit));
  return x;
}

}  // namespace turboquant::cuda::split_kv
