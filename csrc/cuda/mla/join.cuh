// The end of a segment: its partial results, in the order of the blocks that left them, become rows of out and lse. So
// results are the same in every run.
//
// A kernel of its own joins them: it has as many warps as there are rows, or many times as many. Where few blocks share
// most segments, but many share one (a long sequence among short ones), that one's rows have a block each. With more
// segments than blocks, which have little to share then, the last of the blocks that share a segment joins its parts,
// and the kernel joins long segments only.
#pragma once

#include <cooperative_groups.h>

#include "cuda/attention/softmax_math.cuh"
#include "cuda/mla/shape.cuh"

namespace turboquant::cuda::mla {

// Where rows go, and what turns their sums into latents. In registers: a function that is not inlined would read the
// members of the call from memory, one after the other, whenever it needs them.
struct Results {
  const float *signs, *inverse, *center;
  void* out;
  float* lse;
  Dtype dtype;

  explicit __device__ __forceinline__ Results(const Latents& x)
      : signs(x.signs), inverse(x.a.channels.inverse), center(x.a.channels.center), out(x.a.out), lse(x.a.lse),
        dtype(x.a.dtype) {}
};

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
  static __device__ __forceinline__ Loaded read_shared(const float* part, int lane) {
    Loaded l;
    l.head = *reinterpret_cast<const float4*>(part);
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      l.x[i] = *reinterpret_cast<const float4*>(part + kPartHead + Rotation::channel(lane, i));
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
  __device__ __forceinline__ void rotate_back(const Results& to, int lane) {
    if (to.signs) {
      transform<Rotation>(y, lane);
      apply_signs<Rotation>(y, to.signs, lane);
    }
    if (to.inverse) apply_signs<Rotation>(y, to.inverse, lane);
    if (to.center) {
      float c[kPerLane];
      load<Rotation>(to.center, lane, c);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) y[i] = fmaf(total, c[i], y[i]);
    }
  }

  // row: token * q_heads + head
  __device__ __forceinline__ void write(const Results& to, int64_t row, int lane) {
    const float inverse = total == 0 ? 0 : 1 / total;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) y[i] *= inverse;
    store_as<Rotation>(y, lane, to.out, to.dtype, row * R);
    if (lane == 0) to.lse[row] = total == 0 ? -INFINITY : (top + log2f(total)) * kLn2;
  }
};

// By all warps of the last block. AT_ONCE: parts whose loads overlap. whole: the segment's only part, in shared memory,
// or null.
template <class S, int AT_ONCE>
__device__ __forceinline__ void write_results(const BlockView& block, const Segment& segment, const SharedBy& shared,
                                              const float* whole) {
  const Latents& x = block.call;
  const Results results(x);
  const float* parts = block.plan.parts;
  const int first = segment.block * S::kRows, rows = min(segment.work.rows(x.a) - first, S::kRows);
  const int64_t to = int64_t{segment.work.first_query} * x.a.q_heads + first;
#pragma unroll 1
  for (int r = block.warp; r < rows; r += S::kWarps) {
    const auto row_of = [&](int of_block, Part kind) {
      return parts + ((int64_t{kParts} * of_block + kind) * S::kRows + r) * S::kPart;
    };
    JoinedRow<S::kLatent> row;
    if (S::kKeepsWhole && whole) {
      row.add(row.read_shared(whole + r * S::kPart, block.lane));
    } else {
      row.template add_all<AT_ONCE>(0, 1, shared.blocks, block.lane, [&](int i) {
        return row_of(shared.first + i, shared.part_of_codes(shared.first + i));
      });
    }
    row.rotate_back(results, block.lane);
    row.template add_all<AT_ONCE>(0, 1, shared.exact_blocks(), block.lane, [&](int i) {
      return row_of(shared.exact + i, shared.part_of_exact(shared.exact + i));
    });
    row.write(results, to + r, block.lane);
  }
}

