// The items of work of a launch, and the order in which blocks take them.
//
// Lengths are on the device only, so every block derives the same list from them: the sequences of one lane of a warp
// after those of another, of each as many KV heads at once as the L2 cache holds the keys of, tiles of rows from the
// last to the first (the last sees the most keys, so no long item begins when the others end), head by head, and part
// by part. Blocks take items from a common counter, so that a block with short items takes more of them. Results do not
// depend on who takes what: the cut depends on lengths only, and partial results are joined in the order of the parts.
//
// Tiles of rows are cut into parts of equal numbers of key tiles, all tiles of rows of a sequence into equally many. If
// a launch has fewer than two of them for each block, the length of a part is chosen so that the whole takes one round
// of the grid or two, whichever is shorter; else only a tile of rows with more than a block's share of the work is cut.
// There are at most 2 grid parts of cut tiles, which bounds the workspace.
#pragma once

#include "cuda/attention/row_tiles/shape.cuh"

namespace turboquant::cuda::row_tiles {

// Which keys a query at `position` of a sequence reads from codes: [first, recent); the others that it sees are exact.
struct Sight {
  const Attention& a;
  Attention::Tail tail;
  int new_begin;

  __device__ __forceinline__ Sight(const Attention& call, const Attention::Tail& tail, int new_begin)
      : a(call), tail(tail), new_begin(new_begin) {}
  __device__ __forceinline__ Sight(const Attention& call, int sequence, int length, int queries)
      : a(call), tail{-1, 0, 0}, new_begin(call.new_begin(length, queries)) {
    if (new_begin > 0) tail = call.tail_of(sequence, length);  // else nothing is older than the call
  }
  __device__ __forceinline__ bool any_exact() const { return tail.any() || a.new_keys; }
  __device__ __forceinline__ int first(int position) const { return max(a.first_visible(position), tail.sinks); }
  __device__ __forceinline__ int recent(int position) const { return a.recent(tail, position, new_begin); }
};

// The older tokens of a sequence that its queries see, as they are gathered (gather.cuh).
struct OlderTokens {
  int begin, coded_end;      // positions that some query reads from codes; begin is a multiple of 16
  int sinks;                 // of the tail: positions [0, sinks), none of which is the call's own
  int tail_begin, tail_end;  // positions that some query has in its recent window, of the tail
  Attention::Tail tail;

