// Which CUDA kernel takes a call of mla_attention, and why: the one place that knows the conditions. Plain C++ without
// torch and CUDA, so that the launch, a test and a report of the machine ask the same function.
#pragma once

#include <cstdint>

#include "choices/codec.h"
#include "choices/device.h"
#include "dtype.h"
#include "format.h"

namespace turboquant {

enum class LatentKernel {
  kKeyTiles,   // uniform grids of 4, 5 and 8 bits, straight from codes: keys are the long side (cuda/mla/key_tiles)
  kRowTiles,   // tables of levels and 3 bits, codes expanded once: rows of queries are (cuda/mla/row_tiles)
  kWarpTiles,  // all codes, for 16-bit queries, by products of single warps (cuda/mla/warp_tiles)
  kGeneral,    // everything (cuda/mla/general.cu)
};

// What the choice depends on, of a call.
struct LatentShape {
  int latent_dim;
  format::Codes codes;
  Dtype dtype;       // of queries, results and exact latents
  Dtype rope_dtype;  // of the raw channels in pages
  int64_t rows;      // of queries of a sequence, at most: max_q_len * q_heads
};

struct LatentChoice {
  LatentKernel kernel;
  const char* reason;  // the condition that decided
};

constexpr int kWarpTileRows = 16;  // of a block of warp tiles

// The sizes that the kernels with products of warpgroups are compiled for (cuda/mla/instances).
constexpr bool has_key_tiles(int latent_dim) { return latent_dim == 256 || latent_dim == 512; }
constexpr bool has_row_tiles(int latent_dim) { return latent_dim == 512; }

constexpr LatentChoice choose_latents(const LatentShape& s, const DeviceFacts& device) {
  const auto general = [](const char* reason) { return LatentChoice{LatentKernel::kGeneral, reason}; };
  const auto warp_tiles = [](const char* reason) { return LatentChoice{LatentKernel::kWarpTiles, reason}; };
  if (device.major < 8) return general("compute capability below 8.0");
  if (s.dtype == Dtype::kFloat32) return general("queries are float32");
  if (s.dtype != s.rope_dtype) return general("queries and raw channels differ in dtype");
  if (!device.warpgroup_products) return warp_tiles("the device has no products of warpgroups");
  if (!has_key_tiles(s.latent_dim)) return warp_tiles("latent_dim is neither 256 nor 512");
  if (s.codes.grid != format::Grid::kUniform || format::is_spread(s.codes.width)) {
    if (!has_row_tiles(s.latent_dim)) return warp_tiles("Lloyd-Max levels or 3 bits over 256 channels");
    if (s.rows <= kWarpTileRows) return warp_tiles("Lloyd-Max levels or 3 bits, at most 16 query rows");
    return {LatentKernel::kRowTiles, "Lloyd-Max levels or 3 bits, more than 16 query rows"};
  }
  return {LatentKernel::kKeyTiles, "uniform grid of 4, 5 or 8 bits"};
}

// What the choice of the kernel of mla_store depends on.
struct LatentStoreShape {
  int latent_dim;
  format::Width width;
  int candidates;
  Dtype dtype;  // of latents
  bool transforms, rotated_tail;
  int64_t tokens;
};

constexpr int kStoreStepDim = 512;
constexpr int kMostStoreSteps = 4;  // tokens of a multiprocessor; for more a table of candidates pays

// Whether the kernel for few tokens stores them (cuda/mla/store_step.cuh).
constexpr bool stores_latents_in_a_step(const LatentStoreShape& s, const DeviceFacts& device) {
  return device.major >= 8 && s.latent_dim == kStoreStepDim && format::fills_nibble(s.width) &&
         s.candidates <= choices::kMostCandidates && s.dtype != Dtype::kFloat32 && s.transforms && !s.rotated_tail &&
         s.tokens <= int64_t{kMostStoreSteps} * device.multiprocessors;
}

}  // namespace turboquant
