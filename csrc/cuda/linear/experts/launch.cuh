// The launch of the kernels of experts.
#pragma once

#include "cuda/common/device_facts.cuh"
#include "cuda/linear/experts/arrange.cuh"
#include "cuda/linear/experts/call.cuh"
#include "format.h"

namespace turboquant::cuda::linear::experts {

// A launch, with everything that follows from the call and the device: computed once, before memory is allocated.
class ExpertsLaunch {
 public:
  // The call, but for its arrangement, which lies in the work space. uniform: codes of 4 bits are evenly spaced.
  ExpertsLaunch(const Call& call, const format::WeightBlock& unit, bool uniform, const Device& device);

  int64_t workspace_bytes() const {
    return plan_.arranged > 0 ? 0 : arrangement_bytes(call_.pairs.count, most_pieces(), 1);
  }

  // workspace: aligned to 16 bytes.
  void run(void* workspace, cudaStream_t stream);

 private:
  int64_t most_pieces() const { return linear::most_pieces(call_.pairs, plan_.record.columns); }

  Call call_;
  const Device& device_;
  Plan plan_;
  const void* kernel_;
};

}  // namespace turboquant::cuda::linear::experts
