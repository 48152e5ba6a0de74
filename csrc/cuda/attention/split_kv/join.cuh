// The end of a segment: the states of a block's warps become one partial result, and the partial results of the blocks
// that share a segment become one, in the order of the blocks. So results are the same in every run.
//
// A partial result of a segment is float [rows, part_floats(D)], whose sums are in the rotated space.
#pragma once

#include "cuda/attention/counters.cuh"
#include "cuda/attention/split_kv/softmax.cuh"
#include "cuda/attention/split_kv/work_list.cuh"

namespace turboquant::cuda::split_kv {

// D: channels of a value; the block has 4 N rows.
template <int D, int N>
class Join {
  using X = SplitKvTraits<D, N>;
  using List = WorkList<X::kRows>;

 public:
  static constexpr int kSegmentFloats = X::kRows * X::kPart;  // of a partial result

  explicit __device__ __forceinline__ Join(const BlockView& block) : block_(block) {}

  // Where a block leaves its partial result of the segment that it opens, or of the segment that it continues; it may
  // have one of each kind.
  __device__ __forceinline__ float* part(int block, bool opens) const {
    return block_.plan.parts + static_cast<int64_t>(2 * block + (opens ? 1 : 0)) * X::kRows * X::kPart;
  }

  // Joins the warps' states into a partial result in shared or global memory. Where shared memory is short, half of the
  // warps first add another warp's state to their own; then all warps share the work.
  template <class Queries>
  __device__ __forceinline__ void warps(const Queries& queries, RunningSoftmax<D, N>& softmax, float* to) const {
    Head mine[N];
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const auto add = [](float x, float y) { return x + y; };
      Head& head = mine[n];
      head.total = over_tokens(softmax.total[n], add);
      head.max = head.total == 0 ? -INFINITY
                                 : fmaf(softmax.max[n], queries.scale(n),
                                        block_.call.soft_cap > 0 ? 0.0f : block_.rows()[4 * n + block_.t].shift);
      const float less = block_.plan.codes.value_top * over_tokens(softmax.weights[n], add);
#pragma unroll
      for (int i = 0; i < X::kTiles; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float& x = softmax.sums[i][n][h];
          x = (block_.plan.codes.value_steps[h] * x - less) * format::kLevelUnit;
        }
      }
    }
    __syncthreads();  // the exact tail's scratch is in the same memory
    const int states = block_.plan.states;
    const State own{block_.join() + block_.warp % states * X::kState};
    // In round 0 the warps without room leave their states, if there are such warps; in round 1 the others do. A loop,
    // so that the code that leaves a state exists once.
#pragma unroll 1
    for (int round = states < block_.plan.warps ? 0 : 1; round < 2; ++round) {
      if (round == 1 && block_.warp + states < block_.plan.warps) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
          const Head other = own.head(4 * n + block_.t);
          const float top = fmaxf(mine[n].max, other.max);
          const float by = weight_of(mine[n].max, top), weight = weight_of(other.max, top);
          mine[n] = {top, by * mine[n].total + weight * other.total};
#pragma unroll
          for (int v = 0; v < kVectors; ++v) {
            Vector x = own.sums(n, v, block_.lane);
#pragma unroll
            for (int k = 0; k < kTogether; ++k) {
              float& sum = sum_of(softmax, n, v, k);
              sum = by * sum + weight * x.of[k];
            }
          }
        }
      }
      if ((block_.warp < states) == (round == 1)) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
          if (block_.g == 0) own.set_head(4 * n + block_.t, mine[n]);
#pragma unroll
          for (int v = 0; v < kVectors; ++v) {
            Vector x;
#pragma unroll
            for (int k = 0; k < kTogether; ++k) x.of[k] = sum_of(softmax, n, v, k);
            own.sums(n, v, block_.lane) = x;
          }
        }
      }
      __syncthreads();
    }
    const int lane = lane_computed_here(block_.lane), g = lane / 4, t = lane % 4;
