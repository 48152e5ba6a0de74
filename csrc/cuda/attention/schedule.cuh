// The work of a paged_attention launch as one list, and how the blocks of a grid divide it: by lengths that only the
// device knows, and without any communication between the blocks.
//
// The list numbers all units of work: sequence by sequence, KV head by KV head, block of rows by block of rows. A unit
// is 64 keys; units of codes come first, then units of exact keys. The units of one (sequence, KV head, block of
// rows) form a segment. Every block computes from all lengths which interval of numbers is its own (cut_work), and
// where the first of its units lies (Segment).
//
// The end of a segment costs a block time in which it attends to nothing: it joins the results of its warps and
// prepares other queries. The cut therefore depends on the number of segments:
//   with at least as many blocks as segments, each block gets an equal part of one segment, and no block sees two;
//   with more segments than blocks, each block gets whole segments, if all segments are equal and that takes no longer;
//   otherwise equal intervals are cut anywhere in the list, and a segment counts as many numbers more than it has units
//   as its end takes time (UnitCosts).
// In all three cases the blocks that share a segment are neighbours, and ListCut says which they are.
#pragma once

#include "cuda/attention/call.cuh"

namespace turboquant::cuda {

constexpr int kUnitTokens = 64;  // keys of a unit of codes

// Of a kernel, in units: the shortest part that a segment is cut into; the fewest that exact keys count as, if there
// are any; and what the end of a segment counts as. Key tiles take longer for each unit than split-KV, and as long for
// few exact keys as for six units (docs/measurements/performance_key_tiles.md). Where a sequence has at most `apart`
// exact keys and at most `apart` queries, its exact keys belong to no unit: another kernel attends to them.
struct UnitCosts {
  int least_part, least_exact, end, apart = 0;
};
constexpr UnitCosts kSplitKvCosts{8, 1, 16}, kKeyTilesCosts{4, 6, 16};

// Everything that follows from the length of a sequence.
struct SequenceWork {
  int first_query, queries, length;  // query tokens, 0 of them where another kernel takes them; keys
  int blocks;                        // of rows
  int first, coded, units;           // the first key of unit 0; units of codes; all units, those of exact keys included
  int sinks, recent;                 // exact keys that some row sees: [0, sinks) and [recent, length)
  Attention::Tail tail;

  // Everything else follows from these. One comparison without branches, because it is short.
  __device__ __forceinline__ bool operator==(const SequenceWork& x) const {
    return ((first_query ^ x.first_query) | (queries ^ x.queries) | (length ^ x.length) | (tail.slot ^ x.tail.slot) |
            (tail.sinks ^ x.tail.sinks) | (tail.first ^ x.tail.first)) == 0;
  }
  __device__ __forceinline__ int rows(const Attention& a) const { return queries * a.group; }
  __device__ __forceinline__ int exact() const { return sinks + length - recent; }
  // The position of exact key i.
  __device__ __forceinline__ int exact_key(int i) const { return i < sinks ? i : recent + i - sinks; }
  // Whether no unit has the exact keys. apart: see UnitCosts
  __device__ __forceinline__ bool exact_apart(int apart) const { return exact() <= apart && queries <= apart; }
};

// ROWS: rows of a block of rows. per_unit: exact keys of a unit. early: lengths are read before the previous kernel has
// ended.
template <int ROWS, UnitCosts COSTS>
__device__ __forceinline__ SequenceWork work_of_sequence(const Attention& a, const Divisor& per_unit, int s,
                                                         bool early) {
  SequenceWork x;
  const Attention::Queries queries = a.queries_of(s, early);
  x.first_query = queries.first, x.queries = a.takes(queries.count) ? queries.count : 0;
  x.length = a.length(s, queries.count, early);
  x.blocks = ceil_div(x.queries * a.group, ROWS);
  x.tail = a.tail_of(s, x.length, early);
  const Attention::Tail& tail = x.tail;
  const int begin = x.length - x.queries, new_begin = a.new_begin(x.length, x.queries);
  const int visible = a.first_visible(begin);
  const int first = max(visible, tail.sinks), end = max(a.recent(tail, x.length - 1, new_begin), 0);
  x.first = first & -kUnitTokens;
  x.coded = first < end ? ceil_div(end - x.first, kUnitTokens) : 0;
  x.sinks = visible < tail.sinks ? min(tail.sinks, x.length) : 0;
  x.recent = tail.any() || a.new_keys ? max(min(a.recent(tail, begin, new_begin), x.length), x.sinks) : x.length;
  const int exact = x.exact();
  int exact_units = exact > 0 ? quotient(exact - 1, per_unit) + 1 : 0;
  if (COSTS.least_exact > 1 && exact > 0) exact_units = max(exact_units, COSTS.least_exact);
  if (COSTS.apart > 0 && x.exact_apart(COSTS.apart)) exact_units = 0;
  x.units = max(x.coded + exact_units, 1);
  return x;
}

// Which block owns which numbers of the list: block `base` + i owns the i-th of equal intervals, the first `longer` of
// which are longer by one. `gap` numbers before the first unit of each segment stand for no unit: they are the overhead
// of the segment's end, which would otherwise not be shared fairly. Where each block has a part of one segment, the
// numbers of that segment begin at 0, and `base` is the first of its blocks.
struct ListCut {
  int base;
  unsigned share, longer;
  int gap;

