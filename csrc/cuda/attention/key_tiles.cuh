// The launch of the key-tile kernel (attention/key_tiles/kernel.cuh), for calls that choose_attention gives to it.
#pragma once

#include "choices/device.h"
#include "cuda/attention/call.cuh"
#include "cuda/attention/key_tiles/shape.cuh"
#include "cuda/common/device_facts.cuh"

namespace turboquant::cuda::key_tiles {

// A compiled kernel.
struct KernelEntry {
  const void* kernel;
  int rows, blocks;  // of a block; blocks per multiprocessor
  int query_bytes, weight_bytes;
  CodeOrder order;             // of keys
  float key_step, key_offset;  // level = step * byte - offset
};

// The kernel whose block has at least `rows` rows, up to 32. KEYS: an index of kKeyCodes (expansion.cuh). Defined in
// instances/key_tiles.cu.
template <int D, int KEYS>
KernelEntry find_kernel(int rows);

// A launch, with everything that follows from the call and the device: computed once, before memory is allocated.
class KeyTilesLaunch {
 public:
  // pair: the choice's. least_queries: sequences with fewer queries are another kernel's, which also clears the results
  // of tokens behind the last sequence; 0: there is no other kernel. The call stays alive until `run` returns.
  KeyTilesLaunch(const Attention& call, const Device& device, int pair, int least_queries);

  // Bytes of memory for partial results; their contents do not matter.
  int64_t workspace_bytes() const {
    return int64_t{2} * grid_ * entry_.rows * split_kv::part_floats(call_.record.head_dim) * 4;
  }
  int num_counters() const { return grid_; }

  // workspace: aligned to 16 bytes. counters: see counters.cuh.
  void run(void* workspace, uint32_t* counters, cudaStream_t stream, Overlap overlap);

 private:
  void lay_out(int shared_limit);

  Attention call_;
  const Device& device_;
  KernelEntry entry_;
  StageLayout layout_;
  Plan plan_{};
  int grid_;
};

}  // namespace turboquant::cuda::key_tiles
