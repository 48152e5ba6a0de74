// The kernel that puts pairs into the order of their experts.
#pragma once

#include "cuda/common/device_facts.cuh"
#include "cuda/linear/pieces.cuh"

namespace turboquant::cuda::linear {

// Arranges pairs in pieces of up to `columns`.
void arrange(const Pairs& pairs, const Arrangement& to, int columns, const Device& device, cudaStream_t stream);

}  // namespace turboquant::cuda::linear
