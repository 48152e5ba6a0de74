// The ring of units in shared memory: two tiles of 32 tokens each. The value warpgroups, which read a unit last, copy
// the unit that takes its place. A tile keeps the order of its sections, but the 16-byte words of a row change places,
// so that eight tokens' words for one ldmatrix stand in different banks.
#pragma once

#include "cuda/common/async_copy.cuh"
#include "cuda/mla/shape.cuh"

namespace turboquant::cuda::mla {

// Where word `chunk` of a token's row stands: among words of codes, and among words of rotary channels (rope_words of
// them in a row, 8 or 4).
__device__ __forceinline__ int code_word(int token, int chunk) { return (chunk ^ (token & 7)) * 16; }
__device__ __forceinline__ int rope_word(int token, int chunk, int rope_words) {
  return (chunk ^ ((rope_words == 8 ? token : token >> 1) & (rope_words - 1))) * 16;
}

// The stage and the buffer of weights of a unit, and the phases of their barriers. Both warpgroups count units alike.
struct Turn {
  int stage = 0;
  uint32_t phase = 0, count = 0;

  __device__ __forceinline__ void next(int stages) {
    ++count;
    if (++stage == stages) stage = 0, phase ^= 1;
  }
  __device__ __forceinline__ int buffer() const { return count % kWeightBuffers; }
  __device__ __forceinline__ uint32_t buffer_phase() const { return count / kWeightBuffers & 1; }
};

template <class S>
class Ring {
 public:
  explicit __device__ __forceinline__ Ring(const BlockView& block)
      : block_(block), thread_((threadIdx.x - kWarpgroup) % kWarpgroup),
        group_((threadIdx.x - kWarpgroup) / kWarpgroup) {}

  // Starts to copy the first of a segment's `units` units, whose first token is `token`.
  __device__ __forceinline__ void begin(const Segment& segment, int token, int units, int stage) {
    const Attention& a = block_.call.a;
    token_ = token, units_ = 0;
    end_ = a.new_begin(segment.work.length, segment.work.queries);
    table_ = a.block_table + segment.sequence * a.table_stride;
    pages_ = read_pages(0), next_pages_ = read_pages(1);
    for (int i = 0; i < min(units, block_.plan.stages); ++i) {
      copy(stage);
      if (++stage == block_.plan.stages) stage = 0;
    }
  }

  // Starts to copy the segment's next unit. All value threads call it, after every thread of the block has read what
  // the stage held.
  __device__ __forceinline__ void copy(int stage) {
    constexpr int kOwn = kUnitTiles / S::kValueGroups;  // tiles of a warpgroup
    const int in_batch = units_ % (32 / kUnitTiles);
    if (units_ > 0 && in_batch == 0) pages_ = next_pages_, next_pages_ = read_pages(units_ / (32 / kUnitTiles) + 1);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int tile = group_ * kOwn + i, n = in_batch * kUnitTiles + tile;
      const int page = __shfl_sync(0xffffffff, pages_, n);
      const int token = token_ + units_ * kUnitTokens + tile * kTileTokens;
      const Attention& a = block_.call.a;
      const format::LatentRecord& r = block_.call.record;
      if (static_cast<unsigned>(page) < static_cast<unsigned>(a.num_pages)) {
        copy_tile(block_.shared + stage * block_.plan.unit_bytes + tile * block_.plan.tile_bytes,
                  a.pages + int64_t{page} * a.page_stride + r.tile_of(token & (r.page_size - 1)));
      }
    }
    ++units_;
    arrive_with_copies(block_.arrived(stage));
  }

 private:
  // The page ids of 32 tiles, one for each lane; -1: the tile has no tokens. They are read long before their use.
  __device__ __forceinline__ int read_pages(int batch) const {
    const int token = token_ + (batch * 32 + block_.lane) * kTileTokens;
    const int shift = 31 - __clz(block_.call.record.page_size);
    return token < end_ ? __ldcg(table_ + (token >> shift)) : -1;
  }

  __device__ __forceinline__ void copy_tile(uint8_t* to, const uint8_t* from) const {
    const int row_bytes = block_.call.record.row_bytes(), plane_bytes = block_.call.record.plane_bytes();
    const int chunk_shift = 27 - __clz(row_bytes);  // 16 bytes each
#pragma unroll 4
    for (int i = thread_; i < kTileTokens * row_bytes / 16; i += kWarpgroup) {
      const int token = i >> chunk_shift, chunk = i & (row_bytes / 16 - 1);
      copy_async(to + token * row_bytes + code_word(token, chunk), from + 16 * i);
    }
    const int planes = block_.plan.planes, ropes = block_.plan.ropes, scales = block_.plan.scales;
    if (thread_ < plane_bytes * kTileTokens / 16) copy_async(to + planes + 16 * thread_, from + planes + 16 * thread_);
    const int rope_words = block_.call.record.rope_dim / 8, rope_shift = rope_words == 8 ? 3 : 2;
    for (int i = thread_; i < kTileTokens * rope_words; i += kWarpgroup) {
      const int token = i >> rope_shift, word = i & (rope_words - 1);
      copy_async(to + ropes + token * rope_words * 16 + rope_word(token, word, rope_words), from + ropes + 16 * i);
    }
    if (thread_ < 2 * kTileTokens / 16) copy_async(to + scales + 16 * thread_, from + scales + 16 * thread_);
  }

  const BlockView block_;
  const int thread_, group_;
  const int32_t* table_;
  int token_, end_, units_;  // the segment's first token and the end of its codes; units that were copied
  int pages_, next_pages_;   // of the lane's tile in this batch of 32 tiles, and in the next
};

}  // namespace turboquant::cuda::mla
