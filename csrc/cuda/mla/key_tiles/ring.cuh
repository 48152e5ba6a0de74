// The ring of units in shared memory: two tiles of 32 tokens each, as they are in a page. There the 16-byte words of a
// row have changed places (docs/format.md section 12), so that eight tokens' words for one ldmatrix stand in different
// banks. One warp copies: it waits until all warps of values, which read a unit last, have read what was there before.
#pragma once

#include "cuda/common/async_copy.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/mla/shape.cuh"

namespace turboquant::cuda::mla {

// Where word `chunk` of a token's row stands: among 8 words of codes or more, and among 8 or 4 of raw channels.
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
    const int page = read_page(0);
    next_page_ = read_page(1), from_ = place_of(page, 0);
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

  // Starts to copy the segment's next unit: the lanes that know where its tiles are copy one each.
  __device__ __forceinline__ void copy(int stage) {
    const int batch = units_ / kBatchUnits, in_batch = units_ % kBatchUnits;
    if (units_ > 0 && in_batch == 0) from_ = place_of(next_page_, batch), next_page_ = read_page(batch + 1);
    if (block_.lane / kUnitTiles == in_batch) {
      const int bytes = block_.plan.copy_bytes, tile = block_.lane % kUnitTiles;
      expect(block_.arrived(stage), from_ ? bytes : 0);
      if (from_) {
        copy_bulk(block_.shared + stage * block_.plan.unit_bytes + tile * block_.plan.tile_bytes, from_, bytes,
                  block_.arrived(stage));
      }
    }
    ++units_;
  }

  // The first token of the lane's tile in a batch.
  __device__ __forceinline__ int token_of(int batch) const { return token_ + (batch * 32 + block_.lane) * kTileTokens; }
  // Its page; -1: it has no tokens. It is read long before it is needed.
  __device__ __forceinline__ int read_page(int batch) const {
    const int token = token_of(batch);
    return token < end_ ? block_.call.page_of(table_, token) : -1;
  }
  // Where it is, or null.
  __device__ __forceinline__ const uint8_t* place_of(int page, int batch) const {
    return block_.call.exists(page) ? block_.call.tile_of(page, token_of(batch)) : nullptr;
  }

  // A lane knows a tile of each batch.
  static constexpr int kBatchUnits = 32 / kUnitTiles;
  const BlockView block_;
  const int32_t* table_;
  int token_, end_, units_;  // the segment's first token and the end of its codes; units that were copied
  const uint8_t* from_;      // where the lane's tile of this batch is
  int next_page_;            // of its tile in the next batch
};

}  // namespace turboquant::cuda::mla
