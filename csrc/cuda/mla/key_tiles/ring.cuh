// The ring of units in shared memory: two tiles of 32 tokens each, as they are in a page. There the 16-byte words of a
// row have changed places (docs/format.md section 12), so that eight tokens' words for one ldmatrix stand in different
// banks. One warp copies: it waits until all warps of values, which read a unit last, have read what was there before.
#pragma once

#include "cuda/common/async_copy.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/mla/shape.cuh"

namespace turboquant::cuda::mla {

// Where word `chunk` of a token's row stands: among 8 words of codes or more, and among 8 or 4 of rotary channels.
__device__ __forceinline__ int code_word(int token, int chunk) {
  return format::swapped_word(8, token, chunk) * format::kLatentWord;
}
__device__ __forceinline__ int rope_word(int token, int chunk, int rope_words) {
  return format::swapped_word(rope_words, token, chunk) * format::kLatentWord;
}

class Ring {
 public:
  explicit __device__ __forceinline__ Ring(const BlockView& block) : block_(block) {}

  // Starts to copy the first of a segment's `units` units, whose first token is `token`. Nobody reads the ring.
  __device__ __forceinline__ void begin(const Segment& segment, int token, int units, int stage) {
    if (!copies()) return;
    const Attention& a = block_.call.a;
    token_ = token, units_ = 0;
    end_ = a.new_begin(segment.work.length, segment.work.queries);
    table_ = a.block_table + segment.sequence * a.table_stride;
    pages_ = read_pages(0), next_pages_ = read_pages(1);
    publish_operands();  // what threads wrote here comes before what copies write
    for (int i = 0; i < min(units, block_.plan.stages); ++i) {
      copy(stage);
      if (++stage == block_.plan.stages) stage = 0;
    }
  }

  // The warp, one of values, has read the unit of this turn. more: the segment's next unit takes its place.
  __device__ __forceinline__ void pass_on(const Turn& turn, bool more) {
    __syncwarp();
    if (block_.lane == 0) arrive(block_.freed(turn.stage));
    if (!copies() || !more) return;
    wait_barrier(block_.freed(turn.stage), turn.phase);
    copy(turn.stage);
  }

 private:
  __device__ __forceinline__ bool copies() const { return block_.warp == kWarpgroup / 32; }

  // Starts to copy the segment's next unit.
  __device__ __forceinline__ void copy(int stage) {
    const int in_batch = units_ % (32 / kUnitTiles);
    if (units_ > 0 && in_batch == 0) pages_ = next_pages_, next_pages_ = read_pages(units_ / (32 / kUnitTiles) + 1);
    const Latents& x = block_.call;
    int page[kUnitTiles];
    bool there[kUnitTiles];
#pragma unroll
    for (int i = 0; i < kUnitTiles; ++i) {
      page[i] = __shfl_sync(0xffffffff, pages_, in_batch * kUnitTiles + i);
      there[i] = x.exists(page[i]);
    }
    if (block_.lane == 0) {
      const int bytes = x.record.tile_bytes();
      expect(block_.arrived(stage), (there[0] + there[1]) * bytes);
#pragma unroll
      for (int i = 0; i < kUnitTiles; ++i) {
        if (!there[i]) continue;
        const int token = token_ + units_ * kUnitTokens + i * kTileTokens;
        copy_bulk(block_.shared + stage * block_.plan.unit_bytes + i * block_.plan.tile_bytes,
                  x.tile_of(page[i], token), bytes, block_.arrived(stage));
      }
    }
    ++units_;
  }

  // The page ids of 32 tiles, one for each lane; -1: the tile has no tokens. They are read long before their use.
  __device__ __forceinline__ int read_pages(int batch) const {
    const int token = token_ + (batch * 32 + block_.lane) * kTileTokens;
    return token < end_ ? block_.call.page_of(table_, token) : -1;
  }

  static_assert(kUnitTiles == 2);
  const BlockView block_;
  const int32_t* table_;
  int token_, end_, units_;  // the segment's first token and the end of its codes; units that were copied
  int pages_, next_pages_;   // of the lane's tile in this batch of 32 tiles, and in the next
};

}  // namespace turboquant::cuda::mla
