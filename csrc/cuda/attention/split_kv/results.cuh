// From the joined sums of a segment to the call's results: the last rotation, attention sinks, the division by the
// denominator, and the logarithm of the denominator.
#pragma once

#include "cuda/attention/split_kv/join.cuh"
#include "cuda/attention/split_kv/rows.cuh"

namespace turboquant::cuda::split_kv {

// parts: [groups, ROWS, part_floats(D)] in shared memory, a few partial results of the segment. A warp takes a row at a
// time.
template <int D, int ROWS>
__device__ __forceinline__ void write_results(const BlockView& block, const QueryRows<D, ROWS>& rows,
                                              const Segment& segment, const float* parts, int groups) {
  using Lanes = RowLanes<D>;
  constexpr int kPart = part_floats(D);
  const Attention& a = block.call;
  const int lane = computed_here(block.lane);
#pragma unroll 1
  for (int r = block.warp; r < ROWS; r += block.plan.warps) {
    const float* from = parts + r * kPart;
    float m = -INFINITY, total = 0, y[Lanes::kPerLane] = {};
#pragma unroll 1
    for (int g = 0; g < groups; ++g, from += ROWS * kPart) {
      const float top = fmaxf(m, from[0]), by = weight_of(m, top), weight = weight_of(from[0], top);
      m = top, total = total * by + weight * from[1];
#pragma unroll
      for (int i = 0; i < Lanes::kPerLane; ++i) {
        y[i] = y[i] * by + weight * from[kPartHead + Lanes::channel(lane, i)];
      }
    }
    transform<typename Lanes::Rotation>(y, lane);
    Lanes::apply(block.signs() + D, lane, y);
    RowPlace row;
    if (!rows.find(segment, r, row)) continue;
    const float by = a.sink_logits ? add_sink(a.sink_logits[row.head], m, total) : 1;
    const int64_t to = int64_t{row.token} * a.q_heads + row.head;
    const float inverse = total == 0 ? 0 : by / total;
#pragma unroll
    for (int i = 0; i < Lanes::kPerLane; ++i) {
      if (Lanes::writes(lane)) store_float(a.out, a.dtype, to * D + Lanes::channel(lane, i), y[i] * inverse);
    }
    if (lane == 0) {
      a.lse[to] = total == 0 ? -INFINITY : by == 0 ? a.sink_logits[row.head] : (m + log2f(total)) * kLn2;
    }
  }
}

}  // namespace turboquant::cuda::split_kv
