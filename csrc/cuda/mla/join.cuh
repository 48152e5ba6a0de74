// The end of a segment: its partial results, in the order of the blocks that left them, become rows of out and lse. So
// results are the same in every run.
#pragma once

#include "cuda/attention/softmax_math.cuh"
#include "cuda/mla/shape.cuh"

namespace turboquant::cuda::mla {

template <class S>
__device__ __forceinline__ float* part_of(const Plan& plan, int block, int kind) {
  return plan.parts + (int64_t{kParts} * block + kind) * S::kRows * S::kPart;
}

// A row while partial results are added to it; a lane has some of its channels.
template <class S>
struct JoinedRow {
  using Rotation = typename S::Rotation;
  static constexpr int kPerLane = Rotation::kPerLane;

  float top = -INFINITY, total = 0, y[kPerLane] = {};

  // part: a row of a partial result
  __device__ __forceinline__ void add(const float* part, int lane) {
    const float4 head = __ldcg(reinterpret_cast<const float4*>(part));
    float4 x[kPerLane / 4];
#pragma unroll
    for (int i = 0; i < kPerLane / 4; ++i) {
      x[i] = __ldcg(reinterpret_cast<const float4*>(part + kPartHead + Rotation::channel(lane, i)));
    }
    if (head.x == -INFINITY && head.y == 0) return;  // no keys: the sums may be anything
    const float higher = fmaxf(top, head.x), by = weight_of(top, higher), weight = weight_of(head.x, higher);
    top = higher, total = total * by + weight * head.y;
#pragma unroll
    for (int i = 0; i < kPerLane / 4; ++i) {
      y[4 * i] = y[4 * i] * by + weight * (x[i].x - head.z), y[4 * i + 1] = y[4 * i + 1] * by + weight * (x[i].y - head.z);
      y[4 * i + 2] = y[4 * i + 2] * by + weight * (x[i].z - head.z);
      y[4 * i + 3] = y[4 * i + 3] * by + weight * (x[i].w - head.z);
    }
  }

  // Sums of levels become sums of latents.
  __device__ __forceinline__ void rotate_back(const Latents& x, int lane) {
    if (x.signs) {
      transform<Rotation>(y, lane);
      apply_signs<Rotation>(y, x.signs, lane);
    }
    const format::Channels& channels = x.a.channels;
    if (channels.inverse) apply_signs<Rotation>(y, channels.inverse, lane);
    if (channels.center) {
      float c[kPerLane];
      load<Rotation>(channels.center, lane, c);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) y[i] = fmaf(total, c[i], y[i]);
    }
  }
};

// By all warps. first, blocks: the blocks that share the segment. exact: the one that has left its exact keys' part, or
// -1.
template <class S>
__device__ __forceinline__ void write_results(const BlockView& block, const Segment& segment, int first, int blocks,
                                              int exact) {
  const Latents& x = block.call;
  const Attention& a = x.a;
#pragma unroll 1
  for (int r = block.warp; r < S::kRows; r += S::kWarps) {
    const int index = segment.block * S::kRows + r;
    if (index >= segment.work.rows(a)) continue;
    JoinedRow<S> row;
#pragma unroll 2
    for (int i = 0; i < blocks; ++i) {
      row.add(part_of<S>(block.plan, first + i, i == 0 ? kOpened : kContinued) + r * S::kPart, block.lane);
    }
    row.rotate_back(x, block.lane);
    if (exact >= 0) row.add(part_of<S>(block.plan, exact, kExact) + r * S::kPart, block.lane);
    const RowPlace place =
        place_of_row(a, segment.sequence, segment.work.length, segment.work.queries, index);
    const int64_t to = int64_t{place.token} * a.q_heads + place.head;
    const float inverse = row.total == 0 ? 0 : 1 / row.total;
#pragma unroll
    for (int i = 0; i < row.kPerLane; ++i) row.y[i] *= inverse;
    store_as<typename S::Rotation>(row.y, block.lane, a.out, a.dtype, to * S::kLatent);
    if (block.lane == 0) a.lse[to] = row.total == 0 ? -INFINITY : (row.top + log2f(row.total)) * kLn2;
  }
}

}  // namespace turboquant::cuda::mla
