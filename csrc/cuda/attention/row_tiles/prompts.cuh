// The kernel of prompts: sequences without older tokens, whose queries read the call's own tokens as they are. Another
// instance also takes those whose older tokens have been gathered (gather.cuh).
//
// It is the row-tile kernel (kernel.cuh) without codes: the same items of work and the same warps that multiply. With
// nothing to expand, one warpgroup prepares everything, a warp for each kind of thing: items of work, queries, keys,
// values. The tensor memory accelerator copies keys and values, a tile with a few instructions, and swizzles them. A
// tile reaches into the next sequence, or has zeros, where its own one ends; rows do not see such keys. The registers
// that expanding would take hold the scores of 128 keys instead of 64, where a block has 128 rows of up to 128
// channels.
//
// Items are short: of 2,048 tokens a tile of rows sees 16 tiles of 64 keys on average. So the next item is found,
// its queries are copied and its first keys and values are on their way while the one before is attended to.
#pragma once

#include "cuda/attention/row_tiles/consumer.cuh"
#include "cuda/attention/row_tiles/exact_rows.cuh"

namespace turboquant::cuda::row_tiles {

// Items of prompts, in the order of WorkList (work.cuh): each is a whole tile of rows.
template <class S>
class PromptList {
 public:
  __device__ __forceinline__ PromptList(const Attention& a, const Plan& plan, GatheredRows gathered)
      : a_(a), plan_(plan), gathered_(gathered), mine_(a, plan, gathered, true) {
#pragma unroll 1
    for (int i = 0, s = mine_.first; i < mine_.count; ++i) {
      if (i > 0) s = mine_.next(s);
      own_items_ += items(s);
    }
    items_before_ = sum_of_lanes_before(own_items_), total_ = sum_of_lanes(own_items_);
  }

  // As of WorkList
  __device__ __forceinline__ bool take(Item& to) const {
    int i = next_item(plan_.counters, total_);
    if (i >= total_) {
      if (threadIdx.x % 32 == 0) to.sequence = -1;
      return threadIdx.x % 32 == 0;
    }
    i -= items_before_;
    if (i < 0 || i >= own_items_) return false;
    Item x{.sequence = mine_.first, .parts = 1};
#pragma unroll 1
    for (int n; i >= (n = items(x.sequence)); x.sequence = mine_.next(x.sequence)) i -= n;
    x.queries = a_.num_queries(x.sequence), x.length = a_.length(x.sequence, x.queries);
    x.first_query = a_.first_query(x.sequence);
    const int begin = x.length - x.queries;  // position of query 0
    const int rows = x.queries * plan_.group, blocks = ceil_div(rows, S::kRows);
    const int heads = heads_at_once<S>(ceil_div(max(x.length, x.queries), S::kKeys), a_.kv_heads);
    const int first_head = quotient(i, heads * blocks) * heads, others = min(heads, a_.kv_heads - first_head);
    const int in_heads = i - first_head * blocks, block = quotient(in_heads, others);
    x.head = first_head + in_heads - block * others, x.block = blocks - 1 - block;
    const int first_row = x.block * S::kRows;
    x.rows = min(rows - first_row, S::kRows);
    const int low = begin + quotient(first_row, plan_.group);
    const int high = begin + quotient(first_row + x.rows - 1, plan_.group);
    x.new_begin = a_.new_keys ? begin : x.length;
    int older = 0;
    if constexpr (S::kGathered) {
      x.older.tail.slot = -1;
      const int older_row = gathered_.first(x.sequence);
      if (older_row >= 0) describe_older(low, high, older_row, x);
      older = x.older.tiles + x.older.copies_tiles;
    }
    x.recent = max(a_.first_visible(low), max(x.new_begin, 0));
    x.exact = a_.new_keys ? max(high + 1 - x.recent, 0) : 0;
    x.end = older + ceil_div(x.exact, S::kKeys);
    x.common_begin = older + ceil_div(max(a_.first_visible(high) - x.recent, 0), S::kKeys);
    x.common_end = older + min(low + 1 - x.recent, x.exact) / S::kKeys;
    to = x;
    return true;
  }

