// nvcc: -fmad=true
// Neighbouring head_dims are compiled together: what their code has in common is compressed once.
#include "cuda/attention/split_kv_instances.cuh"

namespace turboquant::cuda::split_kv {

template KernelEntry find_kernel<16>(int pair, int rows);
template KernelEntry find_kernel<32>(int pair, int rows);
template KernelEntry find_kernel<48>(int pair, int rows);
template KernelEntry find_kernel<64>(int pair, int rows);
template KernelEntry find_kernel<80>(int pair, int rows);
template KernelEntry find_kernel<96>(int pair, int rows);
template KernelEntry find_kernel<112>(int pair, int rows);

}  // namespace turboquant::cuda::split_kv
