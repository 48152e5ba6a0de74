// The kernels of a number of channels, for tiles of 64 and of 128 rows and both 16-bit types; each takes all codes.
#pragma once

#include <algorithm>

#include "choices/attention.h"
#include "cuda/attention/row_tiles.cuh"
#include "cuda/attention/row_tiles/chunks.cuh"
#include "cuda/attention/row_tiles/kernel.cuh"
#include "cuda/attention/row_tiles/prompts.cuh"

namespace turboquant::cuda::row_tiles {

// Tiles of 64 rows of every head_dim leave room for the largest records in the shared memory of compute capability 9.0,
// so a launch always finds a shape.
constexpr int kSharedPerBlock = 227 << 10;
template <class S>
constexpr bool kAlwaysFits = [] {
  Plan plan{};
  plan.key_stages = plan.value_stages = 2, plan.raw_stride = raw_stride(format::Record{S::kDim, 64, 8, 8});
  return S::kStreamWarps <= 2 && lay_out<S>(plan, kSharedPerBlock);
}();

template <class S>
KernelEntry kernel_entry(const void* kernel) {
  return {.kernel = kernel,
          .rows = S::kRows,
          .threads = S::kThreads,
          .blocks = S::kBlocks,
          .stream_warps = S::kStreamWarps,
          .part_floats = S::kPartFloats,
          .state_floats = S::kStateFloats,
          .keys = S::kKeys,
          .bytes = S::kTileBytes,
          .lay_out = &lay_out<S>};
}
template <class S, typename T>
KernelEntry kernel_entry() {
  if constexpr (S::kPrompts) {
    return kernel_entry<S>(reinterpret_cast<const void*>(&prompts_kernel<S, T>));
  } else if constexpr (S::kChunks) {
    return kernel_entry<S>(reinterpret_cast<const void*>(&chunks_kernel<S, T>));
  } else {
    return kernel_entry<S>(reinterpret_cast<const void*>(&row_tiles_kernel<S, T>));
  }
}

template <int D>
KernelEntry find_prompts_kernel(int groups, Dtype dtype, bool gathered) {
  const auto of = [&](auto type, auto source) {
    using T = typename decltype(type)::type;
    constexpr Source kSource = decltype(source)::value;
    if constexpr (D <= 128) {
      if (groups == 1) return kernel_entry<Shape<D, 1, kSource>, T>();
    }
    return kernel_entry<Shape<D, 2, kSource>, T>();
  };
  const auto of_type = [&](auto type) {
    if constexpr (D != 192) {  // older tokens of which are not gathered
      if (gathered) return of(type, std::integral_constant<Source, Source::kGathered>{});
    }
    return of(type, std::integral_constant<Source, Source::kOwn>{});
  };
  return dtype == Dtype::kFloat16 ? of_type(Tag<__half>{}) : of_type(Tag<__nv_bfloat16>{});
}

template <int D>
KernelEntry find_chunks_kernel(Dtype dtype) {
  using S = Shape<D, 2, Source::kExpanded>;
  return dtype == Dtype::kFloat16 ? kernel_entry<S, __half>() : kernel_entry<S, __nv_bfloat16>();
}

template <int D>
KernelEntry find_kernel(int groups, Dtype dtype) {
  static_assert(row_tiles_channels(D) == D && kAlwaysFits<Shape<D, 1>>);
  const auto of_type = [&](auto type) {
    using T = typename decltype(type)::type;
    return groups == 1 ? kernel_entry<Shape<D, 1>, T>() : kernel_entry<Shape<D, 2>, T>();
  };
  return dtype == Dtype::kFloat16 ? of_type(Tag<__half>{}) : of_type(Tag<__nv_bfloat16>{});
}

}  // namespace turboquant::cuda::row_tiles
