// The kernels of one kind of codes.
#pragma once

#include "cuda/linear/kernel.cuh"
#include "cuda/linear/launch.cuh"

namespace turboquant::cuda::linear {

template <Codes CODES, Subs SUBS, int TILES, bool ONE_COLUMN = false>
KernelEntry entry_of() {
  return {reinterpret_cast<const void*>(&linear_kernel<CODES, SUBS, TILES, ONE_COLUMN>),
          reinterpret_cast<const void*>(&quantise_columns<splits_channels(CODES)>)};
}

template <Codes CODES, int TILES>
KernelEntry entry_with(Subs subs) {
  if constexpr (CODES == Codes::kBytes) {
    return entry_of<CODES, Subs::kNone, TILES>();
  } else if constexpr (TILES > 2) {
    return entry_of<CODES, Subs::kEither, TILES>();
  } else if constexpr (TILES == 2) {
    if (subs == Subs::kEither) return entry_of<CODES, Subs::kEither, 2>();
    return subs == Subs::kAll ? entry_of<CODES, Subs::kAll, 2>() : entry_of<CODES, Subs::kNone, 2>();
  } else {
    return subs == Subs::kAll ? entry_of<CODES, Subs::kAll, 1>() : entry_of<CODES, Subs::kNone, 1>();
  }
}

template <Codes CODES>
KernelEntry find_kernel(bool sub, int columns, bool warpgroup_products) {
  const int tiles = tiles_of(columns);
  const Subs subs = subs_of(CODES, sub, tiles, warpgroup_products);
  if constexpr (CODES != Codes::kBytes) {
    if (columns == 1 && subs == Subs::kAll && warpgroup_products) return entry_of<CODES, Subs::kAll, 1, true>();
  }
  switch (tiles) {
    case 1: return entry_with<CODES, 1>(subs);
    case 2: return entry_with<CODES, 2>(subs);
    case 4: return entry_with<CODES, 4>(subs);
    default: return entry_with<CODES, 8>(subs);
  }
}

}  // namespace turboquant::cuda::linear
