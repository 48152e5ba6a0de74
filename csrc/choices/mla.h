// Which CUDA kernel takes a call of mla_attention or mla_store, and why: the one place that knows the conditions. Plain
// C++ without torch and CUDA, so that the launch, a test and a report of the machine ask the same function.
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

// ---- mla_store ------------------------------------------------------------------------------------------------------

enum class LatentStoreKernel {
  kStep,   // few tokens: each has a block, whose warps try the candidates in registers (cuda/mla/store_step.cuh)
  kTable,  // everything: blocks have a table of candidates in shared memory (cuda/mla.cu)
};

// What the choice depends on, of a call.
struct LatentStoreShape {
  int latent_dim;
  format::Width width;
  int candidates;
  Dtype dtype;  // of latents
  bool transforms, rotated_tail;
  int64_t tokens;
};

struct LatentStoreChoice {
  LatentStoreKernel kernel;
  const char* reason;
};

constexpr int kStoreStepDim = 512;
constexpr int kStoreStepTokens = 4;  // of each multiprocessor: for more, a table that is filled once pays

constexpr LatentStoreChoice choose_latent_store(const LatentStoreShape& s, const DeviceFacts& device) {
  const auto table = [](const char* reason) { return LatentStoreChoice{LatentStoreKernel::kTable, reason}; };
  if (device.major < 8) return table("compute capability below 8.0");
  if (s.latent_dim != kStoreStepDim) return table("latent_dim is not 512");
  if (s.width != format::Width::k4 && !format::has_plane(s.width)) return table("codes have neither 4 nor 5 bits");
  if (s.candidates > choices::kMostCandidates) return table("the codebook has more than 8 candidate steps");
  if (s.dtype == Dtype::kFloat32) return table("latents are float32");
  if (!s.transforms) return table("latents are not rotated");
  if (s.rotated_tail) return table("the exact tail has rotated latents");
  if (s.tokens > int64_t{kStoreStepTokens} * device.multiprocessors) {
    return table("more than four tokens for each multiprocessor");
  }
  return {LatentStoreKernel::kStep, "few tokens of 512 channels"};
}

}  // namespace turboquant