  OlderTokens() = default;
  __device__ __forceinline__ OlderTokens(const Sight& sight, int length, int queries) : tail(sight.tail) {
    const Attention& a = sight.a;
    const int low = length - queries;  // of the first query
    begin = max(sight.first(low), 0) & -16, coded_end = max(min(sight.recent(length - 1), sight.new_begin), 0);
    sinks = a.first_visible(low) < tail.sinks ? max(min(tail.sinks, sight.new_begin), 0) : 0;
    tail_begin = max(max(sight.recent(low), a.first_visible(low)), 0);
    tail_end = tail.any() ? max(sight.new_begin, tail_begin) : tail_begin;
  }
  // Rows that are decoded, and tokens that are copied, sinks first.
  __device__ __forceinline__ int coded_rows() const { return (max(coded_end - begin, 0) + 15) & -16; }
  __device__ __forceinline__ int copies() const { return sinks + tail_end - tail_begin; }
  // The position of copy i.
  __device__ __forceinline__ int copy_at(int i) const { return i < sinks ? i : tail_begin + i - sinks; }
};

// What an item's rows see.
struct Seen {
  int low, high;  // positions of the first query and of the last one
  int by_all;     // exact keys from here on are seen by all rows, as far as the first query sees them; beside sinks
  bool coded;     // whether some row reads codes
};
// Fills in everything of an item that depends on its sequence and tile of rows, but for numbers of tiles of keys.
template <class S>
__device__ __forceinline__ Seen describe_rows(const Attention& a, const Divisor& group, int sequence, int block,
                                              Item& x) {
  x.sequence = sequence, x.block = block;
  x.queries = a.num_queries(sequence), x.length = a.length(sequence), x.first_query = a.first_query(sequence);
  const int rows = x.queries * a.group, first_row = block * S::kRows;
  x.rows = min(rows - first_row, S::kRows);
  const int begin = x.length - x.queries;  // position of query 0
  const int low = begin + quotient(first_row, group);
  const int high = begin + quotient(first_row + x.rows - 1, group);
  const Sight sight(a, sequence, x.length, x.queries);
  x.new_begin = sight.new_begin;
  x.first = max(sight.first(low), 0) & -kUnitKeys, x.coded_end = max(sight.recent(high), 0);
  x.sinks = a.first_visible(low) < sight.tail.sinks ? max(min(sight.tail.sinks, high + 1), 0) : 0;
  x.recent = sight.any_exact() ? max(max(sight.recent(low), a.first_visible(low)), 0) : max(high + 1, 0);
  x.exact = x.sinks + max(high + 1 - x.recent, 0);
  return {low, high, max(sight.recent(high), a.first_visible(high)), max(sight.first(low), 0) < x.coded_end};
}
// All of an item; returns the number of its key tiles.
template <class S>
__device__ __forceinline__ int describe(const Attention& a, const Divisor& group, int sequence, int block, Item& x) {
  const Seen seen = describe_rows<S>(a, group, sequence, block, x);
  x.coded_tiles = seen.coded ? ceil_div(x.coded_end - x.first, S::kKeys) : 0;
  x.common_begin = x.coded_tiles + ceil_div(x.sinks + max(seen.by_all - x.recent, 0), S::kKeys);
  x.common_end = x.coded_tiles + min(x.sinks + seen.low + 1 - x.recent, x.exact) / S::kKeys;
  return x.coded_tiles + ceil_div(x.exact, S::kKeys);
}

// Whether a sequence has many rows, and some older tokens, but few for its rows: no other is gathered (gather.cuh).
__device__ __forceinline__ bool suits_gathering(const Attention& a, const Plan& plan, int sequence) {
  const int queries = a.num_queries(sequence), rows = queries * plan.group, length = a.length(sequence, queries);
  const int older = length - (a.new_keys ? queries : 0);
  return rows >= max(plan.least_rows, plan.gather.least_rows) && length >= queries && older > 0 &&
         older <= plan.gather.most_tokens &&
         static_cast<float>(older) <= plan.gather.tokens_of_row * static_cast<float>(rows);
}

// Where sequences have been gathered to, which the kernel that gathers writes down.
class GatheredRows {
 public:
  // All threads of a block call it. The kernel of prompts waits for the one that gathers, and so for the decode steps
  // before that, only if some sequence suits. It lets row tiles begin when it has waited, so they need not.
  template <class S>
  static __device__ __forceinline__ GatheredRows find(const Attention& a, const Plan& plan) {
    bool some = false;
    if (!plan.gather.first_rows || (S::kPrompts && !S::kGathered)) return GatheredRows(nullptr);
    for (int s = static_cast<int>(threadIdx.x); s < a.seqs && !some; s += blockDim.x) {
      some = suits_gathering(a, plan, s);
    }
    some = __syncthreads_or(some);
    if (some && S::kPrompts) wait_for_previous_kernel();
    return GatheredRows(some ? plan.gather.first_rows : nullptr);
  }
  // The first row of a sequence; -1: it has not been gathered. Past the L1 cache, which may hold what an earlier call
  // has left there.
  __device__ __forceinline__ int first(int sequence) const { return rows_ ? __ldcg(rows_ + sequence) : -1; }

 private:
  explicit __device__ __forceinline__ GatheredRows(const int* rows) : rows_(rows) {}

  const int* rows_;  // [seqs]; null: none has been
};

// Whether a sequence is this kernel's, row tiles or prompts. The latter takes those of which there are no tokens but
// the call's own, or of which the others have been gathered, and the former no long ones, which are those of the kernel
// of chunks.
template <class S>
__device__ __forceinline__ bool takes(const Attention& a, const Plan& plan, GatheredRows gathered, int sequence) {
  // Everything is loaded at once: each load that waited for a branch would take as long as all of them.
  const int state = !S::kPrompts && plan.first_states ? __ldcg(plan.first_states + sequence) : -1;
  const int first_row = gathered.first(sequence), queries = a.num_queries(sequence), rows = queries * a.group;
  const int begin = a.new_begin(a.length(sequence, queries), queries);
  if (rows < plan.least_rows || rows == 0 || state >= 0) return false;
  return !plan.prompts_apart || (first_row >= 0 || begin <= 0) == S::kPrompts;
}
// Whether some sequence is; all threads of the block call it.
template <class S>
__device__ __forceinline__ bool any_work(const Attention& a, const Plan& plan, GatheredRows gathered) {
  bool any = false;
  for (int s = static_cast<int>(threadIdx.x); s < a.seqs && !any; s += blockDim.x) any = takes<S>(a, plan, gathered, s);
  return __syncthreads_or(any);
}

// The sequences of a lane: of every 32 it has one, if this kernel takes it. So a few prompts behind many decode steps
// are the work of several lanes. works: as of WorkList.
template <class S>
class LaneSequences {
 public:
  int first = 0, count = 0;  // the lane's first one, and how many it has

