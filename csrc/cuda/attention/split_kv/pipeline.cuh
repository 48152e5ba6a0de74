// A warp's pipeline of asynchronous copies: stages in shared memory that are filled and read in turn, two for each unit
// of keys. Copies run ahead of the products, and across the ends of segments.
//
// To find the address of a tile takes more instructions than to issue its copy, so addresses are found for a whole
// batch: 8 or 16 of the warp's next units, all of one segment, a tile for each lane. Meanwhile the page ids of the next
// batch are loaded; nothing waits for them before that batch begins. Exact keys have no batches, because their
// addresses need no page ids.
#pragma once

#include "cuda/attention/split_kv/work_list.cuh"
#include "cuda/common/async_copy.cuh"

namespace turboquant::cuda::split_kv {

// Rows: QueryRows, whose queries are prefetched when the copies reach a new segment.
template <class Rows>
class Pipeline {
  using List = WorkList<Rows::kRows>;

 public:
  __device__ __forceinline__ Pipeline(const BlockView& block, const List& list, const Rows& rows)
      : block_(block), list_(list), rows_(rows) {}

  // Before everything else: makes the barriers of the warp's stages ready.
  __device__ __forceinline__ void begin() {
    stage_ = block_.warp * block_.plan.pipeline_bytes, phase_ = 0, next_lane_ = kNone;
#pragma unroll 1
    for (int i = block_.lane; i < block_.plan.stages; i += 32) {
      init_barrier(barrier(stage_ + i * block_.layout.stride), block_.layout.copies);
    }
    barriers_ready();
    __syncwarp();
  }

  // ---- The reading side

  // The stages of the current unit, in bytes from the start of shared memory.
  __device__ __forceinline__ void stages(int (&base)[kUnitStages]) const {
#pragma unroll
    for (int i = 0; i < kUnitStages; ++i) base[i] = stage_ + i * block_.layout.stride;
  }
  // Waits until a stage of the current unit has arrived.
  __device__ __forceinline__ void wait(int stage) const { wait_barrier(barrier(stage), phase_); }

  // The current unit is done: its stages are refilled, and the next two stages become current.
  __device__ __forceinline__ void advance() {
    __syncwarp();
    copy(stage_);
    stage_ += kUnitStages * block_.layout.stride;
    if (stage_ == (block_.warp + 1) * block_.plan.pipeline_bytes) stage_ -= block_.plan.pipeline_bytes, phase_ ^= 1;
  }

  // ---- The copying side

  // Only before the first unit is read: starts to copy the warp's next unit to stages i and i + 1.
  __device__ __forceinline__ void fill(int i) { copy(stage_ + i * block_.layout.stride); }

  // Loads the page ids of the next batch, -1 where a lane has no tile.
  __device__ __forceinline__ void read_pages() {
    page_ = -1;
    const CopySource c = list_.notes().source;
    if (batch_unit() >= copy_stop_ || c.exact()) return;
    const int token = batch_token(c);
    if (token >= c.length || token + (1 << block_.layout.copy_shift) <= c.visible) return;
    page_ = __ldcg(c.table + (token >> block_.layout.page_shift));
  }

  // Prefetches the next batch into the L2 cache, as many units as the pipeline has room for.
  __device__ __forceinline__ void prefetch() const {
    const uint32_t tile = tile_of_page(list_.notes().source);
    if ((block_.lane >> block_.layout.unit_shift) * kUnitStages < block_.plan.stages && tile != kNowhere) {
      prefetch_bytes(block_.call.pages + uint64_t{tile} * block_.layout.grain, block_.layout.copy_bytes);
    }
  }

 private:
  static constexpr int kNone = 32;           // of next_lane_: the batch is used up
  static constexpr uint32_t kNowhere = ~0u;  // of tiles: there is none

  __device__ __forceinline__ uint64_t* barrier(int stage) const {
    return reinterpret_cast<uint64_t*>(block_.shared + stage + block_.layout.bytes);
  }

