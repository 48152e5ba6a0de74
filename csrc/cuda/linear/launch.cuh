// The launch of the kernel of few columns.
#pragma once

#include "cuda/common/device_facts.cuh"
#include "cuda/linear/call.cuh"

namespace turboquant::cuda::linear {

// Compiled kernels of one kind of codes.
struct KernelEntry {
  const void* kernel;    // of products
  const void* quantise;  // of activations
};

// The kernel for blocks of up to `columns` columns, on devices with or without products of warpgroups. Defined in
// instances/codes.cu.
template <Codes CODES>
KernelEntry find_kernel(bool sub, int columns, bool warpgroup_products);

// A launch, with everything that follows from the call and the device: computed once, before memory is allocated.
class LinearLaunch {
 public:
  // The call stays alive until `run` returns.
  LinearLaunch(const Call& call, const format::WeightBlock& unit, bool uniform, const Device& device);

  // Bytes of memory for partial results and activations; their contents do not matter.
  int64_t workspace_bytes() const { return record_bytes() + partial_bytes() + 4 * num_counters(); }

  // workspace: aligned to 16 bytes.
  void run(void* workspace, cudaStream_t stream);

 private:
  int column_blocks() const;
  int64_t record_bytes() const;
  int64_t partial_bytes() const;
  int64_t num_counters() const;

  const Call& call_;
  const Device& device_;
  Plan plan_;
  KernelEntry entry_;
  bool quantises_first_;  // a kernel of its own does
};

}  // namespace turboquant::cuda::linear
