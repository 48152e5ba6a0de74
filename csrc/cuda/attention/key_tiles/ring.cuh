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
    pages_ = read_pages(0), next_pages_ = read_pages(1);
    publish_operands();  // what threads wrote here comes before what copies write
#pragma unroll 1
    for (int i = 0; i < min(units, block_.own.stages); ++i) {
      copy(stage);
      if (++stage == block_.own.stages) stage = 0;
    }
  }

  // The warp, one of values, has read the unit of this turn. more: a unit of the segment takes its place.
  __device__ __forceinline__ void pass_on(const Turn& turn, bool more) {
    __syncwarp();
    if (block_.lane == 0) arrive(block_.freed(turn.stage));
    if (!copies() || !more) return;
    wait_barrier(block_.freed(turn.stage), turn.phase);
    copy(turn.stage);
  }

 private:
  __device__ __forceinline__ bool copies() const { return block_.warp == kWarpgroup / 32; }

  // Starts to copy the segment's next unit: a lane for each of its tiles.
  __device__ __forceinline__ void copy(int stage) {
    const StageLayout& layout = block_.layout;
    const int tiles = block_.own.copies, per_batch = 32 / tiles, in_batch = units_ & (per_batch - 1);
    if (units_ > 0 && in_batch == 0) pages_ = next_pages_, next_pages_ = read_pages(units_ / per_batch + 1);
    const int lane = block_.lane, page = __shfl_sync(0xffffffff, pages_, in_batch * tiles + (lane & (tiles - 1)));
    const bool mine = lane < tiles && static_cast<unsigned>(page) < static_cast<unsigned>(block_.call.num_pages);
    const uint32_t present = __ballot_sync(0xffffffff, mine);
    if (lane == 0) {
      block_.present(stage) = present;
      expect(block_.arrived(stage), __popc(present) * layout.copy_bytes);
    }
    __syncwarp();
    if (mine) {
      const int token = token_ + units_ * kUnitTokens + (lane << layout.copy_shift);
      const uint32_t tile = (token & ((1 << layout.page_shift) - 1)) >> layout.copy_shift;
      const uint32_t grains =
          format::record_offset<uint32_t>(page, head_, layout.page_grains, layout.record_grains) +
          tile * layout.tile_grains;
      copy_bulk(block_.shared + stage * block_.own.unit_bytes + lane * layout.copy_bytes,
                block_.call.pages + uint64_t{grains} * layout.grain, layout.copy_bytes, block_.arrived(stage));
    }
    ++units_;
  }

  // The page ids of 32 tiles, one for each lane; -1: nobody sees tokens of it. They are read long before their use.
  __device__ __forceinline__ int read_pages(int batch) const {
    const StageLayout& layout = block_.layout;
    const int token = token_ + ((batch * 32 + block_.lane) << layout.copy_shift);
    if (token >= end_ || token + (1 << layout.copy_shift) <= visible_) return -1;
    return __ldcg(table_ + (token >> layout.page_shift));
  }

  const View block_;
  const int32_t* table_;
  int token_, end_, visible_, head_, units_;  // the first token; the end of the codes; units that were copied
  int pages_, next_pages_;                    // of the lane's tile in this batch of 32 tiles, and in the next
};

}  // namespace turboquant::cuda::key_tiles
