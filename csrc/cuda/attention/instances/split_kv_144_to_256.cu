// nvcc: -fmad=true
// Compiled together, see split_kv_16_to_112.cu.
#include "cuda/attention/split_kv_instances.cuh"

namespace turboquant::cuda::split_kv {

template KernelEntry find_kernel<144>(int pair, int rows);
template KernelEntry find_kernel<160>(int pair, int rows);
template KernelEntry find_kernel<192>(int pair, int rows);
template KernelEntry find_kernel<224>(int pair, int rows);
template KernelEntry find_kernel<256>(int pair, int rows);

}  // namespace turboquant::cuda::split_kv
