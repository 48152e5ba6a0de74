// Sizes of the kernel without products of warpgroups (mla/warp_tiles/roles.cuh).
#pragma once

#include "choices/mla.h"
#include "cuda/common/wgmma_swizzled.cuh"
#include "cuda/mla/exact.cuh"
#include "cuda/mla/levels.cuh"

namespace turboquant::cuda::mla {

// R: channels of a latent.
template <int R>
struct WarpShape {
  static constexpr int kLatent = R, kRows = kWarpTileRows;
  static constexpr UnitCosts kCosts = costs_of_units(3);
  static constexpr bool kKeepsWhole = false;             // see leave_part; it would take registers
  static constexpr int kChannels = R == 512 ? 128 : 64;  // of a warp
  static constexpr int kWarps = R / kChannels, kThreads = 32 * kWarps;
  static constexpr int kBlocks = 8 / kWarps;  // per multiprocessor: a thread has as many registers as it can

  // Shared memory, in bytes, where rows that are read at once begin in different banks. Of each warp: the levels of a
  // tile's keys, the scales of those of two tiles, and scores. Of each 16 raw channels, of which there are up to
  // four: those of two tiles. Of all warps: weights, and factors of rows.
  static constexpr int kLevelStride = kChannels * 2 + 16, kLevelBytes = kTileTokens * kLevelStride;
  static constexpr int kScaleBytes = kTileTokens * 2, kRopeBytes = kTileTokens * 32;
  static constexpr int kScoreStride = (kTileTokens + 8) * 4, kScoreBytes = kRows * kScoreStride;
  static constexpr int kWeightStride = kTileTokens * 2 + 16, kWeightBytes = kRows * kWeightStride;
  static constexpr int kRopeSixteens = 4, kRopeWarps = std::min(kWarps, kRopeSixteens);

  // Where they begin.
  static constexpr int kLevels = 0, kScales = kLevels + kWarps * kLevelBytes,
                       kRopes = kScales + 2 * kWarps * kScaleBytes, kScores = kRopes + 2 * kRopeSixteens * kRopeBytes,
                       kWeights = kScores + kWarps * kScoreBytes, kFactors = kWeights + kWeightBytes,
                       kTileBytes = kFactors + kRows * 4;

  static constexpr int kPart = kPartHead + R;
};

// Where everything is in shared memory. Exact keys take the place of tiles.
template <class S>
Plan plan_of_warp_tiles(const Latents& call) {
  const bool has_exact = call.a.tail || call.a.new_keys;
  Plan p{};
  p.half_queries = true;
  const format::LatentRecord& r = call.record;
  p.level_kind = level_kind_of(r.width(), !call.levels);
  p.planes = r.planes(), p.ropes = r.ropes(), p.scales = r.scales(), p.tile_bytes = r.tile_bytes();
  p.query_bytes = S::kRows * (S::kLatent + 64) * 2;
  p.image_bytes = round_up(p.query_bytes + RowTable::bytes(S::kRows), 128);
  const int room = std::max(S::kTileBytes, has_exact ? exact_bytes(call.channels(), S::kRows) : 0);
  p.queries = round_up(room, 128);  // what lies before it is free while the block looks for its work
  p.tables = p.queries;
  p.notes = p.tables + round_up(kLevelCodes, 128);
  p.bytes = p.notes + static_cast<int>(sizeof(Notes));
  return p;
}

}  // namespace turboquant::cuda::mla
