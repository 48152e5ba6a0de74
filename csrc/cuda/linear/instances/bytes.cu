#include "cuda/linear/instances.cuh"

template turboquant::cuda::linear::KernelEntry
turboquant::cuda::linear::find_kernel<turboquant::cuda::linear::Codes::kBytes>(bool sub, int columns);
