// nvcc: -fmad=true
#include "cuda/attention/key_tiles_instances.cuh"

template turboquant::cuda::key_tiles::KernelEntry turboquant::cuda::key_tiles::find_kernel<128>(int rows);
