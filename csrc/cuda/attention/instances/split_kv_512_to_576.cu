// nvcc: -fmad=true
// Compiled together, see split_kv_16_to_112.cu.
#include "cuda/attention/split_kv_instances.cuh"

namespace turboquant::cuda::split_kv {

template KernelEntry find_kernel<512>(int pair, int rows);
template KernelEntry find_kernel<576>(int pair, int rows);

}  // namespace turboquant::cuda::split_kv
