// Attention of any number of queries, any head_dim and any widths (attention/general.cu).
#pragma once

#include "choices/device.h"
#include "cuda/attention/call.cuh"

namespace turboquant::cuda {

// Writes out and lse of every token of the call, those that belong to no sequence included.
void attend_general(const Attention& a, const DeviceFacts& device, cudaStream_t stream);

}  // namespace turboquant::cuda