  __device__ __forceinline__ LaneSequences(const Attention& a, const Plan& plan, GatheredRows gathered, bool works)
      : a_(a), plan_(plan), gathered_(gathered) {
    if (!works) return;
#pragma unroll 1
    for (int s = static_cast<int>(threadIdx.x % 32); s < a.seqs; s += 32) {
      if (!takes<S>(a, plan, gathered, s)) continue;
      if (count == 0) first = s;
      ++count;
    }
  }
  // The one behind sequence s. There must be one: only a caller that changes lengths meanwhile can make this find none.
  __device__ __forceinline__ int next(int s) const {
    while (s + 32 < a_.seqs) {
      s += 32;
      if (takes<S>(a_, plan_, gathered_, s)) break;
    }
    return s;
  }

 private:
  const Attention& a_;
  const Plan& plan_;
  const GatheredRows gathered_;
};

// The number of the next of `total` items, for all lanes of a warp. Each block asks once more and gets nothing, so the
// counter's last step brings it back to 0.
__device__ __forceinline__ int next_item(uint32_t* counter, int total) {
  int index = 0;
  if (threadIdx.x % 32 == 0) index = static_cast<int>(atomicInc(counter, total + gridDim.x - 1));
  return __shfl_sync(0xffffffff, index, 0);
}

// The KV heads of a sequence that are attended to at once: half of an L2 cache holds their exact keys and values.
template <class S>
__device__ __forceinline__ int heads_at_once(int tiles, int kv_heads) {
  return min(max(quotient((24 << 20) / (2 * S::kTileBytes), tiles), 1), kv_heads);
}

// One warp computes and hands out items; all its lanes call everything. Each instruction runs a few times at most, and
// to fetch it takes longer than that, so the code of an extent stands here twice and not wherever it is needed.
template <class S>
class WorkList {
 public:
  // works: false where another warp hands out items. The list then has one, of sequence 0, to rehearse with.
  __device__ __forceinline__ WorkList(const Attention& a, const Plan& plan, GatheredRows gathered, bool works)
      : a_(a), plan_(plan), mine_(a, plan, gathered, works) {
    if (!works) {
      size_ = Search::kUncutSize, total_ = 1, own_items_ = threadIdx.x % 32 == 0, items_before_ = slots_before_ = 0;
      return;
    }
    Search search{static_cast<int>(gridDim.x)};
    int items[2], slots;  // of the lane, with each of the sizes; slots with the first
    do {
      int tiles = 0, work = 0, most = 0;
      items[0] = items[1] = slots = 0;
#pragma unroll 1
      for (int i = 0; i < mine_.count; ++i) {
        const Extent& x = extent(i);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const int n = parts(x, search.size[k]) * x.segments;
          items[k] += n;
          if (k == 0) slots += n > x.segments ? n : 0;
        }
        tiles += x.segments * x.mean, work += x.segments * x.most, most = max(most, x.most);
      }
      search.step(items, slots, tiles, work, most);
    } while (search.phase != Search::kDone);
    size_ = search.size[0], own_items_ = items[0];
    items_before_ = sum_of_lanes_before(items[0]), slots_before_ = sum_of_lanes_before(slots);
    total_ = sum_of_lanes(items[0]);
  }

  // Takes the next item; sequence -1: there is none left. Returns true in the lane that has written it. rehearses: on a
  // list that does not work.
  __device__ __forceinline__ bool take(Item& to, bool rehearses) {
    const int grid = static_cast<int>(gridDim.x);
    const int index = rehearses ? 0 : next_item(plan_.counters + 2 * grid, total_);
    if (index >= total_) {
      if (threadIdx.x % 32 == 0) to.sequence = -1;
      return threadIdx.x % 32 == 0;
    }
    if (index < items_before_ || index >= items_before_ + own_items_) return false;
    int before = items_before_, slot = slots_before_, number = 0, n;
    for (;; ++number) {
      const Extent& x = extent(number);
      n = parts(x, size_);
      if (index < before + n * x.segments) break;
      before += n * x.segments, slot += n > 1 ? n * x.segments : 0;
    }
    const Extent& x = known_[number % kKnown];
    const int i = index - before, heads = heads_at_once<S>(x.most, a_.kv_heads), of_heads = heads * x.blocks * n;
    const int first_head = quotient(i, of_heads) * heads, others = min(heads, a_.kv_heads - first_head);
    const int in_heads = i - first_head * x.blocks * n, block = quotient(in_heads, others * n);
    const int in_block = in_heads - block * others * n, head = quotient(in_block, n);
    Item item;
    const int tiles = describe<S>(a_, plan_.group, x.sequence, x.blocks - 1 - block, item);
    item.head = first_head + head, item.part = in_block - head * n, item.parts = n;
    item.slot = slot + (item.head * x.blocks + block) * n;
    item.begin = static_cast<int>(int64_t{tiles} * item.part / n);
    item.end = static_cast<int>(int64_t{tiles} * (item.part + 1) / n);
    to = item;
    return true;
  }

