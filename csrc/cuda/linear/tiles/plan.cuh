// How a call is shared by tiles and clusters. Host only.
#pragma once

#include <algorithm>

#include "choices/device.h"
#include "cuda/linear/tiles/call.cuh"

namespace turboquant::cuda::linear::tiles {

// Clusters of 1 to kMostParts thread blocks that a device holds at a time.
struct Clusters {
  int count[kMostParts + 1];
};

inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// Tokens of a tile. Tiles of 256 tokens expand each code half as often as those of 128, but wait for weights of 8 bits,
// of which two groups are all that they have room for.
inline int tile_tokens(int64_t tokens, const format::WeightBlock& block) {
  if (tokens <= 64) return 64;
  if (format::levels_are_codes(block.width())) return 128;
  // What a place of a tile costs, measured: 9 to 8.
  return 9 * round_up(tokens, 128) <= 8 * round_up(tokens, 256) ? 128 : 256;
}

// What a thread block costs besides its groups of channels, in groups: filling the ring, sums, results.
constexpr int kBlockGroups = 4;

// tokens: of a tile
inline Plan plan_of(const Call& a, int tokens, const DeviceFacts& facts, const Clusters& clusters) {
  Plan p{};
  p.tokens = tokens;
  p.column_tiles = static_cast<int>((a.tokens + tokens - 1) / tokens);
  const int slabs = slabs_of(tokens), rows = slabs * format::kWeightRows;
  p.row_tiles = static_cast<int>((a.n + rows - 1) / rows);
  const int room = facts.shared_per_block - kHeaderBytes;
  const int halves = a.block.group / kChannels;
  p.stage_bytes = static_cast<int>(round_up(slabs * a.block.block_bytes() + halves * tokens * kRowBytes, 1024));
  p.stages = std::min(room / p.stage_bytes, kMostStages);
  const int sum_bytes = tokens * (sum_stride(tokens) + 1) * static_cast<int>(sizeof(float));  // and factors
  p.bytes = kHeaderBytes + std::max(p.stages * p.stage_bytes, sum_bytes);

  const int64_t tiles = int64_t{p.column_tiles} * p.row_tiles;
  int64_t least = INT64_MAX;
  for (int parts = 1; parts <= std::min(kMostParts, a.groups); ++parts) {
    if (clusters.count[parts] == 0) continue;
    const int64_t rounds = (tiles + clusters.count[parts] - 1) / clusters.count[parts];
    const int64_t cost = rounds * ((a.groups + parts - 1) / parts + kBlockGroups);
    if (cost < least) least = cost, p.parts = parts;
  }
  return p;
}

}  // namespace turboquant::cuda::linear::tiles
