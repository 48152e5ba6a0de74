// nvcc: -fmad=true
#include "cuda/attention/row_tiles_instances.cuh"

template turboquant::cuda::row_tiles::KernelEntry turboquant::cuda::row_tiles::find_chunks_kernel<192>(
    turboquant::Dtype type);
