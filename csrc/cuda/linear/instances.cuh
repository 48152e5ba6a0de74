// The kernels of one kind of codes.
#pragma once

#include "cuda/linear/kernel.cuh"
#include "cuda/linear/launch.cuh"

namespace turboquant::cuda::linear {

template <Codes CODES, Subs SUBS, int TILES, bool ONE_COLUMN = false>
KernelEntry entry_of() {
  return {reinterpret_cast<const void*>(&linear_kernel<CODES, SUBS, TILES, ONE_COLUMN>),
          reinterpret_cast<const void*>(&quantise_columns<CODES>)};
}

// With few tiles of columns kernels for units without multipliers are faster by a tenth, with more they are not. One
// column has a kernel of its own where there are multipliers.
template <Codes CODES>
KernelEntry find_kernel(bool sub, int columns) {
  constexpr bool kBytes = CODES == Codes::kBytes;  // which have no multipliers
  constexpr Subs kAll = kBytes ? Subs::kNone : Subs::kAll, kEither = kBytes ? Subs::kNone : Subs::kEither;
  if constexpr (!kBytes) {
    if (columns == 1 && sub) return entry_of<CODES, kAll, 1, true>();
  }
  switch (tiles_of(columns)) {
    case 1: return sub ? entry_of<CODES, kAll, 1>() : entry_of<CODES, Subs::kNone, 1>();
    case 2: return sub ? entry_of<CODES, kAll, 2>() : entry_of<CODES, Subs::kNone, 2>();
    case 4: return entry_of<CODES, kEither, 4>();
    default: return entry_of<CODES, kEither, 8>();
  }
}

}  // namespace turboquant::cuda::linear
