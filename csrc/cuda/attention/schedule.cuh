// The list of work of the decode kernel (attention/split_kv_kernel.cuh), and how the blocks of a grid cut it: by lengths that only the device knows, and
// without a word between the blocks.
//
// The list is a line of numbers: sequence by sequence, KV head by KV head, block of rows by block of rows, one number for each unit of
// keys; units of codes come first, then those of the exact tail. The units of one (sequence, head, block of rows) are a segment. Every
// block works out for itself, from all lengths, which numbers are its own (cut_work), and where the first of them lies (DecodePlace).
//
// A border between segments costs a block time: its warps' results are joined and other queries prepared, and nobody attends. So
//   where there are enough blocks, each gets an equal part of one segment: no borders;
//   where there are more segments than blocks, each gets whole segments, if all are alike and that takes no longer;
//   else the list is cut anywhere into equal parts, in which a border counts as kBorderUnits numbers.
// Either way the blocks that share a segment are neighbours, and DecodeCut tells which they are.
#pragma once

#include "cuda/attention/call.cuh"

namespace turboquant::cuda {

constexpr int kUnitTokens = 64;   // keys of a unit of codes
constexpr int kBorderUnits = 16;  // the time of a border
constexpr int kLeastUnits = 8;    // a segment is not cut into less

// Of numbers that are not negative; signed division takes longer.
__device__ __forceinline__ int quotient(int x, int y) {
  return static_cast<int>(static_cast<unsigned>(x) / static_cast<unsigned>(y));
}
__device__ __forceinline__ int remainder(int x, int y) {
  return static_cast<int>(static_cast<unsigned>(x) % static_cast<unsigned>(y));
}

// All that follows from the length of a sequence.
struct DecodeSequence {
  int queries, length, blocks;  // blocks of rows
  int first, coded, units;      // first key of unit 0; units of codes; units with the exact ones that follow
  int sinks, recent, exact;     // exact keys that some row sees: [0, sinks) and [recent, length), together `exact`

  bool operator==(const DecodeSequence&) const = default;
  __device__ __forceinline__ int rows(const Attention& a) const { return queries * a.group; }
};

// ROWS: of a block of rows; per_unit: exact keys of a unit.
template <int ROWS>
__device__ __forceinline__ DecodeSequence describe(const Attention& a, int per_unit, int s, bool early) {
  DecodeSequence x;
  x.queries = a.num_queries(s, early), x.length = a.length(s, early);
  x.blocks = quotient(x.queries * a.group + ROWS - 1, ROWS);
  const Attention::Tail tail = a.tail_of(s, early);
  const int begin = x.length - x.queries;
  const int first = max(a.first_visible(begin), tail.sinks), end = max(a.recent(tail, x.length - 1), 0);
  x.first = first & -kUnitTokens;
  x.coded = first < end ? quotient(end - x.first + kUnitTokens - 1, kUnitTokens) : 0;
  x.sinks = min(tail.sinks, x.length);
  x.recent = tail.any ? max(min(a.recent(tail, begin), x.length), x.sinks) : x.length;
  x.exact = x.sinks + x.length - x.recent;
  x.units = x.coded;
  if (x.exact > 0) x.units += quotient(x.exact + per_unit - 1, per_unit);
  x.units = max(x.units, 1);
  return x;
}

// Which numbers of the list of work are whose: from `start` on, block `base` + i has the i-th of equal parts, the first `longer` of
// which have one more. A border between segments costs a block time, because no unit is attended while results are joined and
// queries prepared; so `gap` numbers before the first unit of a segment stand for no unit.
struct DecodeCut {
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

// A place in the list of work: a segment.
struct DecodePlace {
  int sequence, head, block;
  int origin;  // the sequence's first number in the list
  int begin;   // of the segment's units
  DecodeSequence about;

  // Before a sequence whose numbers begin at `origin`.
  static __device__ __forceinline__ DecodePlace before(int sequence, int origin) {
    return {sequence - 1, 0, 0, origin, origin, {}};
  }

  __device__ __forceinline__ int end() const { return begin + about.units; }
  __device__ __forceinline__ int coded_end() const { return begin + about.coded; }
  // Of a unit of codes, and back.
  __device__ __forceinline__ int first_token(int unit) const { return about.first + (unit - begin) * kUnitTokens; }
  __device__ __forceinline__ int unit_of(int token) const { return begin + (token - about.first) / kUnitTokens; }

