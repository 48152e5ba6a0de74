// Attention of any number of queries, any head_dim and any widths (attention/general.cu).
#pragma once

#include "choices/device.h"
#include "cuda/attention/general/work_item.cuh"

namespace turboquant::cuda {

// One launch, which writes out and lse of every token of the call, those that belong to no sequence included.
class GeneralLaunch {
 public:
  // An error where the device has too little shared memory, before anything is launched.
  GeneralLaunch(const Attention& a, const DeviceFacts& device);
  void run(cudaStream_t stream) const;

 private:
  template <typename S>
  bool choose(const Attention& a, int most_shared);
  template <bool HOPPER>
  bool choose_large(const Attention& a, int most_shared);
  bool choose_small(const Attention& a, int most_shared);

  general::Arguments arguments_;
  void (*kernel_)(general::Arguments) = nullptr;
  unsigned blocks_ = 0;
  int threads_ = 0, bytes_ = 0;
};

}  // namespace turboquant::cuda
