// Attention of any number of queries, any d and any bits (attention/general.cu).
#pragma once

#include "cuda/attention/call.cuh"

namespace turboquant::cuda {

// Fills in out and lse of every token of the call, also of those that belong to no sequence.
void attend_general(const Attention& a, int device, cudaStream_t stream);

}  // namespace turboquant::cuda
