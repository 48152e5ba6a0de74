// What sketch_tiles.cu does for qjl_sketch (qjl.cu).
#pragma once

#include "codec.cuh"

namespace turboquant::cuda {

// Structured sketches of many vectors, rows of `bits` and `norms` as in qjl_sketch. False where there are too few, or no kernel
// for them.
bool launch_sketch_tiles(const AlignedRows& in, ScalarType dtype, format::Split split, const Constant& signs,
                         uint8_t* bits, float* norms, cudaStream_t stream);

}  // namespace turboquant::cuda
