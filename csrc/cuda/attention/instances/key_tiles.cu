// nvcc: -fmad=true
// Compiled together, see split_kv_16_to_112.cu.
#include "cuda/attention/key_tiles_instances.cuh"

namespace turboquant::cuda::key_tiles {

template KernelEntry find_kernel<64, index_of_codes<kKeyCodes>(choices::kByte)>(int rows);
template KernelEntry find_kernel<64, index_of_codes<kKeyCodes>(choices::kUniform5)>(int rows);
template KernelEntry find_kernel<64, index_of_codes<kKeyCodes>(choices::kUniform4)>(int rows);
template KernelEntry find_kernel<64, index_of_codes<kKeyCodes>(choices::kLevels4)>(int rows);
template KernelEntry find_kernel<64, index_of_codes<kKeyCodes>(choices::kLevels3)>(int rows);
template KernelEntry find_kernel<64, index_of_codes<kKeyCodes>(choices::kLevels2)>(int rows);
template KernelEntry find_kernel<128, index_of_codes<kKeyCodes>(choices::kByte)>(int rows);
template KernelEntry find_kernel<128, index_of_codes<kKeyCodes>(choices::kUniform5)>(int rows);
template KernelEntry find_kernel<128, index_of_codes<kKeyCodes>(choices::kUniform4)>(int rows);
template KernelEntry find_kernel<128, index_of_codes<kKeyCodes>(choices::kLevels4)>(int rows);
template KernelEntry find_kernel<128, index_of_codes<kKeyCodes>(choices::kLevels3)>(int rows);
template KernelEntry find_kernel<128, index_of_codes<kKeyCodes>(choices::kLevels2)>(int rows);

}  // namespace turboquant::cuda::key_tiles
