// Which keys a row sees: causality, the sliding window, and the share of exact keys.
#pragma once

#include "cuda/attention/general/block_context.cuh"

namespace turboquant::cuda::general {

// What row `row` of a block's share sees; nothing if it is behind the last row.
__device__ __forceinline__ VisibleKeys visible_keys(const Attention& a, const WorkItem& work, int row) {
  const int length = a.length(work.sequence), queries = a.num_queries(work.sequence);
  const int position = length - queries + (work.first_row + row) / a.group;
  if (row >= work.rows || position < 0) return {0, 0, 0, 0};
  const Attention::Tail tail = a.tail_of(work.sequence, length);
  return {a.first_visible(position), min(tail.sinks, position + 1),
          a.recent(tail, position, a.new_begin(length, queries)), position + 1};
}

// The exact keys of a row, or its keys in codes: one or two runs of positions.
struct Sees {
  int begin, recent;
  unsigned count, recent_count;

  __device__ __forceinline__ Sees(const VisibleKeys& visible, bool exact)
      : begin(exact ? visible.first : visible.coded_begin()), recent(visible.recent_begin()),
        count(static_cast<unsigned>(max((exact ? visible.sinks : visible.recent) - begin, 0))),
        recent_count(static_cast<unsigned>(exact ? max(visible.end - recent, 0) : 0)) {}

  __device__ __forceinline__ bool operator()(int position) const {
    return static_cast<unsigned>(position - begin) < count || static_cast<unsigned>(position - recent) < recent_count;
  }
};

template <typename S>
class Mask {
 public:
  __device__ __forceinline__ explicit Mask(const BlockContext<S>& block) : block_(block) {}

  // Writes the visible keys of all rows; the caller synchronises.
  __device__ __forceinline__ void prepare() const {
    for (int r = block_.thread.index; r < S::kRows; r += S::kThreads) row(r) = visible_keys(block_.a, block_.work, r);
  }
  __device__ __forceinline__ const VisibleKeys& first() const { return row(0); }
  __device__ __forceinline__ const VisibleKeys& last() const { return row(block_.work.rows - 1); }

  // What the rows of this warp's team see of the keys in codes from `position` on.
  struct Sight {
    bool any;  // some row sees some key
    bool all;  // every row sees every key
  };
  __device__ __forceinline__ Sight team_sight(int position) const {
    const int first_row = block_.thread.team_row();
    const VisibleKeys first = row(first_row), last = row(min(first_row + S::kTeamRows, block_.work.rows) - 1);
    return {position + S::kKeys > first.coded_begin() && position < last.recent,
            position >= last.coded_begin() && position + S::kKeys <= first.recent};
  }

  // x, a lane's part of the products of a strip with a step's keys, becomes `instead` where a row does not see the key.
  __device__ __forceinline__ void hide(int strip, int step, bool exact, float instead,
                                       float (&x)[4 * S::kKeyOctets]) const {
    const int2* positions = reinterpret_cast<const int2*>(block_.shared.scalars(step).position);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Sees sees(row(block_.thread.lane_row(2 * strip + h)), exact);
#pragma unroll
      for (int o = 0; o < S::kKeyOctets; ++o) {
        const int2 p = positions[4 * o + block_.thread.t];
        float* pair = x + 4 * o + 2 * h;
        pair[0] = sees(p.x) ? pair[0] : instead;
        pair[1] = sees(p.y) ? pair[1] : instead;
      }
    }
  }

 private:
  __device__ __forceinline__ VisibleKeys& row(int r) const { return block_.shared.constants().visible[r]; }

  const BlockContext<S>& block_;
};

}  // namespace turboquant::cuda::general
