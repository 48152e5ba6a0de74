// Attention of any number of queries, any d and any bits (prefill.cu).
#pragma once

#include "attention.cuh"

namespace turboquant::cuda {

// Fills in out and lse of every token of the call, also of those that belong to no sequence.
void prefill(const Attention& a, const Launch& launch, int device);

}  // namespace turboquant::cuda
