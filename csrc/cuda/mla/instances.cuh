// The kernels of one latent_dim: key tiles for blocks of 16, 32 and 64 rows, which take uniform grids of 4, 5 and 8
// bits, and row tiles, which take tables of levels and 3 bits.
#pragma once

#include "cuda/mla/kernel.cuh"
#include "cuda/mla/launch.cuh"

namespace turboquant::cuda::mla {

template <int R>
KernelEntry find_kernel(int rows, bool row_tiles) {
  const auto entry = [](auto shape, auto roles) {
    using S = typename decltype(shape)::type;
    return KernelEntry{reinterpret_cast<const void*>(&latent_kernel<S, typename decltype(roles)::type>),
                       reinterpret_cast<const void*>(&prepare_kernel<R>),
                       reinterpret_cast<const void*>(&join_few_kernel<R>),
                       reinterpret_cast<const void*>(&join_kernel<R>),
                       S::kRows,
                       S::kThreads,
                       S::kBlocks};
  };
  if (row_tiles) return entry(Tag<RowShape<R>>{}, Tag<RowRoles<RowShape<R>>>{});
  const auto of_rows = [&](auto block_rows) {
    using S = Shape<R, block_rows>;
    return entry(Tag<S>{}, Tag<KeyRoles<S>>{});
  };
  if (rows <= 16) return of_rows(std::integral_constant<int, 16>{});
  if (rows <= 32) return of_rows(std::integral_constant<int, 32>{});
  return of_rows(std::integral_constant<int, 64>{});
}

}  // namespace turboquant::cuda::mla
