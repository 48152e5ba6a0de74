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
//   otherwise equal intervals are cut anywhere in the list, and a segment counts kSegmentOverhead numbers more than it
//   has units.
// In all three cases the blocks that share a segment are neighbours, and ListCut says which they are.
#pragma once

#include "cuda/attention/call.cuh"

namespace turboquant::cuda {

constexpr int kUnitTokens = 64;       // keys of a unit of codes
constexpr int kSegmentOverhead = 16;  // the end of a segment takes as long as so many units
constexpr int kLeastUnits = 8;        // the shortest part that split-KV cuts a segment into

// Everything that follows from the length of a sequence.
struct SequenceWork {
  int queries, length, blocks;  // query tokens, 0 where another kernel takes them; keys; blocks of rows
  int first, coded, units;      // the first key of unit 0; units of codes; all units, those of exact keys included
  int sinks, recent, exact;     // exact keys that some row sees: [0, sinks) and [recent, length), `exact` in all

  bool operator==(const SequenceWork&) const = default;
  __device__ __forceinline__ int rows(const Attention& a) const { return queries * a.group; }
  // The position of exact key i.
  __device__ __forceinline__ int exact_key(int i) const { return i < sinks ? i : recent + i - sinks; }
};

// ROWS: rows of a block of rows. per_unit: exact keys of a unit. early: lengths are read before the previous kernel has
// ended.
template <int ROWS>
__device__ __forceinline__ SequenceWork work_of_sequence(const Attention& a, int per_unit, int s, bool early) {
  SequenceWork x;
  x.queries = a.num_queries(s, early), x.length = a.length(s, early);
  if (x.queries > a.most_queries || x.queries < a.least_queries) x.queries = 0;
  x.blocks = ceil_div(x.queries * a.group, ROWS);
  const Attention::Tail tail = a.tail_of(s, x.length, early);
  const int begin = x.length - x.queries, new_begin = a.new_begin(x.length, x.queries);
  const int first = max(a.first_visible(begin), tail.sinks), end = max(a.recent(tail, x.length - 1, new_begin), 0);
  x.first = first & -kUnitTokens;
  x.coded = first < end ? ceil_div(end - x.first, kUnitTokens) : 0;
  x.sinks = a.first_visible(begin) < tail.sinks ? min(tail.sinks, x.length) : 0;
  x.recent = tail.any || a.new_keys ? max(min(a.recent(tail, begin, new_begin), x.length), x.sinks) : x.length;
  x.exact = x.sinks + x.length - x.recent;
  x.units = x.coded;
  if (x.exact > 0) x.units += ceil_div(x.exact, per_unit);
  x.units = max(x.units, 1);
  return x;
}

// Which block owns which numbers of the list: from `start` on, block `base` + i owns the i-th of equal intervals, the
// first `longer` of which are longer by one. `gap` numbers before the first unit of each segment stand for no unit:
// they are the overhead of the segment's end, which would otherwise not be shared fairly.
struct ListCut {
  int start, base;
  unsigned share, longer;
  int gap;

  __device__ __forceinline__ int begin(int block) const {
    const unsigned i = block - base;
    return start + static_cast<int>(i * share + min(i, longer));
  }
  __device__ __forceinline__ int block_of(int unit) const {
    const unsigned i = unit - start, in_longer = longer * (share + 1);
    return base + static_cast<int>(i < in_longer ? i / (share + 1) : longer + (i - in_longer) / share);
  }
};

// A segment, and where it lies in the list.
struct Segment {
  int sequence, head, block;
  int origin;  // the first number of its sequence
  int begin;   // the number of its first unit
  SequenceWork work;

  // Stands before the sequence whose numbers begin at `origin`; `seek` moves on from here.
  static __device__ __forceinline__ Segment before(int sequence, int origin) {
    return {sequence - 1, 0, 0, origin, origin, {}};
  }

  __device__ __forceinline__ int end() const { return begin + work.units; }
  __device__ __forceinline__ int coded_end() const { return begin + work.coded; }
  // The first key of a unit of codes.
  __device__ __forceinline__ int first_token(int unit) const { return work.first + (unit - begin) * kUnitTokens; }

