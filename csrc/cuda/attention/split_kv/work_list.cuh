// The work of a block: which numbers of the list are its own (attention/schedule.cuh), where they lie, and what its
// warps note about them in shared memory.
#pragma once

#include "cuda/attention/split_kv/block.cuh"

namespace turboquant::cuda::split_kv {

template <int ROWS, UnitCosts COSTS = kSplitKvCosts>
class WorkList {
 public:
  explicit __device__ __forceinline__ WorkList(const BlockView& block) : block_(block) {}

  __device__ __forceinline__ WarpNotes& notes() const { return all_notes()[block_.warp]; }

  // Where the block's part of the attended segment ends.
  __device__ __forceinline__ int stop() const { return min(notes().end, notes().attended.end()); }

  // Moves `segment` on to the one that holds number `unit`, or whose gap does.
  __device__ __forceinline__ void seek(Segment& segment, int unit) const {
    segment.template seek<ROWS, COSTS>(block_.call, block_.layout.exact_per_unit, notes().cut.gap, unit);
  }
  // Moves the warp on to the segment behind the attended one. All lanes seek it, in registers, and one notes it.
  __device__ __forceinline__ void next_segment() const {
    Segment segment = notes().attended;
    seek(segment, stop());
    __syncwarp();
    if (block_.lane == 0) notes().attended = segment;
    __syncwarp();
  }

  // Finds the block's share of the list and writes it into the notes of all warps; false: the share is the known one.
  // Only the first warp computes it, because the divisions of eight warps would wait for each other; the others
  // meanwhile call beside(thread, threads), numbered from 0, unless this is a guess. guess: the previous kernel may
  // still be writing the lengths. known: a guess is in the notes.
  template <typename F>
  __device__ __forceinline__ bool find(bool guess, bool known, F&& beside) const {
    WarpNotes& found = all_notes()[block_.plan.warps];
    if (block_.warp == 0) {
      BlockShare share;
      const int finder =
          cut_work<ROWS, COSTS>(block_.call, block_.layout.exact_per_unit, block_.plan.grid,
                                reinterpret_cast<uint2*>(block_.join()), block_.plan.result - block_.plan.join, guess,
                                known ? &found.attended : nullptr, share);
      if (block_.lane == 0) flag() = finder != kSameShare;
      if (block_.lane == finder) {
        found.source = {}, found.cut = share.cut, found.begin = share.begin, found.end = share.end;
        found.attended = found.copied = share.segment;
      }
    }
    if (!guess) {
      const int begin = block_.plan.warps > 1 ? 32 : 0, mine = static_cast<int>(threadIdx.x) - begin;
      const int threads = static_cast<int>(blockDim.x) - begin;
      if (mine >= 0) beside(mine, threads);
    }
    __syncthreads();
    if (!flag()) return false;
    constexpr int kWords = sizeof(WarpNotes) / sizeof(uint32_t);
    const uint32_t* from = reinterpret_cast<const uint32_t*>(&found);
    uint32_t* own = reinterpret_cast<uint32_t*>(all_notes() + block_.warp);
#pragma unroll 1
    for (int i = block_.lane; i < kWords; i += 32) own[i] = from[i];
    __syncwarp();
    if (block_.lane == 0) notes().copy_unit = notes().begin + block_.warp, notes().copy_stop = -1;
    __syncwarp();
    return true;
  }

  // Notes which blocks share a segment. Called while the segment's first bytes are on their way, to hide the divisions.
  __device__ __forceinline__ void find_sharers(const Segment& segment) const {
    // Lane 0 looks for the first block, the others for the last.
    const int block = notes().cut.block_of(block_.lane == 0 ? segment.begin : segment.end() - 1);
    const int last = __shfl_sync(0xffffffff, block, 1);
    if (block_.lane == 0) notes().first_block = block, notes().blocks = last - block + 1;
    __syncwarp();
  }

  // One int of the block, by which a thread tells the others something across a barrier.
  __device__ __forceinline__ int& flag() const { return *reinterpret_cast<int*>(block_.rows() + ROWS); }

 private:
  __device__ __forceinline__ WarpNotes* all_notes() const {
    return reinterpret_cast<WarpNotes*>(block_.shared + block_.plan.notes);
  }

  const BlockView block_;
};

}  // namespace turboquant::cuda::split_kv
