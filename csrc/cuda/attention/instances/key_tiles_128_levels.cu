// nvcc: -fmad=true
// Keys of tables of levels.
#include "cuda/attention/key_tiles_instances.cuh"

namespace turboquant::cuda::key_tiles {

template KernelEntry find_kernel<128, index_of_codes<kKeyCodes>(choices::kLevels4)>(int rows);
template KernelEntry find_kernel<128, index_of_codes<kKeyCodes>(choices::kLevels3)>(int rows);
template KernelEntry find_kernel<128, index_of_codes<kKeyCodes>(choices::kLevels2)>(int rows);

}  // namespace turboquant::cuda::key_tiles