 private:
  // Tiles of older tokens that have been gathered, from row `row` on. low, high: positions of the first query and of
  // the last one
  __device__ __forceinline__ void describe_older(int low, int high, int row, Item& x) const {
    const Sight sight(a_, x.sequence, x.length, x.queries);
    const OlderTokens of(sight, x.length, x.queries);
    auto& to = x.older;
    to.row = row, to.copies_row = row + of.coded_rows();
    const int skipped = max(sight.first(low) - of.begin, 0) & -S::kKeys;
    to.row += skipped, to.first = of.begin + skipped;
    to.tiles = ceil_div(max(min(sight.recent(high), of.coded_end) - to.first, 0), S::kKeys);
    to.common_begin = ceil_div(max(sight.first(high) - to.first, 0), S::kKeys);
    to.common_end = max(sight.recent(low) - to.first, 0) / S::kKeys;
    to.tail = of.tail, to.sinks = of.sinks, to.tail_begin = of.tail_begin;
    to.copies = max(sight.recent(low), a_.first_visible(low)) < of.tail_end ? of.copies() : of.sinks;
    to.copies_tiles = ceil_div(to.copies, S::kKeys);
  }
  __device__ __forceinline__ int items(int s) const {
    return ceil_div(a_.num_queries(s) * plan_.group, S::kRows) * a_.kv_heads;
  }

