// The key-tile kernel: attention of 9 to 32 query rows over long packed caches, for devices with products of
// warpgroups (compute capability 9.0): drafts that are verified, wide groups of query heads.
//
// So many rows are too few to be the long side of products, as in row tiles, and too many for one warp's registers, as
// in split-KV. So keys are the long side, and rows are columns:
//   scores  [64 tokens x channels] . [channels x rows]
//   output  [64 channels x tokens] . [tokens x rows]
// Codes become the left operand in registers (expansion.cuh), so they are neither written to shared memory nor read
// from there again, and rows that do not exist cost little.
//
// Warpgroups have roles: one computes scores and weights, the other one sums weighted values of the unit before, and
// one of its warps copies the units ahead. Two such blocks share a multiprocessor.
//
// Which units a block has is as in split-KV, whose code does it. A partial result's sums are in the rotated space, and
// the order in which they are joined follows from the lengths: results are the same in every run, and the host never
// needs to know a length.
//
// The parts, each in a file of its own, in the order in which a unit passes them:
//   ring        copies of pages        values    sums of weighted values
//   queries     the rows as operands   exact     exact keys, behind the codes of a segment
//   scores      products and weights   join      partial results of several blocks
#pragma once

#include "cuda/attention/key_tiles/exact.cuh"
#include "cuda/attention/key_tiles/join.cuh"
#include "cuda/attention/key_tiles/queries.cuh"
#include "cuda/attention/key_tiles/scores.cuh"
#include "cuda/attention/key_tiles/values.cuh"
#include "cuda/attention/padding.cuh"
#include "cuda/attention/split_kv/results.cuh"
#include "cuda/attention/split_kv/work_list.cuh"

namespace turboquant::cuda::key_tiles {

template <class S, class KEYS>
class KeyTilesBlock {
  using Rows = split_kv::QueryRows<S::kDim, S::kRows>;
  using List = split_kv::WorkList<S::kRows, kKeyTilesCosts>;
  using Join = split_kv::Join<S::kDim, S::kRows / 4>;

 public:
  __device__ __forceinline__ KeyTilesBlock(const Attention& a, const StageLayout& layout, const Plan& plan,
                                           uint8_t* shared)
      : block_(a, layout, plan, shared), list_(block_), rows_(block_) {}

  __device__ __forceinline__ void run() {
    block_.plan.overlap.enter();
    begin();
    if (threadIdx.x >= kWarpgroup) {
      attend_segments<true>();
    } else {
      attend_segments<false>();
    }
  }

 private:
  // Both warpgroups have code of their own for everything but the join, so that neither's registers hold what only the
  // other needs.
  template <bool VALUES>
  __device__ __forceinline__ void attend_segments() {
    const split_kv::WarpNotes& notes = list_.notes();
    const Segment& segment = notes.attended;
#pragma unroll 1
    while (segment.begin < notes.end) {
      const int from = max(notes.begin, segment.begin), to = list_.stop();
      attend_codes<VALUES>(segment, from, max(min(to, segment.coded_end()) - from, 0));
      const int exact = max(from, segment.coded_end());
      if (exact < to) attend_exact(segment, exact, to);
      finish(segment, from, to);
      if (to == notes.end) return;
      list_.next_segment();
    }
  }

  // Barriers, the block's share of the list, and what its threads need in shared memory.
  __device__ __forceinline__ void begin() {
    if (threadIdx.x == 0) {
      constexpr int kGroupWarps = kWarpgroup / 32;
      for (int i = 0; i < kMaxStages; ++i) {
        init_barrier(block_.arrived(i), 1), init_barrier(block_.freed(i), kGroupWarps);
      }
      for (int i = 0; i < kWeightBuffers; ++i) {
        init_barrier(block_.weighed(i), kWarpgroup), init_barrier(block_.weights_read(i), kGroupWarps);
        block_.vote(i) = ~0u;
      }
      init_barrier(block_.voted(), kGroupWarps);
    }
    barriers_ready();
    block_.plan.overlap.begin();
    list_.find(false, false, [&](int thread, int threads) {
      const Attention& a = block_.call;
#pragma unroll 1
      for (int i = thread; i < 2 * S::kDim; i += threads) {
        block_.signs()[i] = (i < S::kDim ? a.key_signs : a.value_signs - S::kDim)[i];
      }
#pragma unroll 1
      for (int i = thread; i < split_kv::kMaxLevels; i += threads) copy_levels(i);
      if (block_.own.clears) {
        clear_padding<uint16_t>(a, S::kDim, int64_t{blockIdx.x} * threads + thread, int64_t{gridDim.x} * threads);
      }
    });
  }

