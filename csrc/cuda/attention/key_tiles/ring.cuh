// The ring of units in shared memory: the tiles of 64 tokens' records, as they are in pages. One warp copies: it waits
// until all warps of values, which read a unit last, have read what was there before.
#pragma once

#include "cuda/attention/key_tiles/shape.cuh"
#include "cuda/common/async_copy.cuh"
#include "cuda/common/wgmma.cuh"

namespace turboquant::cuda::key_tiles {

class Ring {
 public:
  explicit __device__ __forceinline__ Ring(const View& block) : block_(block) {}

  // Starts to copy the first of a segment's `units` units, whose first token is `token`. Nobody reads the ring.
  __device__ __forceinline__ void begin(const Segment& segment, int token, int units, int stage) {
    if (!copies()) return;
    const Attention& a = block_.call;
    token_ = token, units_ = 0, head_ = segment.head;
    end_ = a.new_begin(segment.work.length, segment.work.queries);
    visible_ = a.first_visible(segment.work.length - segment.work.queries);
    table_ = a.block_table + segment.sequence * a.table_stride;
    const int first = read_page(0);
    next_page_ = read_page(1), tile_ = tile_of_page(first, 0);
    publish_operands();  // what threads wrote here comes before what copies write
#pragma unroll 1
    for (int i = 0; i < min(units, block_.own.stages); ++i) {
      copy(stage);
      if (++stage == block_.own.stages) stage = 0;
    }
  }

  // The warp, one of values, has read unit `i` of a segment's `units` units, at this turn. The unit before has been
  // read by all warps by now, most likely, so its stage is refilled and nobody waits.
  __device__ __forceinline__ void pass_on(const Turn& turn, int i, int units) {
    __syncwarp();
    if (block_.lane == 0) arrive(block_.freed(turn.stage));
    if (!copies() || i == 0 || i - 1 + block_.own.stages >= units) return;
    const bool wraps = turn.stage == 0;
    const int before = (wraps ? block_.own.stages : turn.stage) - 1;
    wait_barrier(block_.freed(before), turn.phase ^ wraps);
    copy(before);
  }

 private:
  static constexpr uint32_t kNowhere = ~0u;  // of tiles: there is none

  __device__ __forceinline__ bool copies() const { return block_.warp == kWarpgroup / 32; }

  // Starts to copy the segment's next unit: a lane for each of its tiles.
  __device__ __forceinline__ void copy(int stage) {
    const int tiles = block_.own.copies, first = units_ * tiles % 32;  // of the batch
    if (units_ > 0 && first == 0) {
      const int batch = units_ * tiles / 32;
      tile_ = tile_of_page(next_page_, batch), next_page_ = read_page(batch + 1);
    }
    const unsigned i = block_.lane - first;
    const int bytes = block_.layout.copy_bytes;
    const bool mine = i < static_cast<unsigned>(tiles) && tile_ != kNowhere;
    const uint32_t present = __ballot_sync(0xffffffff, mine) >> first;
    if (i == 0) {
      block_.present(stage) = present;
      expect(block_.arrived(stage), __popc(present) * bytes);
    }
    if (mine) {
      copy_bulk(block_.shared + stage * block_.own.unit_bytes + i * bytes,
                block_.call.pages + uint64_t{tile_} * block_.layout.grain, bytes, block_.arrived(stage));
    }
    ++units_;
  }

  // The first token of the lane's tile of a batch.
  __device__ __forceinline__ int token_of_lane(int batch) const {
    return token_ + ((batch * 32 + block_.lane) << block_.layout.copy_shift);
  }
  // The page ids of a batch of 32 tiles, one for each lane; -1: nobody sees tokens of it. They are read long before
  // their use.
  __device__ __forceinline__ int read_page(int batch) const {
    const int token = token_of_lane(batch);
    if (token >= end_ || token + (1 << block_.layout.copy_shift) <= visible_) return -1;
    return __ldcg(table_ + (token >> block_.layout.page_shift));
  }
  // Where the lane's tile of a batch lies, in grains behind `pages`.
  __device__ __forceinline__ uint32_t tile_of_page(int page, int batch) const {
    const StageLayout& layout = block_.layout;
    if (static_cast<unsigned>(page) >= static_cast<unsigned>(block_.call.num_pages)) return kNowhere;
    const uint32_t tile = (token_of_lane(batch) & ((1 << layout.page_shift) - 1)) >> layout.copy_shift;
    return format::record_offset<uint32_t>(page, head_, layout.page_grains, layout.record_grains) +
           tile * layout.tile_grains;
  }

  const View block_;
  const int32_t* table_;
  int token_, end_, visible_, head_;  // the first token; the end of the codes; the first token that a query sees
  unsigned units_;                    // that were copied
  uint32_t tile_;                     // the lane's tile of this batch of 32
  int next_page_;                     // of the lane's tile in the next batch
};

}  // namespace turboquant::cuda::key_tiles
