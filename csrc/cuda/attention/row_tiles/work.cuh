// The items of work of a launch, and the order in which blocks take them.
//
// Lengths are on the device only, so every block derives the same list from them: sequence by sequence, KV head by KV
// head, tiles of rows from the last to the first (the last sees the most keys), and part by part. Blocks take items
// from a common counter, so that a block with short items takes more of them. Results do not depend on who takes what:
// the cut depends on lengths only, and partial results are joined in the order of the parts.
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

  __device__ __forceinline__ Sight(const Attention& call, int sequence, int length, int queries)
      : a(call), tail(call.tail_of(sequence, length)), new_begin(call.new_begin(length, queries)) {}
  __device__ __forceinline__ bool any_exact() const { return tail.any() || a.new_keys; }
  __device__ __forceinline__ int first(int position) const { return max(a.first_visible(position), tail.sinks); }
  __device__ __forceinline__ int recent(int position) const { return a.recent(tail, position, new_begin); }
};

// Fills in everything of an item that depends on its sequence and tile of rows; returns the number of its key tiles.
template <class S>
__device__ __forceinline__ int describe(const Attention& a, int sequence, int block, Item& x) {
  x.sequence = sequence, x.block = block;
  x.queries = a.num_queries(sequence), x.length = a.length(sequence), x.first_query = a.first_query(sequence);
  const int rows = x.queries * a.group, first_row = block * S::kRows;
  x.rows = min(rows - first_row, S::kRows);
  const int begin = x.length - x.queries;  // position of query 0
  const int low = begin + quotient(first_row, a.group);
  const int high = begin + quotient(first_row + x.rows - 1, a.group);
  const Sight sight(a, sequence, x.length, x.queries);
  x.new_begin = sight.new_begin;
  x.first = max(sight.first(low), 0) & -kUnitKeys, x.coded_end = max(sight.recent(high), 0);
  const bool coded = max(sight.first(low), 0) < x.coded_end;
  x.coded_tiles = coded ? ceil_div(x.coded_end - x.first, S::kKeys) : 0;
  x.sinks = a.first_visible(low) < sight.tail.sinks ? max(min(sight.tail.sinks, high + 1), 0) : 0;
  x.recent = sight.any_exact() ? max(max(sight.recent(low), a.first_visible(low)), 0) : max(high + 1, 0);
  x.exact = x.sinks + max(high + 1 - x.recent, 0);
  return x.coded_tiles + ceil_div(x.exact, S::kKeys);
}

// One warp computes and hands out items; all its lanes call everything.
template <class S>
class WorkList {
 public:
  // works: false where another warp hands out items.
  __device__ __forceinline__ WorkList(const Attention& a, const Plan& plan, bool works) : a_(a), plan_(plan) {
    if (!works) return;
    const int each = (a.seqs + 31) / 32, lane = threadIdx.x % 32;
    mine_ = lane * each, behind_ = min(mine_ + each, a.seqs);
    const int grid = static_cast<int>(gridDim.x);
    int tiles = 0, most = 0, rows = 0;
    for (int s = mine_; s < behind_; ++s) {
      const Extent x = extent(s);
      tiles += x.segments * x.mean, rows += x.segments, most = max(most, x.most);
    }
    tiles = sum_of_lanes(tiles), rows = sum_of_lanes(rows), most = max_of_lanes(most);
    size_ = max(most, 1);
    if (rows >= 2 * grid) {
      size_ = max(ceil_div(tiles, grid), S::kLeastTiles);
    } else if (most > S::kLeastTiles) {
      const int one = rows <= grid ? smallest_size(tiles, most, grid) : INT32_MAX / 4;
      const int two = smallest_size(tiles, most, 2 * grid);
      size_ = one + kItemOverhead <= 2 * (two + kItemOverhead) ? one : two;
    }
    int items = 0, slots = 0;
    for (bool fits = false; !fits; size_ *= fits ? 1 : 2) {  // rounded up, there may be too many parts
      items = slots = 0;
      for (int s = mine_; s < behind_; ++s) {
        const Extent x = extent(s);
        const int n = parts(x);
        items += n * x.segments, slots += n > 1 ? n * x.segments : 0;
      }
      fits = sum_of_lanes(slots) <= 2 * grid;
    }
    own_items_ = items, items_before_ = sum_of_lanes_before(items), slots_before_ = sum_of_lanes_before(slots);
    total_ = sum_of_lanes(items);
  }

  // Takes the next item; sequence -1: there is none left. Returns true in the lane that has written it.
  __device__ __forceinline__ bool take(Item& to) const {
    const int lane = threadIdx.x % 32, grid = static_cast<int>(gridDim.x);
    int index = 0;
    // Each block asks once more and gets nothing, so the counter's last step brings it back to 0.
    if (lane == 0) index = static_cast<int>(atomicInc(plan_.counters + 2 * grid, total_ + grid - 1));
    index = __shfl_sync(0xffffffff, index, 0);
    if (index >= total_) {
      if (lane == 0) to.sequence = -1;
      return lane == 0;
    }
    if (index < items_before_ || index >= items_before_ + own_items_) return false;
    int before = items_before_, slot = slots_before_, s = mine_;
    Extent x = extent(s);
    int n = parts(x);
    while (index >= before + n * x.segments) {
      before += n * x.segments, slot += n > 1 ? n * x.segments : 0;
      x = extent(++s), n = parts(x);
    }
    const int i = index - before, of_head = x.blocks * n, head = quotient(i, of_head), rest = i - head * of_head;
    const int block = quotient(rest, n);
    Item item;
    const int tiles = describe<S>(a_, s, x.blocks - 1 - block, item);
    item.head = head, item.part = rest - block * n, item.parts = n;
    item.slot = slot + (head * x.blocks + block) * n;
    item.begin = static_cast<int>(int64_t{tiles} * item.part / n);
    item.end = static_cast<int>(int64_t{tiles} * (item.part + 1) / n);
    to = item;
    return true;
  }

 private:
  static constexpr int kItemOverhead = 256 / S::kKeys;  // the start and end of an item take as long as so many tiles

  struct Extent {
    int blocks, segments;  // tiles of rows of a head, and of all heads
    int most, mean;        // key tiles of a tile of rows
  };
  __device__ __forceinline__ Extent extent(int s) const {
    const int rows = a_.num_queries(s) * a_.group;
    if (rows < plan_.least_rows || rows == 0) return {0, 0, 0, 0};
    const int blocks = ceil_div(rows, S::kRows);
    Item x;
    const int last = describe<S>(a_, s, blocks - 1, x), first = blocks > 1 ? describe<S>(a_, s, 0, x) : last;
    return {blocks, blocks * a_.kv_heads, max(max(first, last), 1), max((first + last) / 2, 1)};
  }
  __device__ __forceinline__ int parts(const Extent& x) const { return ceil_div(x.most, size_); }

  // The smallest size of parts for which there are at most `limit` items.
  __device__ __forceinline__ int smallest_size(int tiles, int most, int limit) const {
    int low = max(ceil_div(tiles, limit), S::kLeastTiles), high = most;
    while (low < high) {
      const int middle = (low + high) / 2;
      int n = 0;
      for (int s = mine_; s < behind_; ++s) {
        const Extent x = extent(s);
        n += x.segments * ceil_div(x.most, middle);
      }
      if (sum_of_lanes(n) <= limit) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return max(high, 1);
  }

  const Attention& a_;
  const Plan& plan_;
  int mine_, behind_, size_, total_;
  int own_items_, items_before_, slots_before_;
};

}  // namespace turboquant::cuda::row_tiles