  // The unit of the next batch of which the lane has a tile, and the tile's first token.
  __device__ __forceinline__ int batch_unit() const {
    return copy_unit_ + (block_.lane >> block_.layout.unit_shift) * block_.plan.warps;
  }
  __device__ __forceinline__ int batch_token(const CopySource& c) const {
    const int tile = block_.lane & ((1 << block_.layout.unit_shift) - 1);
    return c.first + batch_unit() * kUnitTokens + (tile << block_.layout.copy_shift);
  }

  // Starts to copy the warp's next unit, if any, to the stage at `first` and the one behind it. The next batch is
  // looked up only after that, because at the beginning of a launch nothing may delay the first bytes.
  __device__ __forceinline__ void copy(int first) {
    const bool batch_begins = next_lane_ == kNone;
    if (batch_begins) {
      copy_unit_ = list_.notes().copy_unit, copy_stop_ = list_.notes().copy_stop;
      if (copy_stop_ == 0) return;  // nothing is left
      begin_batch(first);
    }
    if (next_lane_ != kNone) copy_codes(first);
    if (batch_begins) {
      look_up();
      __syncwarp();
      if (block_.lane == 0) list_.notes().copy_unit = copy_unit_, list_.notes().copy_stop = copy_stop_;
      __syncwarp();
    }
  }

  // Finds the units of the next batch and loads their page ids.
  __device__ __forceinline__ void look_up() {
    if (copy_unit_ >= copy_stop_ && copy_stop_ != 0) find_run();
    read_pages();
  }

  // The batch whose page ids were loaded becomes the current one. A unit of exact keys is copied at once.
  __device__ __forceinline__ void begin_batch(int first) {
    if (copy_unit_ >= copy_stop_) return;
    const CopySource c = list_.notes().source;
    if (c.exact()) {
      copy_exact(first);
      copy_unit_ += block_.plan.warps;
      return;
    }
    const int lanes = __popc(__ballot_sync(0xffffffff, batch_unit() < copy_stop_));
    next_lane_ = 32 - lanes;
    tile_ = __shfl_sync(0xffffffff, tile_of_page(c), block_.lane - next_lane_);
    copy_unit_ += (lanes >> block_.layout.unit_shift) * block_.plan.warps;
  }

  // Where the lane's tile of the next batch lies, in grains behind `pages`; kNowhere: the lane has none, or the page id
  // is out of range.
  __device__ __forceinline__ uint32_t tile_of_page(const CopySource& c) const {
    const StageLayout& layout = block_.layout;
    if (static_cast<unsigned>(page_) >= static_cast<unsigned>(block_.call.num_pages)) return kNowhere;
    const uint32_t tile = (batch_token(c) & ((1 << layout.page_shift) - 1)) >> layout.copy_shift;
    return format::record_offset<uint32_t>(page_, c.head, layout.page_grains, layout.record_grains) +
           tile * layout.tile_grains;
  }

  // Copies the next unit of the current batch.
  __device__ __forceinline__ void copy_codes(int first) {
    const StageLayout& layout = block_.layout;
    const bool mine = static_cast<unsigned>(block_.lane - next_lane_) < 1u << layout.unit_shift;
    const int i = block_.lane & ((1 << layout.unit_shift) - 1);  // which of the unit's tiles
    const int second = i >> (layout.unit_shift - 1), stage = first + second * layout.stride;
    const int bytes = tile_ == kNowhere ? 0 : layout.copy_bytes;
    copy_blocks(barrier(first), barrier(first + layout.stride), barrier(stage), mine ? bytes : -1,
                block_.shared + stage + (i & (layout.copies - 1)) * layout.copy_bytes,
                block_.call.pages + uint64_t{tile_} * layout.grain, mine ? bytes : 0);
    next_lane_ += 1 << layout.unit_shift;
  }

  // Copies the next unit of exact keys: lanes 0-7 to the first stage, lanes 8-15 to the second. In the tail a key has
  // its value behind it, so that both are one copy. The values of the call's own tokens are elsewhere: lanes 16-31 copy
  // them. The barriers count on as many lanes that announce bytes as for codes.
  __device__ __forceinline__ void copy_exact(int first) const {
    const StageLayout& layout = block_.layout;
    const int lane = block_.lane;
    const ExactSource source = exact_source();
    const int i = lane % 8, keys = __popc(__ballot_sync(0xffffffff, source.bytes != 0) >> (lane & 8) & 0xFF);
    const int stage = lane & 8 ? first + layout.stride : first;
    const bool is_value = lane >= kExactLanes, announces = !is_value && i < layout.copies;
    copy_blocks(barrier(first), barrier(first + layout.stride), barrier(stage),
                !announces ? -1 : (i == 0 ? keys * layout.exact_bytes : 0),
                block_.shared + stage + i * layout.exact_stride + (is_value ? layout.exact_bytes / 2 : 0), source.from,
                source.bytes);
  }

