// What a kernel needs to copy boxes of a tensor (common/boxes.cuh). Host code.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <array>
#include <cstdint>

#include "dtype.h"

namespace turboquant::cuda {

// Describes boxes of a tensor of a 16-bit type [z, y, x], contiguous in x, which are copied with the 128-byte swizzle;
// sizes and boxes in the order x, y, z; strides in elements, of y and of z. False: the driver cannot, for instance
// because a stride is 0. cuTensorMapEncodeTiled is the driver's, which the library is not linked with.
inline bool map_boxes(const void* data, Dtype dtype, std::array<int64_t, 3> sizes, std::array<int64_t, 2> strides,
                      std::array<int, 3> box, CUtensorMap& to) {
  static const auto encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess
               ? reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry)
               : nullptr;
  }();
  if (!encode || strides[0] <= 0 || strides[1] <= 0) return false;
  const cuuint64_t size[3] = {static_cast<cuuint64_t>(sizes[0]), static_cast<cuuint64_t>(sizes[1]),
                              static_cast<cuuint64_t>(sizes[2])};
  const cuuint64_t bytes[2] = {static_cast<cuuint64_t>(strides[0]) * 2, static_cast<cuuint64_t>(strides[1]) * 2};
  const cuuint32_t elements[3] = {static_cast<cuuint32_t>(box[0]), static_cast<cuuint32_t>(box[1]),
                                  static_cast<cuuint32_t>(box[2])};
  const cuuint32_t steps[3] = {1, 1, 1};
  const auto type = dtype == Dtype::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return encode(&to, type, 3, const_cast<void*>(data), size, bytes, elements, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace turboquant::cuda
