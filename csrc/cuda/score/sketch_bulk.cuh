// The launch of the kernel in score/sketch_bulk.cu, which qjl_sketch (qjl.cu) takes where choose_sketch says kBulk.
#pragma once

#include "choices/device.h"
#include "cuda/common/device.cuh"
#include "format.h"

namespace turboquant::cuda {

// x: rows of d = 64, 128 or 256 elements of a 16-bit dtype that start at multiples of 16 bytes; signs: float32 [d],
// aligned to 16 bytes -> bits: uint8 [rows, d / 8], norms: float32 [rows]
void launch_sketch_bulk(const void* x, const Rows& rows, Dtype dtype, format::Split split, const float* signs,
                        uint8_t* bits, float* norms, const DeviceFacts& device, cudaStream_t stream);

}  // namespace turboquant::cuda
