// nvcc: -fmad=true
// Compiled together, see split_kv_16_to_112.cu.
#include "cuda/attention/row_tiles_instances.cuh"

namespace turboquant::cuda::row_tiles {

template KernelEntry find_chunks_kernel<64>(Dtype type);
template KernelEntry find_chunks_kernel<128>(Dtype type);
template KernelEntry find_chunks_kernel<192>(Dtype type);
template KernelEntry find_chunks_kernel<256>(Dtype type);

}  // namespace turboquant::cuda::row_tiles