#pragma unroll 1
    for (int i = block_.warp; i < N * kVectors; i += block_.plan.warps) {
      const int n = i % N, v = i / N;
      float weight[kMaxWarps], x[kTogether] = {};
      Head all{-INFINITY, 0};
#pragma unroll
      for (int w = 0; w < kMaxWarps; ++w) {
        weight[w] = w < states ? state(w).head(4 * n + t).max : -INFINITY, all.max = fmaxf(all.max, weight[w]);
      }
#pragma unroll
      for (int w = 0; w < kMaxWarps; ++w) {
        if (w >= states) continue;
        const Head head = state(w).head(4 * n + t);
        const Vector sums = state(w).sums(n, v, lane);
        weight[w] = weight_of(weight[w], all.max);
        all.total = fmaf(weight[w], head.total, all.total);
#pragma unroll
        for (int k = 0; k < kTogether; ++k) x[k] = fmaf(weight[w], sums.of[k], x[k]);
      }
      float* row = to + (4 * n + t) * X::kPart;
      if (v == 0 && g == 0) row[0] = all.max, row[1] = all.total;
      row += kPartHead + 8 * kTogether * v + g;
#pragma unroll
      for (int k = 0; k < kTogether; ++k) row[8 * k] = x[k];
    }
  }

  // Hands this block's partial result to the last of the blocks that share the segment; true: this block is the last
  // one.
  __device__ __forceinline__ bool arrives_last(const List& list) const {
    return arrives_last(list, list.notes().first_block, list.notes().blocks);
  }
  // The same of `count` blocks, by the counter of `block`.
  template <class AnyList>
  __device__ __forceinline__ bool arrives_last(const AnyList& list, int block, int count) const {
    if (threadIdx.x == 0) list.flag() = count_arrival(block_.plan.arrivals + block, count);
    __syncthreads();
    return list.flag();
  }

  // Joins the partial results of all blocks that share the segment into a few, [groups, rows, part_floats] in `join`;
  // returns the number of groups. A thread sums four channels of a row. If a block has more threads than that, several
  // groups of threads share the partial results. Eight of them are loaded at once, under a running maximum.
  __device__ __forceinline__ int blocks(const List& list) const {
    const int first = list.notes().first_block, count = list.notes().blocks;
    constexpr int kQuads = X::kRows * D / 4, kBatch = 8;
    const int groups = max(1, static_cast<int>(blockDim.x) / kQuads);
    for (int e = threadIdx.x; e < groups * kQuads; e += blockDim.x) {
      const int group = e / kQuads, quad = e % kQuads, r = quad / (D / 4), channel = 4 * (quad % (D / 4));
      float m = -INFINITY, total = 0;
      float4 sum{0, 0, 0, 0};
      for (int begin = group; begin < count; begin += kBatch * groups) {
        float2 head[kBatch];
        float4 x[kBatch];
        float top = m;
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          const int i = begin + k * groups;
          head[k] = {-INFINITY, 0}, x[k] = {0, 0, 0, 0};
          if (i >= count) continue;
          const float* from = part(first + i, i == 0) + r * X::kPart;
          head[k] = __ldcg(reinterpret_cast<const float2*>(from));
          x[k] = __ldcg(reinterpret_cast<const float4*>(from + kPartHead + channel));
        }
#pragma unroll
        for (int k = 0; k < kBatch; ++k) top = fmaxf(top, head[k].x);
        const float by = weight_of(m, top);
        m = top, total *= by, sum.x *= by, sum.y *= by, sum.z *= by, sum.w *= by;
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          const float weight = weight_of(head[k].x, top);
          if (weight == 0) continue;
          total = fmaf(weight, head[k].y, total);
          sum.x = fmaf(weight, x[k].x, sum.x), sum.y = fmaf(weight, x[k].y, sum.y);
          sum.z = fmaf(weight, x[k].z, sum.z), sum.w = fmaf(weight, x[k].w, sum.w);
        }
      }
      float* to = block_.join() + group * kSegmentFloats + r * X::kPart;
      if (channel == 0) to[0] = m, to[1] = total;
      *reinterpret_cast<float4*>(to + kPartHead + channel) = sum;
    }
    __syncthreads();
    return groups;
  }

 private:
  // A row's maximum and denominator.
  struct Head {
    float max, total;
  };
  // Sums of one row that a lane holds: of every eighth channel, `kTogether` of them.
  static constexpr int kTogether = X::kTogether, kVectors = 2 * X::kTiles / kTogether;
  struct alignas(4 * kTogether) Vector {
    float of[kTogether];
  };

  // A warp's state in shared memory: float [2, rows], then Vector [N, kVectors, 32 lanes].
  struct State {
    float* memory;

    __device__ __forceinline__ Head head(int row) const { return {memory[row], memory[X::kRows + row]}; }
    __device__ __forceinline__ void set_head(int row, const Head& x) const {
      memory[row] = x.max, memory[X::kRows + row] = x.total;
    }
    __device__ __forceinline__ Vector& sums(int n, int v, int lane) const {
      return reinterpret_cast<Vector*>(memory + X::kStateHead)[(n * kVectors + v) * 32 + lane];
    }
  };
  __device__ __forceinline__ State state(int warp) const { return {block_.join() + warp * X::kState}; }

  // Sum k of vector v of row 4 n + t: of channel 8 (kTogether v + k) + g.
  static __device__ __forceinline__ float& sum_of(RunningSoftmax<D, N>& softmax, int n, int v, int k) {
    return softmax.sums[(kTogether * v + k) / 2][n][k % 2];
  }

  const BlockView block_;
};

}  // namespace turboquant::cuda::split_kv
