// The split-KV kernel: attention of few query rows (the new tokens of a decode step times the query heads of a KV head)
// over long packed caches, straight from the codes, in one launch.
//
// All products are products of bytes on tensor cores (common/mma.cuh). Queries are rotated and rounded to 16-bit
// integers, and so are softmax weights times value scales, under one factor per unit of keys. Each integer becomes a
// high and a low byte in two neighbouring columns, so that four rows fill the eight columns of a product, and a lane
// finds both halves of a sum in its own registers:
//   scores  [16 tokens x channels] . [channels x 4 rows (high, low)]
//   output  [16 channels x 32 tokens] . [32 tokens x 4 rows (high, low)]
// Codes are the left operand and are expanded to bytes in registers (attention/operands.cuh). Lane (g, t) = (lane / 4,
// lane % 4) holds tokens of row t in the scores and channels of row t in the output: maxima, weights and rescaling need
// no exchange between lanes. Only the weights change places, by transposing 8 x 8 tiles (movmatrix).
//
// The blocks of a fixed grid divide a flat list of units of keys among themselves (attention/schedule.cuh). The units
// of one (sequence, KV head, block of rows) are a segment. The warps of a block take units in turn, each with its own
// pipeline of asynchronous copies. At the end of a segment the results of the warps are joined; if the block has only a
// part of the segment, it leaves its partial result in the workspace, and the last of the blocks that share the segment
// joins them in their order. So results are the same in every run, the host never needs to know a length, and the size
// of the workspace depends on the grid only.
//
// The parts, each in a file of its own, in the order in which a unit passes them:
//   work_list    which units the block has          softmax      running maximum, weights as integers
//   rows         the query rows of a segment        values       sums of weighted values
//   queries      their rotation and operands        exact_tail   all of this for a unit of exact keys
//   pipeline     copies of pages and exact keys     join         of warps, then of blocks
//   keys         scores                             results      the last rotation, out and lse
//   unit         from keys to values
// A call with so little work that its time is that of its instructions is attended in another way: few_units.
//
// A launch brings the first 64 KB of code along, and waits for what lies behind them
// (docs/measurements/performance_split_kv.md). So loops that prepare something are not unrolled, and long code exists
// once.
#pragma once

#include "cuda/attention/padding.cuh"
#include "cuda/attention/split_kv/exact_tail.cuh"
#include "cuda/attention/split_kv/few_units_exact.cuh"
#include "cuda/attention/split_kv/few_units_join.cuh"
#include "cuda/attention/split_kv/pipeline.cuh"
#include "cuda/attention/split_kv/results.cuh"
#include "cuda/attention/split_kv/unit.cuh"
#include "cuda/common/wgmma.cuh"

namespace turboquant::cuda::split_kv {

// Whether each pair of codes has code of its own, from keys to values. The library is 1.3 MB smaller where it has not,
// and calls take longer (docs/measurements/performance_split_kv.md says by how much).
template <int D>
constexpr bool kCodeForEachPair = D == 64 || D == 128 || (kWarpgroupProducts && D > 64);

// A block of 4 N rows and head_dim D: composes the parts. FEW: has the code for calls with few units.
template <int D, int N, bool FEW>
class SplitKvBlock {
  using X = SplitKvTraits<D, N>;
  using Rows = QueryRows<D, X::kRows>;

 public:
  __device__ __forceinline__ SplitKvBlock(const Attention& a, const StageLayout& layout, const SplitKvPlan& plan,
                                          uint8_t* shared)
      : block_(a, layout, plan, shared, threadIdx.x), list_(block_), rows_(block_), pipeline_(block_, list_, rows_),
        queries_(block_), products_(block_), tail_(block_), join_(block_) {}

  __device__ __forceinline__ void run() {
    block_.plan.overlap.enter();
    prefetch_constants();
    if (!start()) return;
    const Segment& segment = list_.notes().attended;
    for (int unit = list_.notes().begin + block_.warp;;) {
      while (unit < segment.begin) unit += block_.plan.warps;  // numbers of the gap
      queries_.prepare(rows_, segment);
      list_.find_sharers(segment);
      softmax_.clear();
      unit = attend_units(segment, unit);
      finish_segment(segment, max(list_.notes().begin, segment.begin), list_.stop());
      if (list_.stop() == list_.notes().end) return;
      list_.next_segment();
      if (segment.begin >= list_.notes().end) return;
      rows_.issue_copies(segment);
    }
  }

