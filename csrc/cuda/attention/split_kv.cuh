// The launch of the split-KV kernel (attention/split_kv/kernel.cuh), for calls that choose_attention gives to it.
#pragma once

#include "choices/device.h"
#include "cuda/attention/call.cuh"
#include "cuda/attention/split_kv/plan.cuh"
#include "cuda/common/device_facts.cuh"

namespace turboquant::cuda::split_kv {

// A compiled kernel.
struct KernelEntry {
  const void* kernel;
  const void* with_few_units;  // for calls that may have few units of keys; maybe the same kernel
  int rows;                    // of a block of rows
  int blocks;                  // of eight warps per multiprocessor, as many as its registers allow
  int small_blocks;            // of four warps per multiprocessor
  int operand_bytes;           // of the queries' operands
  int state_floats;            // of a warp's state
  CodeFacts codes;
};

// The kernel for codes kSplitKvPairs[pair] whose block has the fewest rows that are at least `rows`, or else the most.
// Defined in instances/split_kv_*.cu.
template <int D>
KernelEntry find_kernel(int pair, int rows);

// What was launched immediately before the kernel. kOwnStore: the store of the call's own tokens, which writes nothing
// but pages and tail, and which waited for everything before it.
enum class Before { kAnything, kOwnStore };

// Refuses a call with more work than the kernels that share its list of units can count, or pages that they cannot
// address. blocks_of_rows: of a sequence, at most.
void check_limits(const Attention& call, const StageLayout& layout, int64_t blocks_of_rows);

// A launch, with everything that follows from the call and the device: computed once, before memory is allocated.
class SplitKvLaunch {
 public:
  // pair: the choice's. The call stays alive until `run` returns.
  SplitKvLaunch(const Attention& call, const Device& device, int pair);

  // Bytes of memory for partial results; their contents do not matter.
  int64_t workspace_bytes() const { return int64_t{grid_} * part_floats_of_block() * 4; }
  int num_counters() const { return grid_; }

  // workspace: aligned to 16 bytes. counters: see counters.cuh.
  void run(void* workspace, uint32_t* counters, cudaStream_t stream, Before before, Overlap overlap);

 private:
  int64_t part_floats_of_block() const { return int64_t{2} * entry_.rows * part_floats(call_.record.head_dim); }
  const void* kernel() const { return plan_.few.tokens > 0 ? entry_.with_few_units : entry_.kernel; }
  void choose_shape();

  const Attention& call_;
  const Device& device_;
  KernelEntry entry_;
  StageLayout layout_;
  SplitKvPlan plan_;
  int grid_;
};

}  // namespace turboquant::cuda::split_kv
