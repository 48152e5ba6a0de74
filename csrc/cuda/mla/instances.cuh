// The kernels of one latent_dim, for blocks of 16, 32 and 64 rows; each takes uniform grids of 4, 5 and 8 bits.
#pragma once

#include "cuda/mla/kernel.cuh"
#include "cuda/mla/launch.cuh"

namespace turboquant::cuda::mla {

template <int R>
KernelEntry find_kernel(int rows) {
  const auto entry = [](auto block_rows) {
    using S = Shape<R, block_rows>;
    return KernelEntry{reinterpret_cast<const void*>(&latent_kernel<R, block_rows>),
                       reinterpret_cast<const void*>(&prepare_kernel<R>),
                       reinterpret_cast<const void*>(&join_few_kernel<R>),
                       reinterpret_cast<const void*>(&join_kernel<R>),
                       block_rows,
                       S::kThreads,
                       S::kBlocks};
  };
  if (rows <= 16) return entry(std::integral_constant<int, 16>{});
  if (rows <= 32) return entry(std::integral_constant<int, 32>{});
  return entry(std::integral_constant<int, 64>{});
}

}  // namespace turboquant::cuda::mla
