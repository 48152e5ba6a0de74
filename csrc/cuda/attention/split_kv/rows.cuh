// The query rows of a segment: which token and head a row stands for, its copy to shared memory, and how a warp holds a
// row.
#pragma once

#include "cuda/attention/split_kv/block.cuh"
#include "cuda/common/async_copy.cuh"

namespace turboquant::cuda::split_kv {

// How the lanes of a warp hold one row of D elements for its rotation: each lane has some channels of each of the row's
// blocks. Blocks of 16 channels fill only half of a warp; the other half then holds the same row once more.
template <int D>
struct RowLanes {
  static constexpr format::Split kSplit = format::split_dim(D);
  static constexpr int kLog = kSplit.log_block();
  static constexpr int kLanes = std::min(kSplit.block, 32);
  using Rotation = HadamardTraits<kSplit.blocks, kLog, kLanes, kSplit.block / kLanes>;
  static constexpr int kPerLane = Rotation::kPerLane;

  // The channel of a lane's element i.
  static __device__ __forceinline__ int channel(int lane, int i) {
    return Rotation::channel(lane % kLanes, i / Rotation::kVec) + i % Rotation::kVec;
  }
  // False: another lane holds the same elements and writes them.
  static __device__ __forceinline__ bool writes(int lane) { return kLanes == 32 || lane < kLanes; }

  // factors: [d], signs or scales
  static __device__ __forceinline__ void apply(const float* factors, int lane, float (&y)[kPerLane]) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) y[i] *= factors[channel(lane, i)];
  }
};

// The row of a query: its token and head among all, and its position in the sequence.
struct RowPlace {
  int token, head, position;
};

template <int D, int ROWS>
class QueryRows {
 public:
  static constexpr int kRows = ROWS;

  explicit __device__ __forceinline__ QueryRows(const BlockView& block) : block_(block) {}

  // Row `r` of the segment's block of rows; false: there is no such row.
  __device__ __forceinline__ bool find(const Segment& segment, int r, RowPlace& row) const {
    const Attention& a = block_.call;
    const int index = segment.block * ROWS + r;
    if (index >= segment.work.rows(a)) return false;
    const int i = index * block_.plan.group_reciprocal >> 16;  // index / group, exact because index is small
    row.token = segment.work.first_query + i;
    row.head = (segment.head - i) * a.group + index;
    row.position = segment.work.length - segment.work.queries + i;
    return true;
  }

  // The first row that the warp prepares. The last warp has row 0, because the first warp finds the block's work.
  __device__ __forceinline__ int first_of_warp() const { return block_.plan.warps - 1 - block_.warp; }

  // The queries as they came, [ROWS, D] of their type.
  __device__ __forceinline__ uint8_t* raw() const { return block_.shared + block_.plan.raw; }

  // Starts to copy the rows that the warp will prepare to `raw`.
  __device__ __forceinline__ void issue_copies(const Segment& segment) const {
    const Attention& a = block_.call;
    const int size = element_size(a.dtype), lane = block_.lane;
#pragma unroll 1
    for (int r = first_of_warp(); r < ROWS; r += block_.plan.warps) {
      RowPlace row;
      if (!find(segment, r, row) || row.token >= a.tokens) continue;  // a guessed segment may have too many rows
      const uint8_t* from = query(row);
      uint8_t* to = raw() + r * D * size;
#pragma unroll 1
      for (int i = 16 * lane; i < D * size; i += 512) copy_async<true>(to + i, from + i);
    }
    commit_copies();
  }

  // Prefetches the rows that the warp will prepare into the L1 cache. Without it, issue_copies would wait at the end of
  // the current segment behind all copies of keys that are then on their way.
  __device__ __forceinline__ void prefetch(const Segment& segment) const {
    const Attention& a = block_.call;
    const int size = element_size(a.dtype);
#pragma unroll 1
    for (int r = first_of_warp(); r < ROWS; r += block_.plan.warps) {
      RowPlace row;
      if (!find(segment, r, row)) continue;
      const uint8_t* from = query(row);
      if (block_.lane * 128 < D * size) asm volatile("prefetch.global.L1 [%0];" ::"l"(from + block_.lane * 128));
    }
  }

 private:
  // Where the query of a row begins.
  __device__ __forceinline__ const uint8_t* query(const RowPlace& row) const {
    const Attention& a = block_.call;
    const int64_t at = offset_of(row.token, a.q_token_stride) + offset_of(row.head, a.q_head_stride);
    return static_cast<const uint8_t*>(a.q) + at * element_size(a.dtype);
  }

  const BlockView block_;
};

}  // namespace turboquant::cuda::split_kv
