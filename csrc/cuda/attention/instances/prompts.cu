// nvcc: -fmad=true
// Compiled together, see split_kv_16_to_112.cu.
#include "cuda/attention/row_tiles_instances.cuh"

namespace turboquant::cuda::row_tiles {

template KernelEntry find_prompts_kernel<64>(int groups, Dtype type, bool gathered);
template KernelEntry find_prompts_kernel<128>(int groups, Dtype type, bool gathered);
template KernelEntry find_prompts_kernel<192>(int groups, Dtype type, bool gathered);
template KernelEntry find_prompts_kernel<256>(int groups, Dtype type, bool gathered);

}  // namespace turboquant::cuda::row_tiles
