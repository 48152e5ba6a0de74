// The launch of the kernel in score/dense_sketch.cu, which qjl_sketch (qjl.cu) takes where choose_sketch says
// kDenseTiles.
#pragma once

#include "choices/device.h"
#include "cuda/common/device.cuh"
#include "format.h"

namespace turboquant::cuda {

// x: rows of d elements, a multiple of 8, that start at multiples of 16 bytes; projection: float32 [m, d], aligned to
// 16 bytes -> bits: uint8 [rows, m / 8], norms: float32 [rows]. device: its index
void launch_dense_sketch(const void* x, const Rows& rows, Dtype dtype, format::Split split, const float* projection,
                         int m, uint8_t* bits, float* norms, const DeviceFacts& facts, int device, cudaStream_t stream);

}  // namespace turboquant::cuda