  // What a lane copies of an exact key and its value; 0 bytes: nothing.
  struct ExactSource {
    const uint8_t* from;
    int bytes;
  };
  static constexpr int kExactLanes = 8 * kUnitStages;  // the others copy values
  static_assert(kExactLanes == 16);

  __device__ __forceinline__ ExactSource exact_source() const {
    const Attention& a = block_.call;
    const Segment& segment = list_.notes().copied;
    const int per_stage = block_.layout.exact_keys, lane = block_.lane;
    const int i = ((copy_unit_ - segment.coded_end()) * kUnitStages + lane % kExactLanes / 8) * per_stage + lane % 8;
    if (lane % 8 >= per_stage || i >= segment.work.exact()) return {nullptr, 0};
    const int position = segment.work.exact_key(i), is_value = lane >= kExactLanes;
    const int new_begin = a.new_begin(segment.work.length, segment.work.queries);
    if (position >= new_begin) {
      const int token = segment.work.first_query + position - new_begin;
      return {static_cast<const uint8_t*>(a.new_row(token, segment.head, is_value)), block_.layout.exact_bytes / 2};
    }
    if (is_value) return {nullptr, 0};
    const int rows = a.sink_tokens + a.ring, row = format::tail_row(position, a.sink_tokens, a.ring);
    // Factors without signs, because their products are shorter.
    const unsigned slot = segment.work.tail.slot, head = segment.head, d = a.record.head_dim;
    const int64_t at = format::tail_offset<int64_t>(slot, a.tail_stride, head, static_cast<unsigned>(row),
                                                    static_cast<unsigned>(rows), d, 0);
    return {static_cast<const uint8_t*>(a.tail) + at * kExactElementBytes, block_.layout.exact_bytes};
  }

  // Finds the next unit that has something to copy and the end of its run, units of codes or of exact keys of one
  // segment, and notes what read_pages needs of the segment.
  __device__ __forceinline__ void find_run() {
    Segment next = list_.notes().copied;
    const int end = list_.notes().end;
    for (;; copy_unit_ += block_.plan.warps) {
      if (copy_unit_ >= end) {
        copy_stop_ = 0;
        return;
      }
      list_.seek(next, copy_unit_);
      if (copy_unit_ < next.begin) continue;  // a number of the gap
      if (copy_unit_ < next.coded_end() || next.work.exact() > 0) break;
    }
    const bool exact = copy_unit_ >= next.coded_end();
    copy_stop_ = min(end, exact ? next.end() : next.coded_end());
    __syncwarp();
    if (block_.lane == 0) {
      const Attention& a = block_.call;
      list_.notes().copied = next;
      list_.notes().source = {next.work.first - next.begin * kUnitTokens,
                              a.new_begin(next.work.length, next.work.queries),
                              a.first_visible(next.work.length - next.work.queries), exact ? -1 : next.head,
                              a.block_table + offset_of(next.sequence, a.table_stride)};
    }
    __syncwarp();
    if (!exact && next.begin != list_.notes().attended.begin) rows_.prefetch(next);
  }

  const BlockView block_;
  const List list_;
  const Rows rows_;

  int stage_;       // the first stage of the current unit
  uint32_t phase_;  // of the barriers of its stages
  uint32_t tile_;   // the lane's tile of the current batch
  int next_lane_;   // tiles of this lane and later ones are still to be copied; a batch uses the last lanes
  int page_;        // the page id of the lane's tile of the next batch
  // The first unit of the next batch, and the end of the run it belongs to. Only valid while `copy` runs; the notes
  // keep them.
  int copy_unit_, copy_stop_;
};

}  // namespace turboquant::cuda::split_kv
