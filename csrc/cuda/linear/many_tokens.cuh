// linear_packed by products of matrices. Host only.
#pragma once

#include <cuda_runtime.h>

#include "calls/linear.h"

namespace turboquant::cuda::linear {

// y [..., n] is contiguous; its device is current.
void multiply_decoded(const LinearCall& c, const WeightShape& shape, const Tensor& y, cudaStream_t stream);

}  // namespace turboquant::cuda::linear
