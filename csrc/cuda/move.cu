// cache_move: copies the codes and scales of tokens from slot to slot.
//
// One launch gathers all tokens and another one scatters them, so that a slot may be a source and a target.
#include "calls/move.h"

#include <algorithm>

#include "cuda/codec/arguments.cuh"
#include "cuda/codec/record.cuh"
#include "cuda/common/device_facts.cuh"
#include "cuda/common/torch.cuh"

namespace turboquant::cuda {
namespace {

struct MoveArguments {
  Pages pages;
  RecordLayout layout;
  Slots sources, targets;  // [kv_heads, count]
  int64_t count;           // tokens of a head
  int pairs;               // of slots, that a warp takes
  int token_words;
  uint32_t* moved;  // [kv_heads, count, token_words]: row and plane of the key, fragments of the value, both scales
};

constexpr int kWarps = 8;  // of a block

// A warp takes as few pairs as occupy the device, and at most kMostPairs. Where only some of many tokens move, most
// warps find that out and end.
constexpr int kMostPairs = 16;
constexpr int kOccupying = 32;  // warps that occupy a multiprocessor

// Puts a token's row of fragments into its value block, byte by byte: other tokens own the rest of each word.
__device__ __forceinline__ void put_fragments(const uint32_t* row, const Token& to, const RecordLayout& r, int lane) {
  const ValueLayout values{r.head_dim, r.value_width()};
  uint8_t* block = to.value_block(r);
  for (int f = lane; f < values.fragments(); f += 32) {
    const ValueLayout::FragmentPlace place = values.place(f);
    uint8_t* out = block + place.at + value_q(to.number) * place.q_step + value_b(to.number);
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i * place.step] = static_cast<uint8_t>(row[f] >> 8 * i);
  }
}
__device__ __forceinline__ void put_words(const uint32_t* from, void* to, int bytes, int lane) {
  for (int w = lane; w < bytes / 4; w += 32) static_cast<uint32_t*>(to)[w] = from[w];
}

// A warp copies a token of one head between its record and its row of `moved`.
template <bool SCATTER>
__device__ __forceinline__ void move_token(const MoveArguments& m, int64_t number, int lane) {
  const int head = static_cast<int>(number / m.count);
  const RecordLayout& r = m.layout;
  const Token from = m.pages.token(m.sources[number], head, r), to = m.pages.token(m.targets[number], head, r);
  if (!from.tile || !to.tile) return;
  uint32_t* row = m.moved + number * m.token_words;
  uint32_t* value = row + (r.key_row_bytes + r.key_plane_bytes) / 4;
  uint16_t* scales = reinterpret_cast<uint16_t*>(row + m.token_words - 1);
  if constexpr (SCATTER) {
    put_words(row, to.key_row(r), r.key_row_bytes, lane);
    put_words(row + r.key_row_bytes / 4, to.key_plane(r), r.key_plane_bytes, lane);
    put_fragments(value, to, r, lane);
    if (lane < 2) *(lane ? to.value_scale(r) : to.key_scale(r)) = scales[lane];
  } else {
    load_key(row, from, r, lane, 32);
    load_value(value, from, r, lane, 32);
    if (lane < 2) scales[lane] = *(lane ? from.value_scale(r) : from.key_scale(r));
  }
}

// A warp takes some pairs, one after the other, and leaves out those with a -1.
template <bool SCATTER>
__global__ void __launch_bounds__(32 * kWarps) move_kernel(const __grid_constant__ MoveArguments m) {
  const int lane = threadIdx.x % 32;
  const int64_t first = (int64_t{blockIdx.x} * kWarps + threadIdx.x / 32) * m.pairs, number = first + lane;
  const bool mine = lane < m.pairs && number < m.pages.kv_heads * m.count;
  const bool moves = mine && m.sources[number] >= 0 && m.targets[number] >= 0;
  for (unsigned rest = __ballot_sync(0xffffffff, moves); rest; rest &= rest - 1) {
    move_token<SCATTER>(m, first + __ffs(static_cast<int>(rest)) - 1, lane);
  }
}

void cache_move(const MoveCall& c) {
  const format::Record record = check_move(c);
  const Pages pages = pages_of(c.cache, c.kv_heads());
  const int64_t tokens = c.kv_heads() * c.count();
  if (tokens == 0 || c.cache.numel() == 0) return;
  const Launch launch(c.cache);
  const Tensor moved = new_moved_tokens(c, record.token_bytes());
  const int64_t warps = int64_t{kOccupying} * current_device().facts.multiprocessors;
  const int pairs = static_cast<int>(std::clamp<int64_t>(tokens / warps, 1, kMostPairs));
  const MoveArguments m{.pages = pages,
                        .layout = RecordLayout(record),
                        .sources = slots_of(c.sources),
                        .targets = slots_of(c.targets),
                        .count = c.count(),
                        .pairs = pairs,
                        .token_words = record.token_bytes() / 4,
                        .moved = static_cast<uint32_t*>(moved.data_ptr())};
  const unsigned blocks = num_blocks(tokens, kWarps * pairs);
  move_kernel<false><<<blocks, 32 * kWarps, 0, launch.stream()>>>(m);
  move_kernel<true><<<blocks, 32 * kWarps, 0, launch.stream()>>>(m);
  launch.check("cache_move");
}

}  // namespace
}  // namespace turboquant::cuda

STABLE_TORCH_LIBRARY_IMPL(turboquant, CUDA, m) {
  using namespace turboquant;
  m.impl("cache_move", boxed<&turboquant::cuda::cache_move>);
}
