// The kernels of one latent_dim: warp tiles, and, for the sizes that have them, key tiles for blocks of 16, 32 and 64
// rows, and row tiles.
#pragma once

#include "cuda/mla/kernel.cuh"
#include "cuda/mla/launch.cuh"

namespace turboquant::cuda::mla {

template <class S, class Roles>
KernelEntry entry_of() {
  constexpr int R = S::kLatent;
  return {reinterpret_cast<const void*>(&latent_kernel<S, Roles>),
          reinterpret_cast<const void*>(&prepare_kernel<R>),
          reinterpret_cast<const void*>(&join_few_kernel<R>),
          reinterpret_cast<const void*>(&join_kernel<R>),
          S::kRows,
          S::kThreads,
          S::kBlocks};
}

template <int R, int ROWS>
KernelEntry key_tiles() {
  return entry_of<Shape<R, ROWS>, KeyRoles<Shape<R, ROWS>>>();
}

template <int R>
KernelEntry find_kernel(LatentKernel kernel, int64_t rows) {
  if constexpr (has_row_tiles(R)) {
    if (kernel == LatentKernel::kRowTiles) return entry_of<RowShape<R>, RowRoles<RowShape<R>>>();
  }
  if constexpr (has_key_tiles(R)) {
    if (kernel == LatentKernel::kKeyTiles) {
      return rows <= 16 ? key_tiles<R, 16>() : rows <= 32 ? key_tiles<R, 32>() : key_tiles<R, 64>();
    }
  }
  return entry_of<WarpShape<R>, WarpRoles<WarpShape<R>>>();
}

}  // namespace turboquant::cuda::mla
