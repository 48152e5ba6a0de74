// Which CUDA kernel takes a call of mla_attention, and why: the one place that knows the conditions. Plain C++ without
// torch and CUDA, so that the launch, a test and a report of the machine ask the same function.
#pragma once

#include <cstdint>

#include "choices/device.h"
#include "dtype.h"
#include "format.h"

namespace turboquant {

enum class LatentKernel {
  kKeyTiles,   // other uniform grids, straight from codes: keys are the long side of products (cuda/mla/key_tiles)
  kRowTiles,   // tables of levels and 3 bits, codes expanded once: rows of queries are (cuda/mla/row_tiles)
  kWarpTiles,  // everything in 16 bits, by products of single warps (cuda/mla/warp_tiles)
  kGeneral,    // everything (cuda/mla/general.cu)
};

// What the choice depends on, of a call.
struct LatentShape {
  int latent_dim;
  format::Codes codes;
  Dtype dtype;       // of queries, results and exact latents
  Dtype rope_dtype;  // of the raw channels in pages
};

struct LatentChoice {
  LatentKernel kernel;
  const char* reason;  // the condition that decided
};

// The sizes that the kernels with products of warpgroups are compiled for (cuda/mla/instances).
constexpr bool has_latent_kernel(int latent_dim) { return latent_dim == 256 || latent_dim == 512; }

constexpr LatentChoice choose_latents(const LatentShape& s, const DeviceFacts& device) {
  const auto general = [](const char* reason) { return LatentChoice{LatentKernel::kGeneral, reason}; };
  const auto warp_tiles = [](const char* reason) { return LatentChoice{LatentKernel::kWarpTiles, reason}; };
  if (device.major < 8) return general("the device is of compute capability 7.5");
  if (s.dtype == Dtype::kFloat32) return general("queries are float32");
  if (s.dtype != s.rope_dtype) return general("queries and raw channels differ in dtype");
  if (!device.warpgroup_products) return warp_tiles("the device has no products of warpgroups");
  if (!has_latent_kernel(s.latent_dim)) return warp_tiles("latent_dim is neither 256 nor 512");
  if (s.codes.grid != format::Grid::kUniform) return {LatentKernel::kRowTiles, "Lloyd-Max levels"};
  if (format::is_spread(s.codes.width)) return {LatentKernel::kRowTiles, "3 bits"};
  return {LatentKernel::kKeyTiles, "uniform grid of 4, 5 or 8 bits"};
}

}  // namespace turboquant
