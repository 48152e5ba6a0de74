// The end of a segment: its partial results, in the order of the blocks that left them, become rows of out and lse. So
// results are the same in every run.
//
// The last of the blocks that share a segment joins them. Where so many blocks share one that this would take too long,
// a second kernel does, with a block for each row.
#pragma once

#include "cuda/attention/softmax_math.cuh"
#include "cuda/mla/shape.cuh"

namespace turboquant::cuda::mla {

template <class S>
__device__ __forceinline__ float* part_of(const Plan& plan, int block, int kind) {
  return plan.parts + (int64_t{kParts} * block + kind) * S::kRows * S::kPart;
}

// A row while partial results are added to it; a lane has some of its channels.
template <int R>
struct JoinedRow {
  using Rotation = RowRotation<R>;
  static constexpr int kPerLane = Rotation::kPerLane, kQuads = kPerLane / 4;

  float top = -INFINITY, total = 0, y[kPerLane] = {};

  struct Loaded {
    float4 head, x[kQuads];
  };
  // part: a row of a partial result, which other blocks may have written
  static __device__ __forceinline__ Loaded read(const float* part, int lane) {
    Loaded l;
    l.head = __ldcg(reinterpret_cast<const float4*>(part));
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      l.x[i] = __ldcg(reinterpret_cast<const float4*>(part + kPartHead + Rotation::channel(lane, i)));
    }
    return l;
  }
  __device__ __forceinline__ void add(const Loaded& l) {
    if (l.head.x == -INFINITY && l.head.y == 0) return;  // no keys: the sums may be anything
    const float higher = fmaxf(top, l.head.x), by = weight_of(top, higher), weight = weight_of(l.head.x, higher);
    top = higher, total = total * by + weight * l.head.y;
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const float x[4] = {l.x[i].x, l.x[i].y, l.x[i].z, l.x[i].w};
#pragma unroll
      for (int k = 0; k < 4; ++k) y[4 * i + k] = y[4 * i + k] * by + weight * (x[k] - l.head.z);
    }
  }
  // Parts first, first + step, .. of `count`, a few at a time, so that their loads overlap. at(i): row of part i
  template <int kBatch, typename At>
  __device__ __forceinline__ void add_all(int first, int step, int count, int lane, At&& at) {
#pragma unroll 1
    for (int i = first; i < count; i += kBatch * step) {
      Loaded l[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        l[k].head = {-INFINITY, 0, 0, 0};
        if (i + k * step < count) l[k] = read(at(i + k * step), lane);
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) add(l[k]);
    }
  }

  // A row in memory, like that of a partial result.
  __device__ __forceinline__ void leave(float* to, int lane) const {
    if (lane == 0) *reinterpret_cast<float4*>(to) = {top, total, 0, 0};
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      *reinterpret_cast<float4*>(to + kPartHead + Rotation::channel(lane, i)) = {y[4 * i], y[4 * i + 1], y[4 * i + 2],
                                                                                 y[4 * i + 3]};
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

  // row: token * q_heads + head
  __device__ __forceinline__ void write(const Attention& a, int64_t row, int lane) {
    const float inverse = total == 0 ? 0 : 1 / total;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) y[i] *= inverse;
    store_as<Rotation>(y, lane, a.out, a.dtype, row * R);
    if (lane == 0) a.lse[row] = total == 0 ? -INFINITY : (top + log2f(total)) * kLn2;
  }
};

// By all warps of the last block.
template <class S>
__device__ __forceinline__ void write_results(const BlockView& block, const Segment& segment, const SharedBy& shared) {
  const Latents& x = block.call;
#pragma unroll 1
  for (int r = block.warp; r < S::kRows; r += S::kWarps) {
    const int index = segment.block * S::kRows + r;
    if (index >= segment.work.rows(x.a)) continue;
    JoinedRow<S::kLatent> row;
    row.template add_all<2>(0, 1, shared.blocks, block.lane, [&](int i) {
      return part_of<S>(block.plan, shared.first + i, i == 0 ? kOpened : kContinued) + r * S::kPart;
    });
    row.rotate_back(x, block.lane);
    if (shared.exact >= 0) {
      row.add(row.read(part_of<S>(block.plan, shared.exact, kExact) + r * S::kPart, block.lane));
    }
    const RowPlace place = place_of_row(x.a, segment.sequence, segment.work.length, segment.work.queries, index);
    row.write(x.a, int64_t{place.token} * x.a.q_heads + place.head, block.lane);
  }
}

// The second kernel: block (index, s) has row `index` of sequence s. rows: of a block of rows.
template <int R>
__global__ void __launch_bounds__(32 * kJoinWarps)
    join_kernel(const __grid_constant__ Latents x, const __grid_constant__ Plan plan, int rows) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __shared__ __align__(16) float sums[kJoinWarps][kPartHead + R];
  let_next_kernel_begin();
  wait_for_previous_kernel();
  const Attention& a = x.a;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, index = blockIdx.x, sequence = blockIdx.y;
  const int queries = a.num_queries(sequence);
  if (index >= queries * a.q_heads) return;
  const SharedBy shared = plan.segments[sequence * plan.row_blocks + index / rows];
  const auto row_at = [&](int block, int kind) {
    return plan.parts + ((int64_t{kParts} * block + kind) * rows + index % rows) * (kPartHead + R);
  };
  JoinedRow<R> own;
  own.template add_all<4>(warp, kJoinWarps, shared.blocks, lane,
                          [&](int i) { return row_at(shared.first + i, i == 0 ? kOpened : kContinued); });
  own.leave(sums[warp], lane);
  __syncthreads();
  if (warp > 0) return;
  JoinedRow<R> row;
  for (int w = 0; w < kJoinWarps; ++w) {
    typename JoinedRow<R>::Loaded l;
    l.head = *reinterpret_cast<const float4*>(sums[w]);
#pragma unroll
    for (int i = 0; i < row.kQuads; ++i) {
      l.x[i] = *reinterpret_cast<const float4*>(sums[w] + kPartHead + RowRotation<R>::channel(lane, i));
    }
    row.add(l);
  }
  row.rotate_back(x, lane);
  if (shared.exact >= 0) row.add(row.read(row_at(shared.exact, kExact), lane));
  const RowPlace place = place_of_row(a, sequence, a.length(sequence), queries, index);
  row.write(a, int64_t{place.token} * a.q_heads + place.head, lane);
#endif
}

}  // namespace turboquant::cuda::mla
