// From the joined sums of a segment to the call's results: the last rotation, attention sinks, the division by the
// denominator, and the logarithm of the denominator.
#pragma once

#include "cuda/attention/split_kv/join.cuh"
#include "cuda/attention/split_kv/rows.cuh"

namespace turboquant::cuda::split_kv {

// A lane's channels of a row, which begins at element `at`. Memory is only known to begin at a multiple of 4 bytes.
template <int D>
__device__ __forceinline__ void store_row(const float (&y)[RowLanes<D>::kPerLane], int lane, void* out, Dtype dtype,
                                          int64_t at) {
  using Lanes = RowLanes<D>;
  with_float_type(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr bool kPairs = sizeof(T) == 2 && Lanes::Rotation::kVec % 2 == 0;
#pragma unroll
    for (int i = 0; i < Lanes::kPerLane; i += kPairs ? 2 : 1) {
      T* to = static_cast<T*>(out) + at + Lanes::channel(lane, i);
      if constexpr (kPairs) {
        store_floats<2>(y + i, to);
      } else {
        *to = static_cast<T>(y[i]);
      }
    }
  });
}

// parts: [groups, ROWS, part_floats(D)] in shared memory, a few partial results of the segment. A warp takes a few rows
// at a time, because each waits for exchanges between lanes most of the time.
template <int D, int ROWS>
__device__ __forceinline__ void write_results(const BlockView& block, const QueryRows<D, ROWS>& rows,
                                              const Segment& segment, const float* parts, int groups) {
  using Lanes = RowLanes<D>;
  constexpr int kPart = part_floats(D), kAtOnce = rows_at_once(ROWS);
  const Attention& a = block.call;
  const int lane = lane_computed_here(block.lane), step = block.plan.warps;
#pragma unroll 1
  for (int r = block.warp; r < ROWS; r += kAtOnce * step) {
    float m[kAtOnce], total[kAtOnce] = {}, y[kAtOnce][Lanes::kPerLane] = {};
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) m[k] = -INFINITY;
#pragma unroll 1
    for (int g = 0; g < groups; ++g) {
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const float* from = parts + (g * ROWS + min(r + k * step, ROWS - 1)) * kPart;
        const float top = fmaxf(m[k], from[0]), by = weight_of(m[k], top), weight = weight_of(from[0], top);
        m[k] = top, total[k] = total[k] * by + weight * from[1];
#pragma unroll
        for (int i = 0; i < Lanes::kPerLane; ++i) {
          y[k][i] = y[k][i] * by + weight * from[kPartHead + Lanes::channel(lane, i)];
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      transform<typename Lanes::Rotation>(y[k], lane);
      Lanes::apply(block.signs() + D, lane, y[k]);
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      RowPlace row;
      if (r + k * step >= ROWS || !rows.find(segment, r + k * step, row)) continue;
      const float by = a.sink_logits ? add_sink(a.sink_logits[row.head], m[k], total[k]) : 1;
      const int64_t to = int64_t{row.token} * a.q_heads + row.head;
      const float inverse = total[k] == 0 ? 0 : by / total[k];
#pragma unroll
      for (int i = 0; i < Lanes::kPerLane; ++i) y[k][i] *= inverse;
      if (Lanes::writes(lane)) store_row<D>(y[k], lane, a.out, a.dtype, to * D);
      if (lane == 0) {
        a.lse[to] = total[k] == 0 ? -INFINITY : by == 0 ? a.sink_logits[row.head] : (m[k] + log2f(total[k])) * kLn2;
      }
    }
  }
}

}  // namespace turboquant::cuda::split_kv