// The same as a function that takes few registers, for kernels with roles. Inlined, it takes twenty of them from their
// loops over units, which then read variables from local memory.
template <class S>
__device__ __noinline__ void write_results_apart(const Latents& x, const Plan& plan, const Segment& segment,
                                                 SharedBy shared, const float* whole) {
  write_results<S, 1>(BlockView(x, plan, nullptr), segment, shared, whole);
}

// Adds rows at(0) to at(count - 1) into `sum`, by all threads of a block of join_kernel, each for its channels.
template <int R, typename At>
__device__ __forceinline__ void add_rows(int count, float* sum, At&& at) {
  constexpr int kEach = (R + 32 * kJoinWarps - 1) / (32 * kJoinWarps);
  const int first = threadIdx.x * kEach;
  if (first >= R) return;
  float top = -INFINITY, total = 0, y[kEach] = {};
  for (int i = 0; i < count; ++i) top = fmaxf(top, at(i)[0]);
  for (int i = 0; i < count; ++i) {
    const float* row = at(i);
    if (row[0] == -INFINITY && row[1] == 0) continue;
    const float weight = weight_of(row[0], top);
    total += weight * row[1];
#pragma unroll
    for (int k = 0; k < kEach; ++k) y[k] += weight * row[kPartHead + first + k];
  }
#pragma unroll
  for (int k = 0; k < kEach; ++k) sum[kPartHead + first + k] = y[k];
  if (threadIdx.x == 0) sum[0] = top, sum[1] = total, sum[2] = 0;
}

// Where parts are that a row of a segment consists of.
template <int R>
struct RowParts {
  const Plan& plan;
  int rows, row;  // of a block of rows
  SharedBy shared;
  int opened;  // the number of the parts that the segment begins with

  // number: of the segment
  __device__ __forceinline__ RowParts(const Plan& p, int block_rows, int row_of_block, const SharedBy& blocks,
                                      int number)
      : plan(p), rows(block_rows), row(row_of_block), shared(blocks), opened(p.segments ? number : blocks.first) {}

  // index: of a row of the sequence
  __device__ __forceinline__ RowParts(const Plan& p, const Attention& a, int sequence, int index, int block_rows)
      : RowParts(p, block_rows, index % block_rows, first_segment(p, a, block_rows, sequence) + index / block_rows) {}

  // The part of the i-th block of those that share the segment, and of those that have its exact keys.
  __device__ __forceinline__ const float* codes(int i) const {
    return at(shared.first + i, shared.part_of_codes(shared.first + i));
  }
  __device__ __forceinline__ const float* exact(int i) const {
    return at(shared.exact + i, shared.part_of_exact(shared.exact + i));
  }

 private:
  __device__ __forceinline__ RowParts(const Plan& p, int block_rows, int row_of_block, int number)
      : RowParts(p, block_rows, row_of_block, p.segments[number], number) {}
  __device__ __forceinline__ const float* at(int block, Part kind) const {
    const int number = block == shared.first ? opened : block;
    return plan.parts + ((int64_t{kParts} * number + kind) * rows + row) * (kPartHead + R);
  }
};

