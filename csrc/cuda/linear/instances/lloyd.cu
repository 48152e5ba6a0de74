#include "cuda/linear/instances.cuh"

template turboquant::cuda::linear::KernelEntry
turboquant::cuda::linear::find_kernel<turboquant::cuda::linear::Codes::kLloyd>(bool sub, int columns);
