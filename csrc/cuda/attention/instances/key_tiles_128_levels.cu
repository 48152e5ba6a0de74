// nvcc: -fmad=true
// Keys of tables of levels.
#include "cuda/attention/key_tiles_instances.cuh"

namespace turboquant::cuda::key_tiles {

template KernelEntry find_kernel<128, 3>(int rows);
template KernelEntry find_kernel<128, 4>(int rows);
template KernelEntry find_kernel<128, 5>(int rows);

}  // namespace turboquant::cuda::key_tiles