  __device__ __forceinline__ int begin(int block) const {
    const unsigned i = block - base;
    return static_cast<int>(i * share + min(i, longer));
  }
  __device__ __forceinline__ int block_of(int unit) const {
    const int in_longer = longer * (share + 1);
    const bool is_longer = unit < in_longer;
    return base + (is_longer ? 0 : longer) + small_quotient(unit - (is_longer ? 0 : in_longer), share + is_longer);
  }
};

// A segment, and where it lies in the list.
struct __align__(16) Segment {
  int sequence, head, block;
  int begin;  // the number of its first unit
  SequenceWork work;

  __device__ __forceinline__ int end() const { return begin + work.units; }
  __device__ __forceinline__ int coded_end() const { return begin + work.coded; }
  // The first key of a unit of codes.
  __device__ __forceinline__ int first_token(int unit) const { return work.first + (unit - begin) * kUnitTokens; }

  // Moves on, one segment after the other, to the one that holds number `unit`, or whose gap does.
  template <int ROWS, UnitCosts COSTS>
  __device__ __forceinline__ void seek(const Attention& a, const Divisor& per_unit, int gap, int unit) {
#pragma unroll 1
    while (unit >= end()) {
      begin = end() + gap;
      if (++block < work.blocks) continue;
      block = 0;
      if (++head < a.kv_heads) continue;
      head = 0;
#pragma unroll 1
      do {
        if (++sequence >= a.seqs) {  // the end of the list
          begin = INT32_MAX - 1, work.units = 1, work.coded = work.sinks = work.length = work.recent = 0;
          return;
        }
        work = work_of_sequence<ROWS, COSTS>(a, per_unit, sequence, false);
      } while (work.blocks == 0);
    }
  }
};

// A block's share of the list: numbers [begin, end), the first of which lies in `segment`. Without work, begin = end.
struct BlockShare {
  ListCut cut;
  int begin, end;
  Segment segment;
};

// One warp computes the share of its block; each lane counts the work of a run of neighbouring sequences.
//   COSTS   of the kernel
//   grid    the number of blocks
//   counts  shared memory of `room` bytes for (units, segments) of each sequence, unless there are too many sequences
//   early   lengths are read while the previous kernel may still be writing them
//   known   null, or the first segment of the share that an earlier call has found
// Returns the lane whose `found` is the share; that of other lanes has no meaning. kSameShare: no length that decides
// about the share has changed since the earlier call, whose share is right.
constexpr int kSameShare = -1;
template <int ROWS, UnitCosts COSTS>
__device__ __forceinline__ int cut_work(const Attention& a, const Divisor& per_unit, const Divisor& grid, uint2* counts,
                                        int room, bool early, const Segment* known, BlockShare& found) {
  const int lane = static_cast<int>(threadIdx.x % 32), block = static_cast<int>(blockIdx.x);
  const int each = (a.seqs + 31) / 32, mine = lane * each, behind = min(mine + each, a.seqs);
  const bool remember = a.seqs <= room / static_cast<int>(sizeof(uint2));
  int units = 0, segments = 0, least = INT32_MAX, most = 0;
  bool same = known && remember;
  SequenceWork x{};
  // The share begins in the segment that has number `target`, where `before` numbers lie before the lane's sequences.
  // With a part size, `size` > 0, numbers are those of blocks: a segment of u units has ceil(u / size) of them. Else
  // they are those of the list.
  int target = 0, before = 0, size = 0, numbers = 0;
  const auto numbers_of_segment = [&] {
    return size > 0 ? small_quotient(x.units + size - 1, size) : x.units + COSTS.end;
  };
  int s = mine;
  // Twice over the lane's sequences with the same code: first all of them are counted, then the lane that has the
  // target looks for its sequence. It recalls the counts, if it can, and works only that sequence out again.
#pragma unroll 1
  for (bool counted = false;; counted = true) {
    bool recalls = counted && remember && each > 1;
#pragma unroll 1
    for (s = mine; s < behind; ++s) {
      int count;
      if (recalls) {
        x.units = static_cast<int>(counts[s].x), count = static_cast<int>(counts[s].y);
      } else {
        if (!counted || each > 1) x = work_of_sequence<ROWS, COSTS>(a, per_unit, s, early);
        count = x.blocks * a.kv_heads;
      }
      if (counted) {
        const int own = numbers_of_segment() * count;
        if (target >= before + own) {
          before += own;
        } else if (recalls) {
          recalls = false, --s;
        } else {
          break;
        }
        continue;
      }
      if (remember) {
        const uint2 now{static_cast<unsigned>(x.units), static_cast<unsigned>(count)}, then = counts[s];
        if (known) same &= now.x == then.x && now.y == then.y && (s != known->sequence || x == known->work);
        counts[s] = now;
      }
      units += x.units * count, segments += count;
      if (count > 0) least = min(least, x.units), most = max(most, x.units);
    }
    if (counted) break;
    if (__all_sync(0xffffffff, same)) return kSameShare;
    found.begin = found.end = 0, found.segment = {};
    const int all_segments = sum_of_lanes(segments);
    if (all_segments == 0) return 0;
    const int total = sum_of_lanes(units);
    numbers = total + COSTS.end * all_segments;
    least = -max_of_lanes(-least), most = max_of_lanes(most);
    const bool alike = least == most;
    int share = quotient(numbers, grid), longer = numbers - share * grid;
    const int fair = max(share + (longer > 0 ? 1 : 0), COSTS.least_part);
    int own = units + COSTS.end * segments;  // numbers of the lane's sequences

    // Equal parts of one segment for each block: the smallest part size, up to `fair`, for which there are enough
    // blocks. Where all segments are alike, it follows from how many blocks each can have.
    if (remember && all_segments <= grid) {
      int low, high = fair + 1, middle = fair;
      if (alike) {
        low = middle = max(ceil_div(most, small_quotient(grid, all_segments)), COSTS.least_part);
      } else {
        low = max(quotient(total - 1, grid) + 1, COSTS.least_part);
      }
#pragma unroll 1
      for (; low < high; middle = (low + high) / 2) {
        int parts = 0;
#pragma unroll 1
        for (int i = mine; i < behind; ++i) {
          const uint2 count = counts[i];
          parts += static_cast<int>(count.y) * small_quotient(static_cast<int>(count.x) + middle - 1, middle);
        }
        if (sum_of_lanes(parts) <= grid) {
          high = size = middle, own = parts;
        } else {
          low = middle + 1;
        }
      }
    }
    if (size > 0) {
      target = block;
    } else {
      // Several segments for each block: whole ones, if all are equal and that takes no longer, else the list is cut
      // anywhere.
      const int whole = (quotient(all_segments - 1, grid) + 1) * (most + COSTS.end);
      if (alike && whole - COSTS.end <= fair) share = whole, longer = 0;
      if (share == 0) share = 1, longer = 0;
      found.cut = {0, static_cast<unsigned>(share), static_cast<unsigned>(longer), COSTS.end};
      target = found.cut.begin(block);
    }
    before = sum_of_lanes_before(own);
    const unsigned owns = __ballot_sync(0xffffffff, before <= target && target < before + own);
    if (!owns) return 0;
    const int owner = __ffs(static_cast<int>(owns)) - 1;
    if (lane != owner) return owner;
  }
  const int of_segment = numbers_of_segment(), segment = quotient(target - before, of_segment);
  int begin = before + segment * of_segment;  // the segment's first number
  if (size > 0) {
    const int share = quotient(x.units, of_segment);
    found.cut = {begin, static_cast<unsigned>(share), static_cast<unsigned>(x.units - share * of_segment), 0};
    begin = 0, numbers = x.units;
  }
  found.begin = found.cut.begin(block), found.end = min(found.cut.begin(block + 1), numbers);
  const int head = quotient(segment, x.blocks);
  found.segment = {s, head, segment - head * x.blocks, begin + found.cut.gap, x};
  return lane;
}

}  // namespace turboquant::cuda