 private:
  // ---- The start of a launch

  // Prefetches the signs. Into L2 and not L1, because the previous kernel may still be writing them.
  __device__ __forceinline__ void prefetch_constants() const {
    const int i = static_cast<int>(threadIdx.x) * 32;
    if (i >= D) return;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(block_.call.key_signs + i));
    asm volatile("prefetch.global.L2 [%0];" ::"l"(block_.call.value_signs + i));
  }

  // Everything up to the first copies of the pipeline; false: the block has no work left, because it had none, or
  // because FewUnits has taken the call.
  //
  // Under programmatic dependent launch the block may run before the previous kernel has ended. It then guesses its
  // share of the list from the lengths and page ids that are in memory now, and prefetches those pages into the L2
  // cache, because most likely nothing of this will change. After Overlap::begin everything is read again:
  // page ids are loaded anew before their pages are copied, and if the lengths have changed, the share is computed
  // anew. Queries are copied before keys, because a load waits for all copies that were issued before it.
  //
  // Beside a store only pages and tail are still being written. Blocks without work wait for it, too: whoever waits for
  // this kernel must have waited for both.
  __device__ __forceinline__ bool start() {
    FewUnitsOf<D, N, FEW> few(block_);
    pipeline_.begin();
    enum { kGuess, kFind, kFoundAnew };
    const bool beside_store = block_.plan.early == Early::kBesideStore;
    bool guesses = block_.plan.early == Early::kGuess;
    // Asked for the whole block: its warps may read different lengths, if these are being written.
    if (guesses && few.possible()) guesses = __syncthreads_or(!few.takes_call(true));
    int step = guesses ? kGuess : kFind;
    bool known = false, looked_up = false;  // a guess has found the share; it has also loaded page ids
    const WarpNotes& notes = list_.notes();
    const Segment& segment = notes.attended;
    // A loop with the steps inside, so that the code of Pipeline::fill and of WorkList::find exists once. i: the stage
    // to fill; the first call of `fill` finds nothing to copy yet and only looks up the first batch.
#pragma unroll 1
    for (int i = -kUnitStages; i < block_.plan.stages;) {
      bool changed = false, fill = true;
      if (i < 0) {
        if (step == kFind) {
          if (!beside_store) block_.plan.overlap.begin();
          if (may_find_nothing() && !any_work()) return false;
          if (few.possible()) {
            few.begin();
            if (few.takes_call(false)) {
              few.run();
              return false;
            }
          }
        }
        if (known && looked_up) pipeline_.read_pages();
        if (step == kFoundAnew) wait_for_committed_copies();
        if ((step == kFoundAnew || known) && segment.begin < notes.end) rows_.issue_copies(segment);
        if (step != kFoundAnew) changed = find_work(step == kGuess, known);
        const bool idle = step != kGuess && segment.begin >= notes.end;
        if (beside_store && (idle || step == kFoundAnew)) block_.plan.overlap.begin();
        if (idle) return false;
        const int unit = notes.begin + block_.warp;
        fill = step == kGuess ? segment.begin <= unit && unit < min(notes.end, segment.coded_end())
                              : step == kFind && (changed || !looked_up);
        if (step == kGuess) looked_up = fill;
      }
      if (fill) pipeline_.fill(i);
      if (i < 0) {
        if (step == kGuess) {
          if (looked_up) pipeline_.prefetch();
          known = true, step = kFind;
          __syncthreads();
          continue;
        }
        if (step == kFind && changed) {
          known = false, step = kFoundAnew;
          continue;
        }
      }
      i += kUnitStages;
    }
    return true;
  }

  // A second launch, for drafts (MixedQueries in choices/attention.h), often has none. All threads look for one,
  // because the first warp alone would take several times as long to find that it has no share.
  __device__ __forceinline__ bool may_find_nothing() const { return block_.call.least_queries > 1; }
  __device__ __forceinline__ bool any_work() const {
    const Attention& a = block_.call;
    bool any = false;
#pragma unroll 1
    for (int s = static_cast<int>(threadIdx.x); s < a.seqs && !any; s += static_cast<int>(blockDim.x)) {
      const int queries = a.num_queries(s);
      any = queries > 0 && a.takes(queries);
    }
    return __syncthreads_or(any);
  }

