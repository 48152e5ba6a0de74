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
#include "cuda/common/async_copy.cuh"
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

// Adds rows at(0) to at(count - 1), of which there are up to MOST, into `sum`, by all threads of a block of
// join_kernel, each for its channels. All are read at once.
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

// Starts to copy a row of a partial result to shared memory, by one warp; null: a row without keys.
template <int R>
__device__ __forceinline__ void copy_part(float* to, const float* part, int lane) {
  if (!part) {
    if (lane == 0) *reinterpret_cast<float4*>(to) = {-INFINITY, 0, 0, 0};
    return;
  }
#pragma unroll
  for (int i = 0; i < (kPartHead + R + 127) / 128; ++i) {
    const int at = 128 * i + 4 * lane;
    if (at < kPartHead + R) copy_async(to + at, part + at);
  }
}

// Row `index` of sequence `sequence`, as the kernels that join find it. What does not depend on the kernels before is
// read before they have ended.
template <int R>
struct JoinedPlace {
  int number, row;     // of the segment; of its block of rows
  int64_t to;          // the row of out
  const float* exact;  // its part of few exact keys, or null

  __device__ __forceinline__ JoinedPlace(const Latents& x, const Plan& plan, int rows, int sequence, int index)
      : number(first_segment(plan, x.a, rows, sequence) + (index >> log2_of(rows))), row(index & (rows - 1)),
        to(int64_t{x.a.first_query(sequence)} * x.a.q_heads + index),
        exact(index < plan.few_rows ? few_exact_row<R>(plan, sequence, index) : nullptr) {}
};

// What the warps of a block that joins exchange: their sums, or the parts of few exact keys of their rows.
template <int R>
struct JoinMemory {
  float of_warp[kJoinWarps][kPartHead + R], exact[kPartHead + R], sum[kPartHead + R];
};

// Joins the codes' parts of a row in `row` of the first warp of the first of `blocks` blocks, of which this is number
// `rank`, and the exact ones in memory.exact. Returns whether this is that warp. AT_ONCE: parts whose loads overlap.
template <int R, int AT_ONCE>
__device__ __forceinline__ bool join_parts(const RowParts<R>& parts, const JoinedPlace<R>& place, int blocks, int rank,
                                           JoinMemory<R>& memory, JoinedRow<R>& row) {
  using Row = JoinedRow<R>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (parts.shared.blocks <= kJoinWarps * AT_ONCE) {  // one block can read as many at once
    if (rank > 0) return false;
    blocks = 1;
  }
  const auto at = [&](bool exact, int i) { return exact ? parts.exact(i) : parts.codes(i); };
  // The last warp has the exact parts, too: the same code once more.
  const int turns = rank == 0 && warp == kJoinWarps - 1 ? 2 : 1;
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn) {
    const bool exact = turn > 0;
    Row own;
    if (exact && place.exact) own.add(Row::read(place.exact, lane));
    own.template add_all<AT_ONCE>(exact ? 0 : rank * kJoinWarps + warp, exact ? 1 : blocks * kJoinWarps,
                                  exact ? parts.shared.exact_blocks() : parts.shared.blocks, lane,
                                  [&](int i) { return at(exact, i); });
    own.leave(exact ? memory.exact : memory.of_warp[warp], lane);
  }
  __syncthreads();
  add_rows<R, kJoinWarps>(kJoinWarps, memory.sum, [&](int i) { return memory.of_warp[i]; });
  __syncthreads();
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (blocks > 1) {
    const cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
    cluster.sync();
    if (rank == 0) {
      add_rows<R, kMostJoinBlocks>(blocks, memory.of_warp[0],
                                   [&](int i) { return cluster.map_shared_rank(memory.sum, i); });
    }
    cluster.sync();  // nobody leaves before its sum has been read
    if (rank > 0) return false;
  }
#endif
  if (warp > 0) return false;
  row.add(Row::read_shared(blocks > 1 ? memory.of_warp[0] : memory.sum, lane));
  return true;
}

