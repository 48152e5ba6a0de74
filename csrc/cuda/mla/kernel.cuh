// Latent attention: every query head of a token attends to one vector per key, which is both key and value, straight
// from its codes.
//
// The blocks of a fixed grid share a flat list of units of 64 keys as those of split-KV do (attention/schedule.cuh).
// Each leaves a partial result for every segment that it had a part of.
//
// Three kernels overlap: one prepares queries and attends to few exact keys, this one attends to the rest, and one
// joins partial results in order; where there are more segments than blocks, the last of the blocks that share a
// segment does that instead, unless they are many.
//
// How a block attends to the codes of a segment is its roles': those of its warpgroups, or of its warps, which divide
// the work.
//   key_tiles/roles  uniform grids of 4, 5 and 8 bits: keys are the long side of products, codes become operands in
//                    registers
//   row_tiles/roles  tables of levels, and 3 bits: rows are the long side, codes are expanded in shared memory
//   warp_tiles/roles all codes, by products of single warps, for what the others are not made for (choices/mla.h)
// The other parts, each in a file of its own, in the order in which a segment passes them:
//   queries    images of rows
//   few_exact  few exact keys of few queries, beside the images
//   exact      other exact keys, with sums of their own
//   join       of partial results, and the last transform; a row of them is a joined_row
#pragma once

#include "cuda/attention/counters.cuh"
#include "cuda/attention/padding.cuh"
#include "cuda/mla/exact.cuh"
#include "cuda/mla/join.cuh"
#include "cuda/mla/key_tiles/roles.cuh"
#include "cuda/mla/queries.cuh"
#include "cuda/mla/row_tiles/roles.cuh"
#include "cuda/mla/warp_tiles/roles.cuh"

namespace turboquant::cuda::mla {

// S: Shape, RowShape or WarpShape. Roles: KeyRoles, RowRoles or WarpRoles.
template <class S, class Roles>
class LatentBlock {
 public:
  __device__ __forceinline__ LatentBlock(const Latents& x, const Plan& plan, uint8_t* shared)
      : block_(x, plan, shared), notes_(block_.notes()), roles_(block_) {}

  __device__ __forceinline__ void run() {
    let_next_kernel_begin();
    begin();
    const ListCut& cut = notes_.share.cut;
    const Segment& segment = notes_.share.segment;
    const int end = notes_.share.end;
    for (int unit = notes_.share.begin; unit < end && segment.begin < end;) {
      const int from = max(unit, segment.begin), to = min(end, segment.end());
      const bool opens = from == segment.begin;
      const bool lists_exact = segment.work.exact() > 0 && !segment.work.exact_apart(S::kCosts.apart);
      const bool whole = S::kKeepsWhole && !block_.plan.segments && opens && to == segment.end() && !lists_exact;
      const int units = max(min(to, segment.coded_end()) - from, 0);
      const bool has_codes = units > 0 || whole;
      float* part = part_of(segment, opens ? kOpened : kContinued);
      if (has_codes) {
        attend_codes(segment, from, units, whole, part);
      } else if (threadIdx.x < S::kRows) {
        *reinterpret_cast<float4*>(part + threadIdx.x * S::kPart) = {-INFINITY, 0, 0, 0};
      }
      const int first = cut.block_of(segment.begin);
      SharedBy shared{first, cut.block_of(segment.end() - 1) - first + 1, -1};
      if (lists_exact) {
        shared.exact = cut.block_of(segment.coded_end());
        const int exact = max(from, segment.coded_end());
        if (exact < to) attend_exact(segment, exact - segment.coded_end(), to - segment.coded_end(), opens);
      }
      // Who waits for this kernel counts on it not to end before queries are prepared.
      if (!has_codes && threadIdx.x == 0) wait_for_previous_kernel();
      finish(segment, opens, whole, shared);
      unit = to;
      if (unit < end) seek(unit, cut.gap);
    }
  }

 private:
  // Barriers, and the block's share of the list.
  __device__ __forceinline__ void begin() {
    const Attention& a = block_.call.a;
    roles_.begin();
    barriers_ready();
    // The previous kernel has prepared queries. It began when all earlier ones had ended, and let this one begin then.
    if (block_.warp == 0) {
      BlockShare share;
      const int finder = cut_work<S::kRows, S::kCosts>(a, Divisor(kExactPerUnit), block_.plan.grid,
                                                       reinterpret_cast<uint2*>(block_.shared), block_.plan.queries,
                                                       false, nullptr, share);
      if (block_.lane == finder) notes_.share = share;
    } else {
      constexpr int kOthers = S::kThreads - 32;
      clear_padding<uint16_t>(a, S::kLatent * element_size(a.dtype) / 2,
                              int64_t{blockIdx.x} * kOthers + threadIdx.x - 32, int64_t{gridDim.x} * kOthers);
    }
    __syncthreads();
  }

