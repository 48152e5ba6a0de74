// nvcc: -fmad=true
// Compiled together, see split_kv_16_to_112.cu.
#include "cuda/attention/row_tiles_instances.cuh"

namespace turboquant::cuda::row_tiles {

template KernelEntry find_kernel<64>(int groups, Dtype type);
template KernelEntry find_kernel<128>(int groups, Dtype type);
template KernelEntry find_kernel<192>(int groups, Dtype type);
template KernelEntry find_kernel<256>(int groups, Dtype type);

}  // namespace turboquant::cuda::row_tiles