// Joins row `index` of a sequence, by `blocks` blocks of which this is number `rank`; the first writes the result.
// AT_ONCE: parts whose loads overlap.
template <int R, int AT_ONCE>
__device__ __forceinline__ void join_row(const Latents& x, const RowParts<R>& parts, int sequence, int index,
                                         int blocks, int rank) {
  using Row = JoinedRow<R>;
  __shared__ __align__(16) float sums[kJoinWarps][kPartHead + R], exact[kPartHead + R], sum[kPartHead + R];
  const Attention& a = x.a;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Results results(x);
  Row own;
  own.template add_all<AT_ONCE>(rank * kJoinWarps + warp, blocks * kJoinWarps, parts.shared.blocks, lane,
                                [&](int i) { return parts.codes(i); });
  own.leave(sums[warp], lane);
  if (rank == 0 && warp == kJoinWarps - 1) {
    Row of_exact;
    of_exact.template add_all<AT_ONCE>(0, 1, parts.shared.exact_blocks(), lane, [&](int i) { return parts.exact(i); });
    of_exact.leave(exact, lane);
  }
  __syncthreads();
  add_rows<R>(kJoinWarps, sum, [&](int i) { return sums[i]; });
  __syncthreads();
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (blocks > 1) {
    const cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
    cluster.sync();
    if (rank == 0) add_rows<R>(blocks, sums[0], [&](int i) { return cluster.map_shared_rank(sum, i); });
    cluster.sync();  // nobody leaves before its sum has been read
    if (rank > 0) return;
  }
#endif
  if (warp > 0) return;
  Row row;
  row.add(Row::read_shared(blocks > 1 ? sums[0] : sum, lane));
  row.rotate_back(results, lane);
  row.add(Row::read_shared(exact, lane));
  row.write(results, int64_t{a.first_query(sequence)} * a.q_heads + index, lane);
}

// Joins parts where few blocks share most segments: a warp for each row; block (i, s) has rows of sequence s. Behind
// the sequences, block (i, seqs + kJoinWarps n + w) has row kJoinWarps i + w of long segment n. Where the last blocks
// join short segments, there are only those behind.
template <int R>
__global__ void __launch_bounds__(32 * kJoinWarps, 3)
    join_few_kernel(const __grid_constant__ Latents x, const __grid_constant__ Plan plan, int rows) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  let_next_kernel_begin();
  wait_for_previous_kernel();
  const Attention& a = x.a;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int behind = static_cast<int>(blockIdx.y) - (plan.segments ? a.seqs : 0);
  if (behind >= 0) {
    const int row = blockIdx.x * kJoinWarps + behind % kJoinWarps;
    const LongSegment segment = plan.long_segments[behind / kJoinWarps];
    if (row >= rows || segment.sequence < 0) return;
    const int index = segment.block * rows + row;
    if (index >= a.num_queries(segment.sequence) * a.q_heads) return;
    const int number = first_segment(plan, a, rows, segment.sequence) + segment.block;
    join_row<R, 2>(x, RowParts<R>(plan, rows, row, segment.shared, number), segment.sequence, index, 1, 0);
    return;
  }
  const int index = blockIdx.x * kJoinWarps + warp, sequence = blockIdx.y;
  if (index >= a.num_queries(sequence) * a.q_heads) return;
  const RowParts<R> parts(plan, a, sequence, index, rows);
  if (parts.shared.blocks > plan.most_parts) return;
  const Results results(x);
  JoinedRow<R> row;
  row.template add_all<2>(0, 1, parts.shared.blocks, lane, [&](int i) { return parts.codes(i); });
  row.rotate_back(results, lane);
  row.template add_all<2>(0, 1, parts.shared.exact_blocks(), lane, [&](int i) { return parts.exact(i); });
  row.write(results, int64_t{a.first_query(sequence)} * a.q_heads + index, lane);
#endif
}

// Joins parts where many do: a cluster of blocks for each row, before compute capability 9.0 one block; cluster
// (index, s) has row `index` of sequence s. rows: of a block of rows.
template <int R>
__global__ void __launch_bounds__(32 * kJoinWarps)
    join_kernel(const __grid_constant__ Latents x, const __grid_constant__ Plan plan, int rows) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  let_next_kernel_begin();
  wait_for_previous_kernel();
  int blocks = 1, rank = 0;
#if __CUDA_ARCH__ >= 900
  const cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
  blocks = static_cast<int>(cluster.num_blocks()), rank = static_cast<int>(cluster.block_rank());
#endif
  const int index = blockIdx.x / blocks, sequence = blockIdx.y;
  if (index >= x.a.num_queries(sequence) * x.a.q_heads) return;
  join_row<R, 4>(x, RowParts<R>(plan, x.a, sequence, index, rows), sequence, index, blocks, rank);
#endif
}

}  // namespace turboquant::cuda::mla