  // Moves on to the segment that holds number `unit`, or whose gap does.
  template <int ROWS>
  __device__ __forceinline__ void seek(const Attention& a, int per_unit, int gap, int unit, bool early = false) {
    while (unit >= origin + (work.units + gap) * work.blocks * a.kv_heads) {
      origin += (work.units + gap) * work.blocks * a.kv_heads;
      if (++sequence >= a.seqs) {  // the end of the list
        begin = INT32_MAX - 1, work.units = 1, work.coded = work.exact = 0;
        return;
      }
      work = work_of_sequence<ROWS>(a, per_unit, sequence, early);
    }
    const int segment = quotient(unit - origin, work.units + gap);
    head = work.blocks == 1 ? segment : quotient(segment, work.blocks), block = segment - head * work.blocks;
    begin = origin + segment * (work.units + gap) + gap;
  }
};

// A block's share of the list: numbers [begin, end), the first of which lies in `segment`. Without work, begin = end.
struct BlockShare {
  ListCut cut;
  int begin, end;
  Segment segment;
};

// One warp computes the share of its block; each lane counts the work of a run of neighbouring sequences.
//   LEAST   the shortest part, in units, that a segment is cut into
//   counts  shared memory of `room` bytes for (units, segments) of each sequence, unless there are too many sequences
//   early   lengths are read while the previous kernel may still be writing them
//   known   null, or the first segment of the share that an earlier call has found
// Returns false if no length that decides about the share has changed since the earlier call: `found` then stays as it
// is, and the earlier share is right.
template <int ROWS, int LEAST = kLeastUnits>
__device__ __forceinline__ bool cut_work(const Attention& a, int per_unit, uint2* counts, int room, bool early,
                                         const Segment* known, BlockShare& found) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int each = (a.seqs + 31) / 32, mine = lane * each, behind = min(mine + each, a.seqs);
  const int grid = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  const bool remember = a.seqs <= room / static_cast<int>(sizeof(uint2));
  int units = 0, segments = 0, least = INT32_MAX, most = 0;
  bool same = known && remember;
#pragma unroll 1
  for (int s = mine; s < behind; ++s) {
    const SequenceWork x = work_of_sequence<ROWS>(a, per_unit, s, early);
    const int count = x.blocks * a.kv_heads;
    if (remember) {
      const uint2 now{static_cast<unsigned>(x.units), static_cast<unsigned>(count)}, then = counts[s];
      if (known) same &= now.x == then.x && now.y == then.y && (s != known->sequence || x == known->work);
      counts[s] = now;
    }
    units += x.units * count, segments += count;
    if (count > 0) least = min(least, x.units), most = max(most, x.units);
  }
  if (__all_sync(0xffffffff, same)) return false;
  found.begin = found.end = 0, found.segment = Segment::before(0, 0);
  const int all_segments = sum_of_lanes(segments);
  if (all_segments == 0) return true;
  const int total = sum_of_lanes(units), numbers = total + kSegmentOverhead * all_segments;
  least = -max_of_lanes(-least), most = max_of_lanes(most);
  const bool alike = least == most;
  const int fair = max(ceil_div(numbers, grid), LEAST);

  // Equal parts of one segment for each block: the smallest part size, up to `fair`, for which there are enough blocks.
  const auto parts_of = [&](uint2 count, int size) { return count.y * ((count.x + size - 1) / size); };
  const auto parts = [&](int size) {
    int n = 0;
#pragma unroll 1
    for (int s = mine; s < behind; ++s) n += parts_of(counts[s], size);
    return n;
  };
  int size = fair + 1;
  if (remember && all_segments <= grid) {
    if (alike) {
      const int n = quotient(grid, all_segments);
      size = max(ceil_div(most, n), LEAST);
    } else if (sum_of_lanes(parts(fair)) <= grid) {
      size = fair;
#pragma unroll 1
      for (int low = max(ceil_div(total, grid), LEAST); low < size;) {
        const int middle = (low + size) / 2;
        const bool enough = sum_of_lanes(parts(middle)) <= grid;
        (enough ? size : low) = enough ? middle : middle + 1;
      }
    }
  }
  ListCut cut;
  int begin, end;
  int owner, before;  // the lane whose sequences hold `begin`, and the first number of these sequences
  if (size <= fair) {
    const int n = parts(size);
    int first = sum_of_lanes_before(n);
    const unsigned owns = __ballot_sync(0xffffffff, first <= block && block < first + n);
    if (!owns) return true;
    owner = __ffs(static_cast<int>(owns)) - 1, before = 0;
    cut = {0, 0, 0, 0, 0};
    if (lane == owner) {
      int s = mine;
      uint2 count = counts[s];
#pragma unroll 1
      for (int n; n = parts_of(count, size), block >= first + n; count = counts[++s]) {
        first += n, cut.start += count.x * count.y;
      }
      const unsigned n = (count.x + size - 1) / size, segment = (block - first) / n;
      cut.start += segment * count.x, cut.base = first + segment * n, cut.share = count.x / n, cut.longer = count.x % n;
    }
    cut.start = __shfl_sync(0xffffffff, cut.start, owner), cut.base = __shfl_sync(0xffffffff, cut.base, owner);
    cut.share = __shfl_sync(0xffffffff, cut.share, owner), cut.longer = __shfl_sync(0xffffffff, cut.longer, owner);
    begin = cut.begin(block), end = cut.begin(block + 1);
  } else {
    // Several segments for each block: whole ones, if all are equal and that takes no longer, else the list is cut
    // anywhere.
    const int whole = ceil_div(all_segments, grid) * (most + kSegmentOverhead);
    const int share = quotient(numbers, grid);
    cut = {0, 0, static_cast<unsigned>(share), static_cast<unsigned>(numbers - share * grid), kSegmentOverhead};
    if (alike && whole - kSegmentOverhead <= fair) cut.share = whole, cut.longer = 0;
    if (cut.share == 0) cut.share = 1, cut.longer = 0;
    begin = cut.begin(block), end = min(cut.begin(block + 1), numbers);
    if (begin >= end) return true;
    const int own = units + kSegmentOverhead * segments;
    before = sum_of_lanes_before(own);
    owner = __ffs(static_cast<int>(__ballot_sync(0xffffffff, before <= begin && begin < before + own))) - 1;
    before = __shfl_sync(0xffffffff, before, owner);
  }
  __syncwarp();
  found = {cut, begin, end, Segment::before(owner * each, before)};
  found.segment.template seek<ROWS>(a, per_unit, cut.gap, begin, early);
  return true;
}

}  // namespace turboquant::cuda
