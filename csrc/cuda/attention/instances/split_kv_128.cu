// nvcc: -fmad=true
// A head_dim of its own: it has the most kernels, and takes the longest to compile.
#include "cuda/attention/split_kv_instances.cuh"

namespace turboquant::cuda::split_kv {

template KernelEntry find_kernel<128>(int pair, int rows);

}  // namespace turboquant::cuda::split_kv
