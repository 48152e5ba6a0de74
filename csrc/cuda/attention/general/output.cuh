// From sums of values to results: the transform back, and what the softmax's totals make of it.
#pragma once

#include "cuda/attention/general/row_transform.cuh"
#include "cuda/attention/general/softmax.cuh"

namespace turboquant::cuda::general {

template <typename S>
class Output {
 public:
  __device__ __forceinline__ explicit Output(const BlockContext<S>& block) : block_(block) {}

  // After a pass. The sums of exact values are rotated, so that values in codes, which are stored rotated, can be
  // added to them. After the last pass, over codes, the sums are rotated back: lse and the outputs of all rows are
  // written.
  __device__ __forceinline__ void finish(bool exact, const Softmax<S>& softmax, ValueSums<S>& sums) const {
    if (!exact) finish_rows(softmax);
    exchange(exact, sums);
  }

 private:
  // lse, and `factor` from sums to outputs.
  __device__ __forceinline__ void finish_rows(const Softmax<S>& softmax) const {
    const Attention& a = block_.a;
    BlockConstants<S>& constants = block_.shared.constants();
#pragma unroll
    for (int i = 0; i < S::kLaneRows; ++i) {
      const typename Softmax<S>::Row row = softmax.row(i);
      const int r = block_.thread.lane_row(i);
      if (block_.thread.t != 0 || block_.thread.column_warp != 0 || r >= block_.work.rows) continue;
      const WorkItem::Query at = block_.query(r);
      float top = row.reference, total = row.total, keep = 1;
      float& lse = a.lse[at.token * a.q_heads + at.head];
      if (total == 0) {  // no keys
        constants.factor[r] = 0;
        lse = a.sink_logits ? a.sink_logits[at.head] : -INFINITY;
        continue;
      }
      if (a.sink_logits) {  // one more score, without a value
        const float sink = a.sink_logits[at.head] * kLog2E;
        top = fmaxf(top, sink);
        keep = exp2_fast(row.reference - top);
        total = total * keep + exp2_fast(sink - top);
      }
      constants.factor[r] = keep / total * row.unit * block_.x.norm;
      lse = (top + log2f(total)) * kLn2;
    }
  }

  // One strip of every team at a time becomes float32 rows in shared memory, which the warps transform, and goes back
  // into the sums or to the outputs.
  __device__ __forceinline__ void exchange(bool exact, ValueSums<S>& sums) const {
    const int d = block_.x.layout.head_dim, stride = SharedMemory<S>::sum_stride(d), lane = block_.thread.lane;
    float* rows = block_.shared.sum_rows();
    float* mine = rows + block_.thread.warp * kWarpRows * stride;
#pragma unroll 1
    for (int strip = 0; strip < S::kStrips; ++strip) {
      __syncthreads();
      sums.for_each_pair(strip, rows, stride, [](float& low, float& high, float2* at) { *at = {low, high}; });
      __syncthreads();
      if (exact) {
        for (int r = 0; r < kWarpRows; ++r) {
          for (int c = lane; c < d; c += 32) mine[r * stride + c] *= block_.a.value_signs[c] * block_.x.norm;
        }
        __syncwarp();
      }
      transform_rows(mine, stride, kWarpRows, block_.x.split, block_.shared.constants().hartley, lane);
      if (exact) {
        __syncthreads();
        sums.for_each_pair(strip, rows, stride, [](float& low, float& high, float2* at) { low = at->x, high = at->y; });
        continue;
      }
      for (int r = 0; r < kWarpRows; ++r) write_row(strip, block_.thread.warp * kWarpRows + r, mine + r * stride);
    }
    __syncthreads();
  }

  // sum_row: of the rows in shared memory, which are those of one strip of every team
  __device__ __forceinline__ void write_row(int strip, int sum_row, const float* sums) const {
    const Attention& a = block_.a;
    const int d = block_.x.layout.head_dim;
    const int r = sum_row / S::kStripRows * S::kTeamRows + S::kStripRows * strip + sum_row % S::kStripRows;
    if (r >= block_.work.rows) return;
    const WorkItem::Query at = block_.query(r);
    const float factor = block_.shared.constants().factor[r];
    const int64_t to = (at.token * a.q_heads + at.head) * d;
    for (int c = block_.thread.lane; c < d; c += 32) {
      store_float(a.out, a.dtype, to + c, sums[c] * (factor * a.value_signs[c]));
    }
  }

  static constexpr int kWarpRows = SharedMemory<S>::kSumRows / S::kWarps;

  const BlockContext<S>& block_;
};

}  // namespace turboquant::cuda::general