  // `units` units of codes, from unit `from` of the list on. whole: see leave_part
  __device__ __forceinline__ void attend_codes(const Segment& segment, int from, int units, bool whole, float* part) {
    const int token = segment.first_token(from);
    if constexpr (Roles::kCopiesImage) {
      if (threadIdx.x == 0) copy_image(segment);
      roles_.attend(segment, token, units, whole, part, [&] { wait_barrier(roles_.prepared(), segments_ & 1); });
      ++segments_;
    } else {
      roles_.attend(segment, token, units, image_of(segment), part);
    }
  }

  __device__ __forceinline__ void copy_image(const Segment& segment) const {
    wait_for_previous_kernel();
    publish_operands();  // what threads wrote here comes before what the copy writes
    expect(roles_.prepared(), block_.plan.image_bytes);
    copy_bulk(block_.queries(), image_of(segment), block_.plan.image_bytes, roles_.prepared());
  }
  __device__ __forceinline__ uint8_t* image_of(const Segment& segment) const {
    return block_.plan.images + int64_t{number_of(segment)} * block_.plan.image_bytes;
  }

  // The segment's number among all that there may be.
  __device__ __forceinline__ int number_of(const Segment& segment) const {
    return first_segment(block_.plan, block_.call.a, S::kRows, segment.sequence) + segment.block;
  }
  // Where the block's part of it goes: the block has a place, or, where another kernel joins all parts, the segment has
  // one for the parts that it begins with.
  __device__ __forceinline__ float* part_of(const Segment& segment, Part kind) const {
    const bool opens = kind == kOpened || kind == kExactOpened;
    const int number = block_.plan.segments && opens ? number_of(segment) : blockIdx.x;
    return block_.plan.parts + (int64_t{kParts} * number + kind) * S::kRows * S::kPart;
  }

  // The block's part of the segment is there. opens: it is the segment's first. whole: see leave_part
  __device__ __forceinline__ void finish(const Segment& segment, bool opens, bool whole, const SharedBy& shared) {
    const Plan& plan = block_.plan;
    const bool is_long = shared.blocks > plan.most_parts;
    if (opens && threadIdx.x == 0) {
      if (plan.segments) plan.segments[number_of(segment)] = shared;
      if (is_long) {
        wait_for_previous_kernel();  // it has written that there are none
        plan.long_segments[shared.first / plan.most_parts] = {segment.sequence, segment.block, shared};
      }
    }
    if (plan.segments || is_long) return;
    __syncthreads();
    // A block that has a whole segment does not count: the counter may be in use for the segment that it opens last.
    if (threadIdx.x == 0) {
      notes_.flag = shared.blocks == 1 || count_arrival(plan.arrivals + shared.first, shared.blocks);
    }
    __syncthreads();
    if (!notes_.flag) return;
    const float* own = whole ? block_.whole_part() : nullptr;
    if constexpr (Roles::kJoinsApart) {
      write_results_apart<S>(block_.call, plan, segment, shared, own);
    } else {
      write_results<S, 2>(block_, segment, shared, own);
    }
  }

  // Moves on to the segment that holds number `unit`.
  __device__ __forceinline__ void seek(int unit, int gap) {
    __syncthreads();
    if (block_.warp == 0) {
      Segment next = notes_.share.segment;
      next.template seek<S::kRows, S::kCosts>(block_.call.a, Divisor(kExactPerUnit), gap, unit);
      __syncwarp();
      if (block_.lane == 0) notes_.share.segment = next;
    }
    __syncthreads();
  }

  // Units [first, end) of exact keys. opens: the segment began in this block.
  __device__ __forceinline__ void attend_exact(const Segment& segment, int first, int end, bool opens) const {
    __syncthreads();
    ExactKeys<S>(block_, segment)
        .attend(first * kExactPerUnit, min(end * kExactPerUnit, segment.work.exact()),
                part_of(segment, opens ? kExactOpened : kExact));
  }

  const BlockView block_;
  Notes& notes_;
  Roles roles_;
  int segments_ = 0;  // that the block has attended to
};

template <class S, class Roles>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks)
    latent_kernel(const __grid_constant__ Latents x, const __grid_constant__ Plan plan) {
  if constexpr (Roles::kCompiled) {  // choose_latents sends no call to other devices
    extern __shared__ __align__(1024) uint8_t shared[];
    LatentBlock<S, Roles>(x, plan, shared).run();
  }
}

}  // namespace turboquant::cuda::mla