  // While the first warp finds the block's share, the others load the signs and levels and clear the padding of the
  // results.
  __device__ __forceinline__ bool find_work(bool guess, bool known) const {
    return list_.find(guess, known, [&](int thread, int threads) {
      const Attention& a = block_.call;
#pragma unroll 1
      for (int i = thread; i < 2 * D; i += threads) block_.signs()[i] = (i < D ? a.key_signs : a.value_signs - D)[i];
      products_.copy_level(thread);
      clear_padding<uint16_t>(a, D * element_size(a.dtype) / 2, int64_t{blockIdx.x} * threads + thread,
                              int64_t{gridDim.x} * threads);
    });
  }

  // ---- Units of keys

  // Attends to the warp's units of the segment from `unit` on; returns its next unit. One loop for codes and for exact
  // keys, so that the code of Pipeline::advance exists once in it.
  __device__ __forceinline__ int attend_units(const Segment& segment, int unit) {
    const bool empty = segment.work.coded == 0 && segment.work.exact() == 0;  // it still has one unit, without keys
    const int end = list_.stop(), coded_end = segment.coded_end(), step = block_.plan.warps;
    int token = segment.first_token(unit);
#pragma unroll 1
    for (; unit < end; unit += step, token += step * kUnitTokens) {
      if (unit < coded_end) {
        attend_codes(token);
      } else if (!empty) {
        attend_exact(segment, unit - coded_end);
      } else {
        continue;
      }
      pipeline_.advance();
    }
    return unit;
  }

  // Nothing else depends on the codes, so one kernel for all pairs has all other code once.
  __device__ __forceinline__ void attend_codes(int token) {
    const auto wait = [&](int stage) { pipeline_.wait(stage); };
    int stages[kUnitStages];
    if constexpr (kCodeForEachPair<D>) {
      with_pair<D>(block_.plan.codes.pair, [&](auto pair) {
        pipeline_.stages(stages);
        products_.template attend<typename decltype(pair)::type>(queries_, token, stages, wait, softmax_);
      });
    } else {
      pipeline_.stages(stages);
      products_.attend_any(queries_, token, stages, wait, softmax_);
    }
  }

  // unit: counts the segment's units of exact keys
  __device__ __forceinline__ void attend_exact(const Segment& segment, int unit) {
    int stages[kUnitStages];
    pipeline_.stages(stages);
#pragma unroll
    for (int i = 0; i < kUnitStages; ++i) pipeline_.wait(stages[i]);
    tail_.attend(rows_, segment, ExactUnit(block_, segment, unit, stages), softmax_);
  }

  // ---- The end of a segment, of which this block had numbers [from, to)

  __device__ __forceinline__ void finish_segment(const Segment& segment, int from, int to) {
    const bool whole = from == segment.begin && to == segment.end();
    join_.warps(queries_, softmax_,
                whole ? block_.result() : join_.part(static_cast<int>(blockIdx.x), from == segment.begin));
    __syncthreads();
    const float* parts = block_.result();
    int groups = 1;
    if (!whole) parts = block_.join(), groups = join_.arrives_last(list_) ? join_.blocks(list_) : 0;
    if (groups > 0) write_results(block_, rows_, segment, parts, groups);
    __syncthreads();
  }

  const BlockView block_;
  const WorkList<X::kRows> list_;
  const Rows rows_;
  Pipeline<Rows> pipeline_;
  Queries<D, N> queries_;
  RunningSoftmax<D, N> softmax_;
  const UnitProducts<D, N> products_;
  const ExactTail<D, N> tail_;
  const Join<D, N> join_;
};

template <int D, int N, bool FEW>
__global__ void __launch_bounds__(bounding_threads(N, D), resident_blocks(N, D))
    attend_kernel(const __grid_constant__ Attention a, const __grid_constant__ StageLayout layout,
                  const __grid_constant__ SplitKvPlan plan) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800  // choose_attention sends no call to older devices
  if constexpr (!FEW || kHasFewUnits || !has_few_units_apart(D, N)) {  // else nobody launches it
    extern __shared__ __align__(128) uint8_t shared[];
    SplitKvBlock<D, N, FEW>(a, layout, plan, shared).run();
    plan.overlap.leave();
  }
#endif
}

}  // namespace turboquant::cuda::split_kv
