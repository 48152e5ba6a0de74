// The launch of the kernel of tiles.
#pragma once

#include "cuda/common/device_facts.cuh"
#include "cuda/linear/tiles/call.cuh"

namespace turboquant::cuda::linear::tiles {

// A launch, with everything that follows from the call and the device: computed once, before memory is allocated.
class TilesLaunch {
 public:
  // The device has products of warpgroups. The arrangement of pairs lies in the work space.
  TilesLaunch(const Call& call, const Device& device);

  // Bytes of memory, for activations above all; their contents do not matter.
  int64_t workspace_bytes() const;

  // workspace: aligned to 16 bytes.
  void run(void* workspace, cudaStream_t stream);

 private:
  int64_t order_bytes() const;
  int64_t operand_bytes() const;
  int64_t factor_bytes() const;
  int64_t partial_bytes() const;
  int num_counters() const;

  Call call_;
  const Device& device_;
  Plan plan_;
};

}  // namespace turboquant::cuda::linear::tiles