  // Moves on to the (sequence, head, block) that holds `unit`, or comes after the gap that does.
  template <int ROWS>
  __device__ __forceinline__ void seek(const Attention& a, int per_unit, int gap, int unit, bool early = false) {
    while (unit >= origin + (about.units + gap) * about.blocks * a.kv_heads) {
      origin += (about.units + gap) * about.blocks * a.kv_heads;
      if (++sequence >= a.seqs) {  // the end of the list
        begin = INT32_MAX - 1, about.units = 1, about.coded = about.exact = 0;
        return;
      }
      about = describe<ROWS>(a, per_unit, sequence, early);
    }
    const int segment = quotient(unit - origin, about.units + gap);
    head = about.blocks == 1 ? segment : quotient(segment, about.blocks), block = segment - head * about.blocks;
    begin = origin + segment * (about.units + gap) + gap;
  }
};

// Of the lanes before this one.
__device__ __forceinline__ int sum_of_lanes_before(int x) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  int sum = x;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(0xffffffff, sum, d);
    if (lane >= d) sum += other;
  }
  return sum - x;
}

// A block's share of the list: numbers [begin, end), the first of which lies at `place`; none: begin = end.
struct DecodeShare {
  DecodeCut cut;
  int begin, end;
  DecodePlace place;
};

// One warp finds its block's share. A lane counts for neighbouring sequences. counts: shared memory of `room` bytes, for units and
// segments of each sequence. early: lengths are read while the kernel ahead may still be writing them. known: null, or the place that
// was found so; false: nothing has changed since, and all that was found is true.
template <int ROWS>
__device__ __forceinline__ bool cut_work(const Attention& a, int per_unit, uint2* counts, int room, bool early,
                                         const DecodePlace* known, DecodeShare& found) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int each = (a.seqs + 31) / 32, mine = lane * each, behind = min(mine + each, a.seqs);
  const int grid = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  const bool remember = a.seqs <= room / static_cast<int>(sizeof(uint2));
  int units = 0, segments = 0, least = INT32_MAX, most = 0;
  bool same = known && remember;
  for (int s = mine; s < behind; ++s) {
    const DecodeSequence x = describe<ROWS>(a, per_unit, s, early);
    const int count = x.blocks * a.kv_heads;
    if (remember) {
      const uint2 now{static_cast<unsigned>(x.units), static_cast<unsigned>(count)}, then = counts[s];
      if (known) same &= now.x == then.x && now.y == then.y && (s != known->sequence || x == known->about);
      counts[s] = now;
    }
    units += x.units * count, segments += count;
    if (count > 0) least = min(least, x.units), most = max(most, x.units);
  }
  if (__all_sync(0xffffffff, same)) return false;
  found.begin = found.end = 0, found.place = DecodePlace::before(0, 0);
  const int borders = sum_of_lanes(segments);
  if (borders == 0) return true;
  const int total = sum_of_lanes(units), numbers = total + kBorderUnits * borders;
  least = -max_of_lanes(-least), most = max_of_lanes(most);
  const bool alike = least == most;
  const int fair = max(quotient(numbers + grid - 1, grid), kLeastUnits);

  // Parts of one segment each, equal ones: of the least size, up to `fair`, for which there are enough blocks.
  const auto parts_of = [&](uint2 count, int size) { return count.y * ((count.x + size - 1) / size); };
  const auto parts = [&](int size) {
    int n = 0;
#pragma unroll 1
    for (int s = mine; s < behind; ++s) n += parts_of(counts[s], size);
    return n;
  };
  int size = fair + 1;
  if (remember && borders <= grid) {
    if (alike) {
      const int n = quotient(grid, borders);
      size = max(quotient(most + n - 1, n), kLeastUnits);
    } else if (sum_of_lanes(parts(fair)) <= grid) {
      size = fair;
      for (int low = max(quotient(total + grid - 1, grid), kLeastUnits); low < size;) {
        const int middle = (low + size) / 2;
        const bool enough = sum_of_lanes(parts(middle)) <= grid;
        (enough ? size : low) = enough ? middle : middle + 1;
      }
    }
  }
  DecodeCut cut;
  int begin, end;
  int owner, before;  // the lane whose sequences hold `begin`, and the number before them
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
    // Several segments: whole ones, where all are alike and that takes no longer, else cut anywhere.
    const int whole = quotient(borders + grid - 1, grid) * (most + kBorderUnits), share = quotient(numbers, grid);
    cut = {0, 0, static_cast<unsigned>(share), static_cast<unsigned>(numbers - share * grid), kBorderUnits};
    if (alike && whole - kBorderUnits <= fair) cut.share = whole, cut.longer = 0;
    if (cut.share == 0) cut.share = 1, cut.longer = 0;
    begin = cut.begin(block), end = min(cut.begin(block + 1), numbers);
    if (begin >= end) return true;
    const int own = units + kBorderUnits * segments;
    before = sum_of_lanes_before(own);
    owner = __ffs(static_cast<int>(__ballot_sync(0xffffffff, before <= begin && begin < before + own))) - 1;
    before = __shfl_sync(0xffffffff, before, owner);
  }
  __syncwarp();
  found = {cut, begin, end, DecodePlace::before(owner * each, before)};
  found.place.template seek<ROWS>(a, per_unit, cut.gap, begin, early);
  return true;
}

}  // namespace turboquant::cuda
