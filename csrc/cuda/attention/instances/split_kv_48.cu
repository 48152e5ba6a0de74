// nvcc: -fmad=true
#include "cuda/attention/split_kv_instances.cuh"

template turboquant::cuda::split_kv::KernelEntry turboquant::cuda::split_kv::find_kernel<48>(int pair, int rows);