  // Entry `i` of the tables of levels that there are.
  __device__ __forceinline__ void copy_levels(int i) const {
    const Attention& a = block_.call;
    if (a.key_levels && i < 1 << a.record.key_bits) {
      block_.template key_levels<S>()[i] = KEYS::table_entry(a.key_levels, i);
    }
    if (!a.value_levels || i >= 1 << a.record.value_bits) return;
    with_value_codes<S::kDim>(block_.own.values, [&](auto values) {
      block_.template value_levels<S>()[i] = values.table_entry(a.value_levels[i]);
    });
  }

  // `units` units of codes, from unit `from` of the list on, into the block's result.
  template <bool VALUES>
  __device__ __forceinline__ void attend_codes(const Segment& segment, int from, int units) {
    const int token = segment.first_token(from);
    const View block = fresh_view();
    Ring ring(block);
    if constexpr (VALUES) ring.begin(segment, token, units, turn_.stage);
    if (units > 0) prepare_queries<S>(fresh_view(), rows_, segment);
    list_.find_sharers(segment);
    publish_operands();
    __syncthreads();
    float* result = block_.result();
    if constexpr (VALUES) {
      with_value_codes<S::kDim>(block_.own.values, [&](auto values) {
        ValueGroup<S, decltype(values)> group(block, ring);
        group.attend(units, turn_);
        read_all();
        group.leave(result);
      });
    } else {
      ScoreGroup<S, KEYS> group(block);
      group.attend(token, units, turn_);
      read_all();
      group.leave(result);
    }
    __syncthreads();
  }

  // The result lies in the ring: all units have been read.
  __device__ __forceinline__ void read_all() const { sync_threads(kReadBarrier, kThreads); }
  static constexpr int kReadBarrier = 2;

  // For the compiler another thread's view, so that nothing which follows from a thread's number is computed ahead of
  // the loop over segments, where it would be spilled until then.
  __device__ __forceinline__ View fresh_view() const {
    return View(block_.call, block_.layout, block_.own, block_.shared);
  }

  // Units [from, to) of exact keys.
  __device__ __forceinline__ void attend_exact(const Segment& segment, int from, int to) const {
    const int per_unit = split_kv::kUnitStages * block_.layout.exact_keys, first = segment.coded_end();
    const int begin = (from - first) * per_unit, end = min((to - first) * per_unit, segment.work.exact());
    if (begin < end) ExactKeys<S>(fresh_view(), rows_, segment).attend(begin, end, block_.result());
  }

  // Joins the partial results of the attended segment; true: the joined one is in this block. It is not inlined: it
  // needs many registers for the loads that are under way, and its code exists once for both warpgroups.
  static __device__ __noinline__ bool join(const Attention& a, const StageLayout& layout, const Plan& plan,
                                           uint8_t* shared) {
    const View block(a, layout, plan, shared);
    return join_blocks<S>(Join(block), List(block), block.result(), block.join());
  }
  // The end of a segment, of which this block had numbers [from, to).
  __device__ __forceinline__ void finish(const Segment& segment, int from, int to) {
    const bool whole = from == segment.begin && to == segment.end();
    const bool last = whole || join(block_.call, block_.layout, block_.own, block_.shared);
    const float* joined = whole ? block_.result() : block_.join();
    if (last) split_kv::write_results(block_, rows_, segment, joined, 1);
    __syncthreads();
  }

  const View block_;
  const List list_;
  const Rows rows_;
  Turn turn_;
};

// KEYS: an index of kKeyCodes. Loops for more than one kind of keys in one kernel would leave the compiler too few
// registers for products that run ahead. Values of all kinds are in every kernel.
template <int D, int ROWS, int KEYS>
__global__ void __launch_bounds__(kThreads, Shape<D, ROWS>::kBlocks)
    key_tiles_kernel(const __grid_constant__ Attention a, const __grid_constant__ StageLayout layout,
                     const __grid_constant__ Plan plan) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)  // choose_attention sends no call to other devices
  extern __shared__ __align__(1024) uint8_t shared[];
  KeyTilesBlock<Shape<D, ROWS>, KeyBytesOf<D, KEYS>>(a, layout, plan, shared).run();
  plan.overlap.leave();
#endif
}

}  // namespace turboquant::cuda::key_tiles
