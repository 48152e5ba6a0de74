// The keys in codes that a block goes through, step by step: which they are, where their pages have them, and their
// copies to shared memory.
//
// A step's tiles are found three steps before it is multiplied and their copies are issued two steps before, so that
// neither the block table nor the pages are waited for.
#pragma once

#include "cuda/attention/general/block_context.cuh"
#include "cuda/common/async_copy.cuh"

namespace turboquant::cuda::general {

template <typename S>
class PageStages {
 public:
  __device__ __forceinline__ explicit PageStages(const BlockContext<S>& block) : block_(block) {}

  // The keys that some row sees. The limits of visible keys grow with the position, so the first and the last row know
  // them.
  __device__ __forceinline__ void select(const VisibleKeys& first, const VisibleKeys& last) {
    begin_ = coded_begin(first, last), end_ = last.recent;
    aligned_begin_ = begin_ / S::kKeys * S::kKeys;
    steps_ = end_ > begin_ ? (end_ - aligned_begin_ + S::kKeys - 1) / S::kKeys : 0;
  }
  __device__ __forceinline__ int steps() const { return steps_; }

  // The position of a step's first key. Where it is before the first key, or the step ends behind the last, there are
  // no keys.
  __device__ __forceinline__ int position(int step) const { return aligned_begin_ + step * S::kKeys; }
  __device__ __forceinline__ bool holds(int position) const { return position >= begin_ && position < end_; }

  // ---- Tiles

  __device__ __forceinline__ int tiles() const { return max(S::kKeys >> block_.x.layout.tile_shift, 1); }  // of a step

  // The address of tile i of a step in its page, or null; by any thread.
  __device__ __forceinline__ uint8_t* find_tile(int step, int i) const {
    const Attention& a = block_.a;
    const RecordLayout& layout = block_.x.layout;
    const int shift = layout.tile_shift;
    const int at = (position(step) >> shift) + i, position = at << shift;
    if (position >= end_ || position + (1 << shift) <= begin_) return nullptr;
    const int64_t page = a.block_table[block_.work.sequence * a.table_stride + (position >> layout.page_shift)];
    if (page < 0 || page >= a.num_pages) return nullptr;
    const int number = (position & ((1 << layout.page_shift) - 1)) >> shift;
    const int64_t record =
        format::record_offset<int64_t>(page, block_.work.kv_head, a.page_stride, layout.record_bytes);
    return const_cast<uint8_t*>(a.pages) + record + number * layout.tile_bytes;  // Token's pointers are only read from
  }
  // Makes an address known to all threads, behind the next synchronisation.
  __device__ __forceinline__ void set_tile(int step, int i, uint8_t* tile) const {
    block_.shared.constants().tile[step % kKnownSteps][i] = tile;
  }
  __device__ __forceinline__ uint8_t* tile(int step, int i) const {
    return block_.shared.constants().tile[step % kKnownSteps][i];
  }

  // Issues the copies of a step's tiles; by all threads.
  __device__ __forceinline__ void copy(int step) const {
    const int bytes = block_.x.layout.tile_bytes;
#pragma unroll 1
    for (int i = 0; i < tiles(); ++i) {
      const uint8_t* from = tile(step, i);
      uint8_t* to = stage(step) + i * bytes;
      if (!from) continue;
#pragma unroll 1
      for (int b = 16 * block_.thread.index; b < bytes; b += 16 * S::kThreads) copy_async(to + b, from + b);
    }
  }

  // ---- Keys

  // A key in its tile, which is in shared memory if STAGED. Without STAGED the tile is null where there is no page.
  __device__ __forceinline__ Token token(int step, int key) const {
    const int shift = block_.x.layout.tile_shift, mask = (1 << shift) - 1;
    if constexpr (S::kStaged) {
      return {stage(step) + (key >> shift) * block_.x.layout.tile_bytes, key & mask};
    } else {
      const int at = (position(step) & mask) + key;
      return {tile(step, at >> shift), at & mask};
    }
  }
  // Is there a key, on a page?
  __device__ __forceinline__ bool exists(int step, int key) const {
    const int shift = block_.x.layout.tile_shift;
    const int at = S::kStaged ? key : (position(step) & ((1 << shift) - 1)) + key;
    return holds(position(step) + key) && tile(step, at >> shift);
  }

 private:
  __device__ __forceinline__ uint8_t* stage(int step) const {
    return block_.shared.stage(step, tiles() * block_.x.layout.tile_bytes);
  }

  const BlockContext<S>& block_;
  int begin_, end_, aligned_begin_;  // positions; a step begins at a multiple of kKeys
  int steps_;
};

}  // namespace turboquant::cuda::general
