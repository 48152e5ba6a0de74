// All codes are compiled together: what their code has in common is compressed once.
#include "cuda/linear/instances.cuh"

namespace turboquant::cuda::linear {

template KernelEntry find_kernel<Codes::kLloyd>(bool sub, int columns, bool warpgroup_products);
template KernelEntry find_kernel<Codes::kUniform>(bool sub, int columns, bool warpgroup_products);
template KernelEntry find_kernel<Codes::kBytes>(bool sub, int columns, bool warpgroup_products);

}  // namespace turboquant::cuda::linear
