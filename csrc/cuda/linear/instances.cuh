// The kernels of one kind of codes.
#pragma once

#include "cuda/linear/kernel.cuh"
#include "cuda/linear/launch.cuh"

namespace turboquant::cuda::linear {

template <Codes CODES>
KernelEntry find_kernel(bool sub, int columns) {
  const auto entry = [&](auto tiles) {
    const void* kernel = reinterpret_cast<const void*>(&linear_kernel<CODES, false, tiles>);
    if constexpr (CODES != Codes::kBytes) {  // which have no multipliers
      if (sub) kernel = reinterpret_cast<const void*>(&linear_kernel<CODES, true, tiles>);
    }
    return KernelEntry{kernel, reinterpret_cast<const void*>(&quantise_columns<CODES>), tiles};
  };
  if (columns <= 8) return entry(std::integral_constant<int, 1>{});
  if (columns <= 16) return entry(std::integral_constant<int, 2>{});
  if (columns <= 32) return entry(std::integral_constant<int, 4>{});
  return entry(std::integral_constant<int, 8>{});
}

}  // namespace turboquant::cuda::linear
