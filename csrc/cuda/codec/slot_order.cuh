// The order in which the bulk encoder stores the tokens of a large call: as they come if most of them follow one
// another in the cache, else by slot, so that the bytes of a value block are stored at about the same time. The device
// decides, so that nothing waits for it: two small kernels, and the encoder after them, look at the same sample of the
// slots.
#pragma once

#include "cuda/codec/bulk.cuh"
#include "cuda/common/device.cuh"

namespace turboquant::cuda {

constexpr int kOrderThreads = 256;  // of a block of these kernels
constexpr int kWarpSlots = 512;     // that a warp looks through

// Whether most tokens of a sample have the slot after that of the token before them. Padding counts as if it had. All
// threads of the block take part, kOrderThreads or more.
__device__ __forceinline__ bool slots_in_runs(const Slots& slots, int tokens) {
  bool breaks = false;
  if (threadIdx.x < kOrderThreads) {
    const int64_t at = int64_t{threadIdx.x} * (tokens - 1) / kOrderThreads;  // there are many tokens
    const int64_t next = slots[at + 1];
    breaks = next >= 0 && next != slots[at] + 1;
  }
  return __syncthreads_count(breaks) < kOrderThreads / 4;
}

// Writes down for each slot the token that has it. Nothing is cleared before: list_tokens_kernel tests what it finds.
__global__ void __launch_bounds__(kOrderThreads)
    mark_slots_kernel(const Slots slots, int tokens, const __grid_constant__ SlotOrder order) {
  let_next_kernel_begin();
  if (slots_in_runs(slots, tokens)) return;
  const int token = blockIdx.x * kOrderThreads + threadIdx.x;
  if (token == 0) *order.count = 0;
  if (token >= tokens) return;
  const int64_t slot = slots[token];
  if (slot >= 0 && slot < order.num_slots) order.token_of_slot[slot] = token;
}

// Lists the tokens that have a slot. The slots of a warp are in order; the warps come in any.
__global__ void __launch_bounds__(kOrderThreads)
    list_tokens_kernel(const Slots slots, int tokens, const __grid_constant__ SlotOrder order) {
  let_next_kernel_begin();
  const bool in_runs = slots_in_runs(slots, tokens);
  wait_for_previous_kernel();
  if (in_runs) return;
  const int lane = threadIdx.x % 32;
  const int64_t first = (int64_t{blockIdx.x} * kOrderThreads + threadIdx.x) / 32 * kWarpSlots + lane;
  int token[kWarpSlots / 32];
  uint32_t found[kWarpSlots / 32];  // of all lanes
  int total = 0;
#pragma unroll
  for (int i = 0; i < kWarpSlots / 32; ++i) {
    const int64_t slot = first + 32 * i;
    token[i] = slot < order.num_slots ? order.token_of_slot[slot] : -1;
  }
#pragma unroll
  for (int i = 0; i < kWarpSlots / 32; ++i) {
    const bool exists = token[i] >= 0 && token[i] < tokens && slots[token[i]] == first + 32 * i;
    found[i] = __ballot_sync(0xffffffff, exists);
    total += __popc(found[i]);
  }
  int at = 0;
  if (lane == 0 && total > 0) at = atomicAdd(order.count, total);
  at = __shfl_sync(0xffffffff, at, 0);
#pragma unroll
  for (int i = 0; i < kWarpSlots / 32; ++i) {
    if (found[i] >> lane & 1) {
      const int to = at + __popc(found[i] & ((1u << lane) - 1));
      order.tokens[to] = token[i], order.slots[to] = first + 32 * i;
    }
    at += __popc(found[i]);
  }
}

}  // namespace turboquant::cuda
