// How a call is shared by tiles and clusters. Host only.
#pragma once

#include <algorithm>

#include "choices/device.h"
#include "cuda/linear/plan.cuh"
#include "cuda/linear/tiles/call.cuh"

namespace turboquant::cuda::linear::tiles {

// Clusters of 1 to kMostParts thread blocks that a device holds at a time.
struct Clusters {
  int count[kMostParts + 1];
};

inline int64_t round_up(int64_t x, int64_t to) { return int64_t{divide_up(x, to)} * to; }

// What a thread block costs, in microseconds on an H200: for each group of channels, and besides (to fill the ring, for
// sums and results). They only decide which tiles are chosen.
struct TileCost {
  int tokens;
  float group, byte_group;  // at 4 and at 8 bits, of which tiles of 256 tokens have too little room
};
constexpr TileCost kTileCosts[] = {{64, 1.25f, 1.35f}, {128, 1.6f, 1.6f}, {192, 1.15f, 1.2f}, {256, 1.4f, 1.9f}};
constexpr float kBlockCost = 6;

// The plan with the tiles that cost least.
inline Plan plan_of(const Call& a, const DeviceFacts& facts, const Clusters& clusters) {
  Plan p{};
  float least = 0;
  for (const TileCost& cost : kTileCosts) {
    const int rows = slabs_of(cost.tokens) * format::kWeightRows;
    const int64_t tiles = int64_t{divide_up(a.n, rows)} * divide_up(a.tokens, cost.tokens);
    const float group = format::levels_are_codes(a.block.width()) ? cost.byte_group : cost.group;
    for (int parts = 1; parts <= std::min(kMostParts, a.groups); ++parts) {
      if (clusters.count[parts] == 0) continue;
      const int rounds = divide_up(tiles, clusters.count[parts]);
      const float whole =
          static_cast<float>(rounds) * (kBlockCost + group * static_cast<float>(divide_up(a.groups, parts)));
      if (p.tokens && whole >= least) continue;
      least = whole, p.tokens = cost.tokens, p.parts = parts;
    }
  }
  const int slabs = slabs_of(p.tokens), rows = slabs * format::kWeightRows;
  p.column_tiles = divide_up(a.tokens, p.tokens), p.row_tiles = divide_up(a.n, rows);
  const int room = facts.shared_per_block - kHeaderBytes, halves = a.block.group / kChannels;
  p.stage_bytes = static_cast<int>(round_up(slabs * a.block.block_bytes() + halves * p.tokens * kRowBytes, 1024));
  p.stages = std::min(room / p.stage_bytes, kMostStages);
  const int sum_bytes = p.tokens * (sum_stride(p.tokens) + 1) * static_cast<int>(sizeof(float));  // and factors
  p.bytes = kHeaderBytes + std::max(p.stages * p.stage_bytes, sum_bytes);
  return p;
}

}  // namespace turboquant::cuda::linear::tiles
