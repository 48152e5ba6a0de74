// nvcc: -fmad=true
// All latents are compiled together: what their code has in common is compressed once.
#include "cuda/mla/instances.cuh"

namespace turboquant::cuda::mla {

template KernelEntry find_kernel<128>(LatentKernel kernel, int64_t rows);
template KernelEntry find_kernel<256>(LatentKernel kernel, int64_t rows);
template KernelEntry find_kernel<512>(LatentKernel kernel, int64_t rows);

}  // namespace turboquant::cuda::mla
