// The kernels of one head_dim and one kind of keys, for blocks of 24 and 32 rows, and of 16 where choose_attention has
// calls for them.
#pragma once

#include "choices/attention.h"
#include "cuda/attention/key_tiles.cuh"
#include "cuda/attention/key_tiles/kernel.cuh"

namespace turboquant::cuda::key_tiles {

template <int D, int KEYS>
KernelEntry find_kernel(int rows) {
  const auto entry = [](auto block_rows) {
    using S = Shape<D, block_rows>;
    using Keys = KeyBytesOf<D, KEYS>;
    return KernelEntry{reinterpret_cast<const void*>(&key_tiles_kernel<D, block_rows, KEYS>),
                       block_rows,
                       S::kBlocks,
                       S::kQueryBytes,
                       kWeightBuffers * S::kWeightBytes,
                       Keys::kOrder,
                       Keys::kStep,
                       Keys::kOffset};
  };
  if constexpr (has_small_key_tiles(D)) {
    if (rows <= kSmallKeyTilesRows) return entry(std::integral_constant<int, kSmallKeyTilesRows>{});
  }
  if (rows <= 24) return entry(std::integral_constant<int, 24>{});
  return entry(std::integral_constant<int, 32>{});
}

}  // namespace turboquant::cuda::key_tiles
