// What score/sketch_bulk.cu does for qjl_sketch (qjl.cu).
#pragma once

#include "cuda/common/device.cuh"
#include "format.h"

namespace turboquant::cuda {

// Structured sketches of many vectors, rows of `bits` and `norms` as in qjl_sketch. False where there are too few, or no kernel
// for them.
// x: rows that start at multiples of 16 bytes; signs: float32 [d], aligned to 16 bytes.
bool launch_sketch_bulk(const void* x, const Rows& rows, Dtype dtype, format::Split split, const float* signs,
                        uint8_t* bits, float* norms, cudaStream_t stream);

}  // namespace turboquant::cuda