  const Attention& a_;
  const Plan& plan_;
  const GatheredRows gathered_;
  const LaneSequences<S> mine_;
  int own_items_ = 0, items_before_, total_;
};

template <class S>
__device__ __forceinline__ void hand_out_items(const Attention& a, const Plan& plan, GatheredRows gathered,
                                               Notes& notes) {
  const PromptList<S> list(a, plan, gathered);
  for (uint32_t n = 0;; ++n) {
    const int slot = n % kItems, phase = n / kItems % 2;
    wait_barrier(&notes.item_empty[slot], phase ^ 1);
    if (list.take(notes.items[slot])) arrive(&notes.item_full[slot]);
    wait_barrier(&notes.item_full[slot], phase);
    if (notes.items[slot].sequence < 0) return;
  }
}

// What a warp that prepares something does with each item.
template <typename F>
__device__ __forceinline__ void for_each_item(Notes& notes, F&& f) {
  for (uint32_t n = 0;; ++n) {
    const int slot = n % kItems;
    wait_barrier(&notes.item_full[slot], n / kItems % 2);
    const Item& item = notes.items[slot];
    if (item.sequence < 0) return;
    if (item.end > 0) f(item);
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(&notes.item_empty[slot]);
  }
}

// Queries of each item, those of one warpgroup after the other: [channels / 64][64 rows][64 channels]. Eight lanes
// share a row. One warp does all, so it gets from four rows to the next four by additions.
template <class S>
__device__ __forceinline__ void copy_queries(const Attention& a, const Plan& plan, Notes& notes, uint8_t* to) {
  constexpr int kStep = 4;  // rows
  const int lane = threadIdx.x % 32, word = 16 * (lane % 8);
  const int queries = quotient(kStep, plan.group), heads = kStep - queries * plan.group;
  const int64_t step = 2 * (queries * a.q_token_stride + heads * a.q_head_stride);  // bytes
  const int64_t to_next_query = 2 * (a.q_token_stride - plan.group * a.q_head_stride);
  const int words = ceil_div(a.record.head_dim - word / 2, 64);  // of this lane in a row; the others are padding
  RingPlace place;
  for_each_item(notes, [&](const Item& item) {
    wait_barrier(&notes.query_empty, place.phase ^ 1);
    const int first = item.block * S::kRows + lane / 8, rows = item.rows;
    const int query = quotient(first, plan.group);
    int head = first - query * plan.group;
    const uint8_t* from = static_cast<const uint8_t*>(a.q) + word +
                          2 * ((item.first_query + query) * a.q_token_stride +
                               (int64_t{item.head} * plan.group + head) * a.q_head_stride);
#pragma unroll 1
    for (int eight = 0; eight < S::kRows; eight += 8) {
#pragma unroll
      for (int row = 0; row < 8; row += kStep) {
        const bool exists = lane / 8 + eight + row < rows;
#pragma unroll
        for (int k = 0; k < S::kDim / 64; ++k) {
          uint8_t* const there = to + (eight / 64 * (S::kDim / 64) + k) * 64 * kSwizzleRow + eight % 64 * kSwizzleRow;
          const bool some = exists && k < words;
          copy_or_clear(there + swizzled(lane / 8 + row, word), some ? from + k * kSwizzleRow : a.q, some);
        }
        from += step, head += heads;
        if (head >= plan.group) head -= plan.group, from += to_next_query;
      }
    }
    arrive_after_copies(&notes.query_full);
    __syncwarp();
    if (lane == 0) arrive(&notes.query_full);
    place.advance(1);
  });
}

// Lane i: which of rows 16 i to 16 i + 15 of a tile of gathered tokens do not exist.
template <class S>
__device__ __forceinline__ uint32_t absent_keys(const Plan& plan, int row) {
  const int at = row / 16 + static_cast<int>(threadIdx.x % 32);
  return threadIdx.x % 32 < S::kKeys / 16 && at < plan.gather.rows / 16 ? __ldcg(plan.gather.absent + at) : 0;
}
template <class S>
__device__ __forceinline__ void note_absent(uint32_t keys, TileInfo& to) {
  const bool any = __any_sync(0xffffffff, keys != 0);
#pragma unroll
  for (int w = 0; w < S::kKeys / 32; ++w) {
    const uint32_t low = __shfl_sync(0xffffffff, keys, 2 * w), high = __shfl_sync(0xffffffff, keys, 2 * w + 1);
    if (threadIdx.x % 32 == 0) to.absent[w] = low | high << 16;
  }
  if (threadIdx.x % 32 == 0) to.special = any;
}

// Keys or values of each item, one tile after the other: [channels / 64][keys][64 channels]. older: of tokens that have
// been gathered. The warp that copies keys notes which of them do not exist.
template <class S, bool VALUES>
__device__ __forceinline__ void copy_tiles(const Plan& plan, const CUtensorMap& own, const CUtensorMap& older,
                                           Notes& notes, uint8_t* to) {
  uint64_t* const full = VALUES ? notes.value_full : notes.key_full;
  uint64_t* const empty = VALUES ? notes.value_empty : notes.key_empty;
  const int stages = VALUES ? plan.value_stages : plan.key_stages;
  RingPlace stage;
  for_each_item(notes, [&](const Item& item) {
    const int tiles = S::kGathered ? item.older.tiles : 0, before = S::kGathered ? tiles + item.older.copies_tiles : 0;
    const int first = item.first_query + item.recent - item.new_begin;  // token of the item's first own key
    for (int tile = 0; tile < item.end; ++tile, stage.advance(stages)) {
      uint32_t absent = 0;
      if (S::kGathered && !VALUES && tile < tiles) absent = absent_keys<S>(plan, item.older.row + tile * S::kKeys);
      wait_barrier(&empty[stage.slot], stage.phase ^ 1);
      if (S::kGathered && !VALUES && tile < tiles) note_absent<S>(absent, notes.info[stage.slot]);
      if (threadIdx.x % 32 == 0) {
        const bool is_own = tile >= before;
        const int token = is_own         ? first + (tile - before) * S::kKeys
                          : tile < tiles ? item.older.row + tile * S::kKeys
                                         : item.older.copies_row + (tile - tiles) * S::kKeys;
        copy_own_tile<S>(to + stage.slot * S::kTileBytes, is_own ? own : older, item.head, token, &full[stage.slot]);
      }
      __syncwarp();  // no lane may be a turn of the ring behind
    }
  });
}

template <class S, typename T>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks)
    prompts_kernel(const __grid_constant__ Attention a, const __grid_constant__ Plan plan,
                   const __grid_constant__ OwnMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  static_assert(S::kProducers == kWarpgroup);
  extern __shared__ __align__(1024) uint8_t shared[];
  Notes& notes = *reinterpret_cast<Notes*>(shared + plan.notes);
  plan.overlap.enter();
  plan.overlap.wait();
  const GatheredRows gathered = GatheredRows::find<S>(a, plan);
  plan.overlap.let_next();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kMaxTileStages; ++i) {
      init_barrier(&notes.key_full[i], 1), init_barrier(&notes.value_full[i], 1);
      init_barrier(&notes.key_empty[i], 4 * S::kGroups), init_barrier(&notes.value_empty[i], 4 * S::kGroups);
    }
    for (int i = 0; i < kItems; ++i) {
      init_barrier(&notes.item_full[i], 1), init_barrier(&notes.item_empty[i], 3 + 4 * S::kGroups);
    }
    init_barrier(&notes.query_full, 1), init_barrier(&notes.query_empty, 4 * S::kGroups);
    for (uint32_t& word : notes.broken) word = 0;
    barriers_ready();
  }
  __syncthreads();
  if (threadIdx.x < S::kProducers) {
    leave_registers<S::kProducerRegisters>();
    switch (threadIdx.x / 32) {
      case 0: return hand_out_items<S>(a, plan, gathered, notes);
      case 1: return copy_queries<S>(a, plan, notes, shared + plan.queries);
      case 2: return copy_tiles<S, false>(plan, maps.keys, maps.older_keys, notes, shared);
      default:
        return copy_tiles<S, true>(plan, maps.values, maps.older_values, notes,
                                   shared + plan.key_stages * S::kTileBytes);
    }
  } else {
    take_registers<S::kConsumerRegisters>();
    Consumer<S, T>(a, plan, shared).run();
  }
  plan.overlap.leave();
#endif
}

}  // namespace turboquant::cuda::row_tiles
