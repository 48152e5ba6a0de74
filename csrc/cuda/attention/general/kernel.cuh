// The general attention kernel: its parts, and the loops that set them to work.
#pragma once

#include "cuda/attention/general/code_expansion.cuh"
#include "cuda/attention/general/exact_tail.cuh"
#include "cuda/attention/general/output.cuh"
#include "cuda/attention/general/queries.cuh"
#include "cuda/attention/padding.cuh"

namespace turboquant::cuda::general {

// Up to two passes over keys: over the exact ones, then over those in codes. Both passes run the same loops, with
// `exact` a variable, so that the instructions are there once.
template <typename S>
class GeneralBlock {
 public:
  __device__ __forceinline__ explicit GeneralBlock(const BlockContext<S>& block)
      : block_(block), mask_(block), pages_(block), codes_(block), tail_(block), queries_(block), softmax_(block),
        sums_(block), output_(block) {}

  __device__ __forceinline__ void run() {
    mask_.prepare();
    fill_tables();
    __syncthreads();
    pages_.select(mask_.first(), mask_.last());
    tail_.select(mask_.first(), mask_.last());
#pragma unroll 1
    for (int exact = tail_.steps() > 0; exact >= 0; --exact) {
      const int steps = exact ? tail_.steps() : pages_.steps();
      if (steps > 0) {
        queries_.prepare(exact);
        if (S::kHopper) publish_operands();
        __syncthreads();
        attend(exact, steps);
        __syncthreads();
      }
      output_.finish(exact, softmax_, sums_);
    }
  }

 private:
  __device__ __forceinline__ void fill_tables() const {
    const Attention& a = block_.a;
    const Arguments& x = block_.x;
    const int thread = block_.thread.index;
    BlockConstants<S>& constants = block_.shared.constants();
    constants.levels.fill(a.record, a.key_levels, a.value_levels, thread);
    if (thread < format::kMaxBlocks) {
      constants.hartley[thread] = thread < x.split.blocks ? format::hartley(x.split.blocks, thread) : 0;
    }
  }

  // All steps of a pass. With two buffers an iteration expands the keys of the next step while it multiplies those of
  // this one.
  __device__ __forceinline__ void attend(bool exact, int steps) {
    constexpr int kFirst = S::kBuffers == 2 ? -1 : 0;  // the iteration before the first step only expands
    const int thread = block_.thread.index;
    if (!exact) {
      for (int i = thread; i < (kFirst + 3) * pages_.tiles(); i += S::kThreads) {
        const int step = i / pages_.tiles(), tile = i % pages_.tiles();
        pages_.set_tile(step, tile, pages_.find_tile(step, tile));
      }
      __syncthreads();
      if (S::kStaged) pages_.copy(0);
    }
    // One half of the warps expands first and the other multiplies first, so that each scheduler has warps of both
    // kinds.
    const bool expands_first = block_.thread.warp / 4 % 2 == 0;
#pragma unroll 1
    for (int step = kFirst; step < steps; ++step) {
      if (S::kStaged) wait_for_copies();
      __syncthreads();
      if (S::kStaged && !exact) pages_.copy(step + 2);
      uint8_t* tile = nullptr;  // its address is stored at the end of the iteration, when it has arrived
      if (!exact && thread < pages_.tiles()) tile = pages_.find_tile(step + 3, thread);
      if constexpr (S::kBuffers == 1) {
        expand(exact, step);
        __syncthreads();
        multiply(exact, step);
      } else {
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
          if ((half == 0) == expands_first) {
            if (step + 1 < steps) expand(exact, step + 1);
          } else if (step >= 0) {
            multiply(exact, step);
          }
        }
      }
      if (!exact && thread < pages_.tiles()) pages_.set_tile(step + 3, thread, tile);
    }
  }

  __device__ __forceinline__ void expand(bool exact, int step) const {
    if (exact) {
      tail_.expand(step);
    } else {
      codes_.expand(pages_, step);
    }
    if (S::kHopper) publish_operands();
  }

  // A step's keys and values, for the rows of this warp's team.
  __device__ __forceinline__ void multiply(bool exact, int step) {
    if (block_.thread.team_row() >= block_.work.rows) return;
    bool hidden = true;
    if (!exact) {
      const typename Mask<S>::Sight sight = mask_.team_sight(pages_.position(step));
      if (!sight.any) return;
      hidden = !sight.all;
    }
    const KeySummary keys = summarise<S>(block_.shared.scalars(step), block_.thread.lane);
    hidden = hidden || !keys.all_exist;
    const int exponent = softmax_.next_exponent(keys.largest);

    Scores<S> x(block_);
    x.multiply(step);
#pragma unroll
    for (int i = 0; i < S::kStrips; ++i) {
      // While a warpgroup weighs a strip, its tensor cores multiply the next strip's keys or the last one's values.
      x.wait_for(i);
      softmax_.weigh(i, step, exact, hidden, keys.finite, exponent, x.strip(i), sums_);
      if constexpr (S::kHopper) sums_.issue_products(i, step, x.strip(i));
    }
    softmax_.set_exponent(exponent);
    if constexpr (S::kHopper) {
      sums_.wait();
    } else {
      sums_.multiply(step, x);
    }
  }

  const BlockContext<S>& block_;
  Mask<S> mask_;
  PageStages<S> pages_;
  CodeExpansion<S> codes_;
  ExactTail<S> tail_;
  Queries<S> queries_;
  Softmax<S> softmax_;
  ValueSums<S> sums_;
  Output<S> output_;
};

// Blocks that share keys are neighbours; of those, the ones with the most keys come first.
template <typename S>
__device__ __forceinline__ void run_block(const Arguments& x, uint8_t* shared) {
  if (blockIdx.x >= x.work_blocks) {
    return clear_padding<uint16_t>(x.a, x.a.record.head_dim * element_size(x.a.dtype) / 2,
                                   int64_t{blockIdx.x - x.work_blocks} * blockDim.x + threadIdx.x,
                                   int64_t{x.clear_blocks} * blockDim.x);
  }
  const unsigned row_block = x.row_blocks - 1 - blockIdx.x % x.row_blocks, rest = blockIdx.x / x.row_blocks;
  const int kv_head = static_cast<int>(rest % x.a.kv_heads), sequence = static_cast<int>(rest / x.a.kv_heads);
  const int64_t first_row = int64_t{row_block} * S::kRows;
  const int64_t rows = int64_t{x.a.num_queries(sequence)} * x.a.group - first_row;
  if (rows <= 0) return;
  const WorkItem work{sequence, kv_head, static_cast<int>(first_row), static_cast<int>(min(rows, int64_t{S::kRows})),
                      x.a.first_query(sequence)};
  const BlockContext<S> block{x, x.a, work, SharedMemory<S>(shared), Thread<S>()};
  GeneralBlock<S>(block).run();
}

// Whether a kernel has code for the architecture that is being compiled: devices with products of warpgroups use
// nothing else for the shapes that come with and without.
template <typename S>
constexpr bool kCompiled = S::kHopper ? kWarpgroupProducts : !(S::kStaged && kWarpgroupProducts);

template <typename S>
__global__ void __launch_bounds__(S::kThreads, 1) general_kernel(const __grid_constant__ Arguments x) {
  extern __shared__ uint4 shared[];
  if constexpr (kCompiled<S>) run_block<S>(x, reinterpret_cast<uint8_t*>(shared));
}

}  // namespace turboquant::cuda::general
