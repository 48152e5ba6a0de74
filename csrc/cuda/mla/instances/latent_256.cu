// nvcc: -fmad=true
#include "cuda/mla/instances.cuh"

template turboquant::cuda::mla::KernelEntry turboquant::cuda::mla::find_kernel<256>(turboquant::LatentKernel kernel,
                                                                                    int64_t rows);
