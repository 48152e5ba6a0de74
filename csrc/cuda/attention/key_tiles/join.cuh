// The partial results of all blocks that share a segment become one, in the order of the blocks, by the last block to
// arrive. Hundreds of blocks may share the segment of one sequence and KV head, and it takes 0.2 us to add a partial
// result of 17 KB. There, the last block of a group of neighbours joins the group, and the last one of these joins all
// groups.
#pragma once

#include "cuda/attention/key_tiles/shape.cuh"
#include "cuda/attention/softmax_math.cuh"

namespace turboquant::cuda::key_tiles {

constexpr int kJoined = 64;  // partial results at a time, and the most of a segment that is one group
// Threads that share the heads of a row's partial results; how many each has.
constexpr int kHeadLanes = 8, kHeadsOfLane = kJoined / kHeadLanes;

// Shared memory beside the result: a factor of each row's sums, and of each partial result's, at a time.
constexpr int join_bytes(int rows) { return (1 + kJoined) * rows * 4; }

// part_of(i): partial result i of `count`, [ROWS, kPart] in global memory. to: the joined one in shared memory, with
// join_bytes behind it. Ends with a synchronisation.
template <class S, typename F>
__device__ __forceinline__ void join_parts(int count, const F& part_of, float* to) {
  constexpr int kQuads = S::kRows * S::kDim / 4, kOfThread = (kQuads + kThreads - 1) / kThreads;
  constexpr int kLoaded = 16 / kOfThread;  // partial results whose sums a thread loads at once
  static_assert(S::kRows * kHeadLanes <= kThreads);
  float *const factors = to + S::kRows * S::kPart, *const weights = factors + S::kRows;
  const int thread = static_cast<int>(held_thread()), row = thread / kHeadLanes, lane = thread % kHeadLanes;
  const bool has_row = row < S::kRows;
  float most = -INFINITY, total = 0;
  float4 sum[kOfThread];
#pragma unroll
  for (int q = 0; q < kOfThread; ++q) sum[q] = {0, 0, 0, 0};
#pragma unroll 1
  for (int begin = 0; begin < count; begin += kJoined) {
    const int some = min(count - begin, kJoined);
    float2 head[kHeadsOfLane];  // maximum and denominator
    float top = most, more = 0;
#pragma unroll
    for (int k = 0; k < kHeadsOfLane; ++k) {
      const int i = lane + k * kHeadLanes;
      head[k] = {-INFINITY, 0};
      if (has_row && i < some) {
        head[k] = __ldcg(reinterpret_cast<const float2*>(part_of(begin + i) + row * S::kPart));
      }
    }
#pragma unroll
    for (int k = 0; k < kHeadsOfLane; ++k) top = fmaxf(top, head[k].x);
#pragma unroll
    for (int bit = 1; bit < kHeadLanes; bit *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, bit));
#pragma unroll
    for (int k = 0; k < kHeadsOfLane; ++k) {
      const int i = lane + k * kHeadLanes;
      const float weight = weight_of(head[k].x, top);
      if (has_row && i < some) weights[i * S::kRows + row] = weight;
      if (weight != 0) more = fmaf(weight, head[k].y, more);
    }
#pragma unroll
    for (int bit = 1; bit < kHeadLanes; bit *= 2) more += __shfl_xor_sync(0xffffffff, more, bit);
    const float by = weight_of(most, top);
    most = top, total = total * by + more;
    if (has_row && lane == 0) factors[row] = by;
    __syncthreads();
#pragma unroll
    for (int q = 0; q < kOfThread; ++q) {
      const int quad = thread + q * kThreads;
      if (quad >= kQuads) continue;
      const float x = factors[quad / (S::kDim / 4)];
      sum[q].x *= x, sum[q].y *= x, sum[q].z *= x, sum[q].w *= x;
    }
#pragma unroll 1
    for (int i = 0; i < some; i += kLoaded) {
      float4 x[kLoaded][kOfThread];
#pragma unroll
      for (int k = 0; k < kLoaded; ++k) {
        const float* part = part_of(begin + min(i + k, some - 1)) + split_kv::kPartHead;
#pragma unroll
        for (int q = 0; q < kOfThread; ++q) {
          const int quad = min(thread + q * kThreads, kQuads - 1), r = quad / (S::kDim / 4);
          x[k][q] = __ldcg(reinterpret_cast<const float4*>(part + r * S::kPart) + quad % (S::kDim / 4));
        }
      }
#pragma unroll
      for (int k = 0; k < kLoaded; ++k) {
#pragma unroll
        for (int q = 0; q < kOfThread; ++q) {
          const int quad = min(thread + q * kThreads, kQuads - 1), r = quad / (S::kDim / 4);
          const float weight = i + k < some ? weights[(i + k) * S::kRows + r] : 0;
          if (weight == 0) continue;  // sums of nothing may be anything
          sum[q].x = fmaf(weight, x[k][q].x, sum[q].x), sum[q].y = fmaf(weight, x[k][q].y, sum[q].y);
          sum[q].z = fmaf(weight, x[k][q].z, sum[q].z), sum[q].w = fmaf(weight, x[k][q].w, sum[q].w);
        }
      }
    }
    __syncthreads();
  }
  if (has_row && lane == 0) to[row * S::kPart] = most, to[row * S::kPart + 1] = total;
#pragma unroll
  for (int q = 0; q < kOfThread; ++q) {
    const int quad = thread + q * kThreads, r = quad / (S::kDim / 4);
    if (quad >= kQuads) continue;
    *reinterpret_cast<float4*>(to + r * S::kPart + split_kv::kPartHead + 4 * (quad % (S::kDim / 4))) = sum[q];
  }
  __syncthreads();
}

template <int D, int ROWS>
__device__ __forceinline__ void leave_part(const float* result, float* part) {
  constexpr int kWords = ROWS * split_kv::part_floats(D) / 4;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < kWords; i += kThreads) {
    reinterpret_cast<float4*>(part)[i] = reinterpret_cast<const float4*>(result)[i];
  }
  __syncthreads();
}

// Hands the block's result of a segment, `result`, over to the blocks that share it. True: this is the last of them,
// and the results of all are joined in `to`. join: split-KV's, which knows where partial results and counters are.
template <class S, class Join, class List>
__device__ __forceinline__ bool join_blocks(const Join& join, const List& list, const float* result, float* to) {
  const int first = list.notes().first_block, count = list.notes().blocks, mine = static_cast<int>(blockIdx.x) - first;
  const auto part_of = [&](int i) { return join.part(first + i, i == 0); };
  leave_part<S::kDim, S::kRows>(result, part_of(mine));
  const int each = count <= kJoined ? count : static_cast<int>(ceilf(sqrtf(static_cast<float>(count))));
  const int group = small_quotient(mine, each);
  // Partial results begin, begin + step, ... become one, which takes the place of the first: those of the block's
  // group, then those of all groups. A loop, so that the code of both exists once.
  int begin = group * each, step = 1, some = min(each, count - begin), counter = first + begin;
#pragma unroll 1
  for (;;) {
    // A block that is a group of its own waits for nobody. It may begin the next segment, which then has its counter.
    if (some > 1) {
      if (!join.arrives_last(list, counter, some)) return false;
      join_parts<S>(some, [&](int i) { return part_of(begin + i * step); }, to);
      if (step > 1 || each == count) return true;
      leave_part<S::kDim, S::kRows>(to, part_of(begin));
    }
    begin = 0, step = each, some = small_quotient(count + each - 1, each), counter = first + 1;  // no group has it
  }
}

}  // namespace turboquant::cuda::key_tiles
