// The row-tile kernel: attention of many query rows over packed pages and exact keys, for devices with products of
// warpgroups (compute capability 9.0): speculative decoding, wide groups, chunks of prompts, whole prompts.
//
// A block has one or two warpgroups that multiply 64 rows each (consumer.cuh), and one or two that prepare keys and
// values for them (producer.cuh), both as tiles in shared memory: float16 from codes, expanded once for all rows, or
// exact ones of the type of the queries. Every packed byte is read from memory once for each tile of rows.
//
// Blocks take items of work from a list that each of them derives from the lengths (work.cuh): a tile of rows and all
// keys that it sees, or a part of them, so that a launch needs no length on the host. Parts are joined by the block
// that finishes last, in their order: results are the same in every run.
#pragma once

#include "cuda/attention/padding.cuh"
#include "cuda/attention/row_tiles/consumer.cuh"
#include "cuda/attention/row_tiles/producer.cuh"

namespace turboquant::cuda::row_tiles {

template <class S, typename T>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks)
    row_tiles_kernel(const __grid_constant__ Attention a, const __grid_constant__ Plan plan) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t shared[];
  Notes& notes = *reinterpret_cast<Notes*>(shared + plan.notes);
  plan.overlap.enter();
  if (threadIdx.x == 0) {
    for (int i = 0; i < plan.raw_stages; ++i) {
      init_barrier(&notes.raw_full[i], 1), init_barrier(&notes.raw_empty[i], 2);
    }
    for (int i = 0; i < kMaxTileStages; ++i) {
      init_barrier(&notes.key_full[i], S::kStreamWarps), init_barrier(&notes.value_full[i], S::kStreamWarps);
      init_barrier(&notes.key_empty[i], 4 * S::kGroups), init_barrier(&notes.value_empty[i], 4 * S::kGroups);
    }
    for (int i = 0; i < kItems; ++i) {
      init_barrier(&notes.item_full[i], 1), init_barrier(&notes.item_empty[i], 2 * S::kStreamWarps + 4 * S::kGroups);
    }
    for (uint32_t& word : notes.broken) word = 0;
    barriers_ready();
  }
  plan.overlap.begin();
  const GatheredRows gathered = GatheredRows::find<S>(a, plan);
  const bool works = a.seqs > 0 && (!plan.prompts_apart || any_work<S>(a, plan, gathered));
  if (plan.clears) {
    clear_padding<uint32_t>(a, a.record.head_dim / 2, int64_t{blockIdx.x} * blockDim.x + threadIdx.x,
                            int64_t{gridDim.x} * blockDim.x);
  }
  if (!works) return plan.overlap.leave();
  if (threadIdx.x < 16) {
    notes.key_table[threadIdx.x] = nibble_table_byte(a.key_levels, a.record.key_width(), threadIdx.x);
    notes.value_table[threadIdx.x] = nibble_table_byte(a.value_levels, a.record.value_width(), threadIdx.x);
  }
  copy_signs<S>(a, plan, shared);
  __syncthreads();
  if (threadIdx.x < S::kProducers) {
    leave_registers<S::kProducerRegisters>();
    if (threadIdx.x < S::kProducers / 2) {
      Producer<S, false>(a, plan, shared).run(gathered);
    } else {
      Producer<S, true>(a, plan, shared).run(gathered);
    }
  } else {
    take_registers<S::kConsumerRegisters>();
    Consumer<S, T>(a, plan, shared).run();
  }
  plan.overlap.leave();
#endif
}

}  // namespace turboquant::cuda::row_tiles
