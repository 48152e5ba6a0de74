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
#include "cuda/mla/few_exact.cuh"
#include "cuda/mla/joined_row.cuh"
#include "cuda/mla/shape.cuh"

namespace turboquant::cuda::mla {

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
    if (first + r < block.plan.few_rows) {
      row.add(row.read(few_exact_row<S::kLatent>(block.plan, segment.sequence, first + r), block.lane));
    }
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

// Adds rows at(0) to at(count - 1), of which there are up to MOST, into `sum`, by all threads of a block of join_kernel,
// each for its channels. All are read at once.
template <int R, int MOST, typename At>
__device__ __forceinline__ void add_rows(int count, float* sum, At&& at) {
  constexpr int kEach = (R + 32 * kJoinWarps - 1) / (32 * kJoinWarps);
  const int first = threadIdx.x * kEach;
  if (first >= R) return;
  float tops[MOST], totals[MOST], x[MOST][kEach];
  float top = -INFINITY, total = 0, y[kEach] = {};
#pragma unroll
  for (int i = 0; i < MOST; ++i) {
    const float* row = at(min(i, count - 1));
    tops[i] = row[0], totals[i] = row[1];
#pragma unroll
    for (int k = 0; k < kEach; ++k) x[i][k] = row[kPartHead + first + k];
    top = fmaxf(top, tops[i]);
  }
#pragma unroll
  for (int i = 0; i < MOST; ++i) {
    if (i >= count || (tops[i] == -INFINITY && totals[i] == 0)) continue;
    const float weight = weight_of(tops[i], top);
    total += weight * totals[i];
#pragma unroll
    for (int k = 0; k < kEach; ++k) y[k] += weight * x[i][k];
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
  int number;     // of the segment
  SharedBy shared;

  // The part of the i-th block of those that share the segment, and of those that have its exact keys.
  __device__ __forceinline__ const float* codes(int i) const {
    return at(shared.first + i, shared.part_of_codes(shared.first + i));
  }
  __device__ __forceinline__ const float* exact(int i) const {
    return at(shared.exact + i, shared.part_of_exact(shared.exact + i));
  }

 private:
  __device__ __forceinline__ const float* at(int block, Part kind) const {
    const int place = plan.segments && block == shared.first ? number : block;
    return plan.parts + ((int64_t{kParts} * place + kind) * rows + row) * (kPartHead + R);
  }
};

// Row `index` of sequence `sequence`, as the kernels that join find it. What does not depend on the kernels before is
// read before they have ended.
template <int R>
struct JoinedPlace {
  int number, row;     // of the segment; of its block of rows
  int64_t to;          // the row of out
  const float* exact;  // its part of few exact keys, or null

  __device__ __forceinline__ JoinedPlace(const Latents& x, const Plan& plan, int rows, int sequence, int index)
      : number(first_segment(plan, x.a, rows, sequence) + index / rows), row(index % rows),
        to(int64_t{x.a.first_query(sequence)} * x.a.q_heads + index),
        exact(index < plan.few_rows ? few_exact_row<R>(plan, sequence, index) : nullptr) {}
};

// Joins a row by `blocks` blocks of which this is number `rank`; the first writes the result. AT_ONCE: parts whose loads
// overlap.
template <int R, int AT_ONCE>
__device__ __forceinline__ void join_row(const Latents& x, const RowParts<R>& parts, const JoinedPlace<R>& place,
                                         int blocks, int rank) {
  using Row = JoinedRow<R>;
  __shared__ __align__(16) float sums[kJoinWarps][kPartHead + R], exact[kPartHead + R], sum[kPartHead + R];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Results results(x);
  if (parts.shared.blocks <= kJoinWarps * AT_ONCE) {  // a block can read as many at once
    if (rank > 0) return;
    blocks = 1;
  }
  Row own;
  own.template add_all<AT_ONCE>(rank * kJoinWarps + warp, blocks * kJoinWarps, parts.shared.blocks, lane,
                                [&](int i) { return parts.codes(i); });
  own.leave(sums[warp], lane);
  if (rank == 0 && warp == kJoinWarps - 1) {
    Row of_exact;
    if (place.exact) of_exact.add(Row::read(place.exact, lane));
    of_exact.template add_all<AT_ONCE>(0, 1, parts.shared.exact_blocks(), lane, [&](int i) { return parts.exact(i); });
    of_exact.leave(exact, lane);
  }
  __syncthreads();
  add_rows<R, kJoinWarps>(kJoinWarps, sum, [&](int i) { return sums[i]; });
  __syncthreads();
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (blocks > 1) {
    const cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
    cluster.sync();
    if (rank == 0) {
      add_rows<R, kMostJoinBlocks>(blocks, sums[0], [&](int i) { return cluster.map_shared_rank(sum, i); });
    }
    cluster.sync();  // nobody leaves before its sum has been read
    if (rank > 0) return;
  }
#endif
  if (warp > 0) return;
  Row row;
  row.add(Row::read_shared(blocks > 1 ? sums[0] : sum, lane));
  row.rotate_back(results, lane);
  row.add(Row::read_shared(exact, lane));
  row.write(results, place.to, lane);
}

// Joins parts where few blocks share most segments: a warp for each row; block (i, s) has rows of sequence s. Behind
// the sequences, block (i, seqs + kJoinWarps n + w) has row kJoinWarps i + w of long segment n. Where the last blocks
// join short segments, there are only those behind.
template <int R>
__global__ void __launch_bounds__(32 * kJoinWarps, 2)
    join_few_kernel(const __grid_constant__ Latents x, const __grid_constant__ Plan plan, int rows) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  using Row = JoinedRow<R>;
  let_next_kernel_begin();
  const Attention& a = x.a;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int behind = static_cast<int>(blockIdx.y) - (plan.segments ? a.seqs : 0);
  if (behind >= 0) {
    wait_for_previous_kernel();
    const int row = blockIdx.x * kJoinWarps + behind % kJoinWarps;
    const LongSegment segment = plan.long_segments[behind / kJoinWarps];
    if (row >= rows || segment.sequence < 0) return;
    const int index = segment.block * rows + row;
    if (index >= a.num_queries(segment.sequence) * a.q_heads) return;
    const JoinedPlace<R> place(x, plan, rows, segment.sequence, index);
    join_row<R, 2>(x, RowParts<R>{plan, rows, row, place.number, segment.shared}, place, 1, 0);
    return;
  }
  const int index = blockIdx.x * kJoinWarps + warp, sequence = blockIdx.y;
  if (index >= a.num_queries(sequence) * a.q_heads) return;
  const JoinedPlace<R> place(x, plan, rows, sequence, index);
  const Results results(x);
  wait_for_previous_kernel();
  // Loads that do not depend on others come first, and overlap.
  typename Row::Loaded few{};
  few.head.x = -INFINITY;
  if (place.exact) few = Row::read(place.exact, lane);
  const RowParts<R> parts{plan, rows, place.row, place.number, plan.segments[place.number]};
  if (parts.shared.blocks > plan.most_parts) return;
  Row row;
  row.template add_all<2>(0, 1, parts.shared.blocks, lane, [&](int i) { return parts.codes(i); });
  row.rotate_back(results, lane);
  row.add(few);
  row.template add_all<2>(0, 1, parts.shared.exact_blocks(), lane, [&](int i) { return parts.exact(i); });
  row.write(results, place.to, lane);
#endif
}

// Joins parts where many do: a cluster of blocks for each row, before compute capability 9.0 one block; cluster
// (index, s) has row `index` of sequence s. rows: of a block of rows.
template <int R>
__global__ void __launch_bounds__(32 * kJoinWarps)
    join_kernel(const __grid_constant__ Latents x, const __grid_constant__ Plan plan, int rows) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  let_next_kernel_begin();
  int blocks = 1, rank = 0;
#if __CUDA_ARCH__ >= 900
  const cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
  blocks = static_cast<int>(cluster.num_blocks()), rank = static_cast<int>(cluster.block_rank());
#endif
  const int index = blockIdx.x / blocks, sequence = blockIdx.y;
  if (index >= x.a.num_queries(sequence) * x.a.q_heads) return;
  const JoinedPlace<R> place(x, plan, rows, sequence, index);
  wait_for_previous_kernel();
  join_row<R, 4>(x, RowParts<R>{plan, rows, place.row, place.number, plan.segments[place.number]}, place, blocks, rank);
#endif
}

}  // namespace turboquant::cuda::mla
