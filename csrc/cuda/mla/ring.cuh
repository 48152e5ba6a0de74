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
        const uint32_t to =
            shared_address(block_.shared) + stage * block_.plan.unit_bytes + tile * block_.plan.tile_bytes;
        const uint8_t* from = a.pages + int64_t{page} * a.page_stride + r.tile_of(token & (r.page_size - 1));
        with_codes<S::kLatent>(block_.plan.kind, [&](auto codes) { copy_tile<decltype(codes)>(to, from); });
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

  // One tile, by a warpgroup. A pass of all threads copies whole rows, and the places of a thread's words in later
  // passes are known before: so a word costs one instruction.
  template <class C>
  __device__ __forceinline__ void copy_tile(uint32_t to, const uint8_t* from) const {
    constexpr int kTokens = kWarpgroup / C::kChunks;  // of a pass
    const int token = thread_ / C::kChunks;
    const uint32_t row = to + token * C::kRowBytes + code_word(token, thread_ % C::kChunks);
    from += 16 * thread_;
#pragma unroll
    for (int i = 0; i < kTileTokens / kTokens; ++i) {
      copy_async((row ^ code_word(i * kTokens, 0)) + i * kTokens * C::kRowBytes, from + i * kPassBytes);
    }
    const Plan& plan = block_.plan;
    const uint32_t word = to + 16 * thread_;
    if (thread_ < C::kPlaneBytes * kTileTokens / 16) copy_async(word + plan.planes, from + plan.planes);
    if (thread_ < 2 * kTileTokens / 16) copy_async(word + plan.scales, from + plan.scales);
    copy_ropes(to + plan.ropes, from + plan.ropes);
  }
  __device__ __forceinline__ void copy_ropes(uint32_t to, const uint8_t* from) const {
    const int rope_dim = block_.call.record.rope_dim;
    if (rope_dim == 64) {
      const uint32_t row = to + thread_ / 8 * 128 + rope_word(thread_ / 8, thread_ % 8, 8);
      copy_async(row, from), copy_async(row + kPassBytes, from + kPassBytes);
    } else if (rope_dim == 32) {
      copy_async(to + thread_ / 4 * 64 + rope_word(thread_ / 4, thread_ % 4, 4), from);
    }
  }

  static constexpr int kPassBytes = 16 * kWarpgroup;
  const BlockView block_;
  const int thread_, group_;
  const int32_t* table_;
  int token_, end_, units_;  // the segment's first token and the end of its codes; units that were copied
  int pages_, next_pages_;   // of the lane's tile in this batch of 32 tiles, and in the next
};

}  // namespace turboquant::cuda::mla
