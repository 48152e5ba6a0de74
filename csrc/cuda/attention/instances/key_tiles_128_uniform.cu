// nvcc: -fmad=true
// Keys of uniform grids.
#include "cuda/attention/key_tiles_instances.cuh"

namespace turboquant::cuda::key_tiles {

template KernelEntry find_kernel<128, 0>(int rows);
template KernelEntry find_kernel<128, 1>(int rows);
template KernelEntry find_kernel<128, 2>(int rows);

}  // namespace turboquant::cuda::key_tiles