// Joins parts where few blocks share most segments: a warp for each row; block (i, s) has rows of sequence s. Behind
// the sequences, block (i, seqs + kJoinWarps n + w) has row kJoinWarps i + w of long segment n. Where the last blocks
// join short segments, there are only those behind.
template <int R>
__global__ void __launch_bounds__(32 * kJoinWarps, 3)
    join_few_kernel(const __grid_constant__ Latents x, const __grid_constant__ Plan plan, int rows) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  __shared__ __align__(16) JoinMemory<R> memory;
  let_next_kernel_begin();
  const Attention& a = x.a;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int behind = static_cast<int>(blockIdx.y) - (plan.segments ? a.seqs : 0);
  int sequence = blockIdx.y, index = blockIdx.x * kJoinWarps + warp;
  LongSegment segment{};
  if (behind >= 0) {
    wait_for_previous_kernel();
    segment = plan.long_segments[behind / kJoinWarps];
    const int row = blockIdx.x * kJoinWarps + behind % kJoinWarps;
    if (row >= rows || segment.sequence < 0) return;
    sequence = segment.sequence, index = segment.block * rows + row;
  }
  if (index >= a.num_queries(sequence) * a.q_heads) return;
  const JoinedPlace<R> place(x, plan, rows, sequence, index);
  const Results results(x);
  JoinedRow<R> row;
  const float* exact = memory.exact;
  int listed = 0;  // blocks whose exact parts are yet to be added
  RowParts<R> parts{plan, rows, place.row, place.number, segment.shared};
  if (behind >= 0) {
    if (!join_parts<R, 2>(parts, place, 1, 0, memory, row)) return;
  } else {
    wait_for_previous_kernel();
    exact = memory.of_warp[warp];
    copy_part<R>(memory.of_warp[warp], place.exact, lane);  // while the others are read
    parts.shared = plan.segments[place.number];
    if (parts.shared.blocks > plan.most_parts) {
      wait_for_copies();
      return;
    }
    row.template add_all<2>(0, 1, parts.shared.blocks, lane, [&](int i) { return parts.codes(i); });
    listed = parts.shared.exact_blocks();
    wait_for_copies();
    __syncwarp();
  }
  row.rotate_back(results, lane);
  row.add(JoinedRow<R>::read_shared(exact, lane));
  row.template add_all<1>(0, 1, listed, lane, [&](int i) { return parts.exact(i); });
  row.write(results, place.to, lane);
#endif
}

// Joins parts where many do: a cluster of blocks for each row, before compute capability 9.0 one block; cluster
// (index, s) has row `index` of sequence s. rows: of a block of rows.
template <int R>
__global__ void __launch_bounds__(32 * kJoinWarps)
    join_kernel(const __grid_constant__ Latents x, const __grid_constant__ Plan plan, int rows) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  __shared__ __align__(16) JoinMemory<R> memory;
  let_next_kernel_begin();
  int blocks = 1, rank = 0;
#if __CUDA_ARCH__ >= 900
  const cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
  blocks = static_cast<int>(cluster.num_blocks()), rank = static_cast<int>(cluster.block_rank());
#endif
  const int index = blockIdx.x / blocks, sequence = blockIdx.y, lane = threadIdx.x % 32;
  if (index >= x.a.num_queries(sequence) * x.a.q_heads) return;
  const JoinedPlace<R> place(x, plan, rows, sequence, index);
  const Results results(x);
  wait_for_previous_kernel();
  const RowParts<R> parts{plan, rows, place.row, place.number, plan.segments[place.number]};
  JoinedRow<R> row;
  if (!join_parts<R, 4>(parts, place, blocks, rank, memory, row)) return;
  row.rotate_back(results, lane);
  row.add(JoinedRow<R>::read_shared(memory.exact, lane));
  row.write(results, place.to, lane);
#endif
}

}  // namespace turboquant::cuda::mla