 private:
  static constexpr int kItemOverhead = 256 / S::kKeys;  // the start and end of an item take as long as so many tiles

  static constexpr int kKnown = 4;
  struct Extent {
    int number = -1, sequence;  // of the lane's sequences; of all
    int blocks, segments;       // tiles of rows of a head, and of all heads
    int most, mean;             // key tiles of a tile of rows
  };
  // Of the lane's sequence `number`; the one before, if there is one, was asked for just before. Kept for the next
  // time: of up to 128 sequences a lane has four.
  __device__ __forceinline__ const Extent& extent(int number) {
    Extent& x = known_[number % kKnown];
    if (number == x.number) return x;
    const int s = number == 0 ? mine_.first : mine_.next(known_[(number - 1) % kKnown].sequence);
    return x = find_extent(number, s);
  }
  __device__ __forceinline__ Extent find_extent(int number, int s) const {
    // A sequence with which the list is rehearsed may have no rows, and `take` would look for another one behind it.
    const int queries = a_.num_queries(s), blocks = max(ceil_div(queries * a_.group, S::kRows), 1);
    Item last;
    const int most = max(describe<S>(a_, plan_.group, s, blocks - 1, last), 1);
    // Earlier tiles of rows see fewer keys, but for a window.
    const int fewer = a_.sliding_window > 0 ? 0 : max(queries - quotient(S::kRows, plan_.group), 0) / S::kKeys;
    return {number, s, blocks, blocks * a_.kv_heads, most, max(most - fewer / 2, 1)};
  }
  static __device__ __forceinline__ int parts(const Extent& x, int size) {
    return small_quotient(x.most + size - 1, size);
  }

  // Looks for the size of parts, in key tiles: for the smallest one with which all items are one round of the grid, and
  // for the smallest one with which they are two, at the same time. A step learns how many items there are with two
  // sizes, and sets the next ones; at last the first is the one that is chosen. A step is a chain of some 300
  // instructions, for which all blocks wait. So the search begins between close bounds: `work` key tiles of `all` tiles
  // of rows make at least work / size parts, and less than work / size + all.
  struct Search {
    enum Phase { kUncut, kSearch, kFits, kDone };
    static constexpr int kUncutSize = 1 << 24, kNever = INT32_MAX / 4;  // 2^30 tokens; longer than any tile of rows
    int grid;
    Phase phase = kUncut;
    int size[2] = {kUncutSize, kUncutSize}, low[2], high[2];  // of one round and of two

    // Numbers of the lane: items with both sizes, slots with the first one; its key tiles, about (`tiles`) and at most
    // (`work`), and those of its longest tile of rows.
    __device__ __forceinline__ void step(const int (&items)[2], int slots, int tiles, int work, int most) {
      if (phase == kFits) {  // rounded up, there may be too many parts
        if (sum_of_lanes(slots) <= 2 * grid) {
          phase = kDone;
        } else {
          size[0] *= 2;
        }
        return;
      }
      const int found[2] = {sum_of_lanes(items[0]), sum_of_lanes(items[1])};
      if (phase == kUncut) {
        const int all = found[0], longest = max_of_lanes(most);
        phase = kFits;
        if (all >= 2 * grid || longest <= S::kLeastTiles) {
          size[0] = all >= 2 * grid ? max(ceil_div(sum_of_lanes(tiles), grid), S::kLeastTiles) : max(longest, 1);
          return;
        }
        phase = kSearch, work = sum_of_lanes(work);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const int most_items = (k + 1) * grid, others = max(most_items - all, 1);
          low[k] = max(ceil_div(work, most_items), S::kLeastTiles);
          high[k] = max(min(all < most_items ? ceil_div(work, others) : longest, longest), low[k]);
          if (all > most_items) low[k] = high[k] = kNever;
        }
      } else {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          if (low[k] < high[k]) (found[k] <= (k + 1) * grid ? high[k] = size[k] : low[k] = size[k] + 1);
        }
      }
#pragma unroll
      for (int k = 0; k < 2; ++k) size[k] = (low[k] + high[k]) / 2;
      if (low[0] < high[0] || low[1] < high[1]) return;
      if (size[0] + kItemOverhead > 2 * (size[1] + kItemOverhead)) size[0] = size[1];
      phase = kFits;
    }
  };

  const Attention& a_;
  const Plan& plan_;
  LaneSequences<S> mine_;
  int size_, total_;
  int own_items_, items_before_, slots_before_;
  Extent known_[kKnown];
};

}  // namespace turboquant::cuda::row_tiles
