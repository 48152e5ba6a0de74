// How a call is shared by tiles and clusters. Host only.
#pragma once

#include <algorithm>
#include <cmath>

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
constexpr TileCost kTileCosts[] = {{64, 1.25f, 1.35f}, {128, 1.6f, 1.6f},  {160, 1.0f, 1.05f},
                                   {192, 1.2f, 1.25f}, {224, 1.36f, 1.4f}, {256, 1.52f, 1.9f}};
constexpr float kBlockCost = 6, kWorkerCost = 8;
constexpr float kPartCost = 2.5f;  // of a tile that workers share, for each but one of them

// Chooses the thread blocks of a tile that cost least; returns the cost.
inline float choose_parts(const Call& a, const Clusters& clusters, int64_t tiles, float group, Plan& p) {
  float least = INFINITY;
  for (int parts = 1; parts <= std::min(kMostParts, a.groups); ++parts) {
    if (clusters.count[parts] == 0) continue;
    const auto rounds = static_cast<float>(divide_up(tiles, clusters.count[parts]));
    const float whole = rounds * (kBlockCost + group * static_cast<float>(divide_up(a.groups, parts)));
    if (whole < least) least = whole, p.parts = parts;
  }
  return least;
}
// Chooses the number of workers that costs least; returns the cost, which is infinite where a device has no room for
// one.
inline float choose_workers(const Call& a, const Clusters& clusters, int64_t tiles, float group, Plan& p) {
  float least = INFINITY;
  const int slices = static_cast<int>(tiles * a.groups);
  for (int workers = 1; workers <= std::min(clusters.count[kStreamBlocks], slices); ++workers) {
    const int each = divide_up(slices, workers);
    const bool even = slices % workers == 0, whole = even && each % a.groups == 0;
    const int parts = divide_up(a.groups, each) + (whole || (even && a.groups % each == 0) ? 0 : 1);
    const float cost = kWorkerCost + group * static_cast<float>(each) + kPartCost * static_cast<float>(parts - 1);
    if (cost < least) least = cost, p.workers = workers, p.whole_tiles = whole;
  }
  if (p.workers > 0) p.slices = Share(slices, p.workers);
  return least;
}

// The plan with the tiles that cost least.
inline Plan plan_of(const Call& a, const DeviceFacts& facts, const Clusters& clusters) {
  Plan p{};
  float least = INFINITY;
  for (const TileCost& cost : kTileCosts) {
    const bool in_workers = in_streams(cost.tokens);
    const int rows = slabs_of(cost.tokens) * format::kWeightRows * (in_workers ? kStreamBlocks : 1);
    const int64_t tiles = int64_t{divide_up(a.n, rows)} * divide_up(a.tokens, cost.tokens);
    const float group = format::levels_are_codes(a.block.width()) ? cost.byte_group : cost.group;
    Plan q{};
    q.tokens = cost.tokens;
    const float whole =
        in_workers ? choose_workers(a, clusters, tiles, group, q) : choose_parts(a, clusters, tiles, group, q);
    if (whole < least) least = whole, p = q;
  }
  const int slabs = slabs_of(p.tokens), rows = slabs * format::kWeightRows;
  p.column_tiles = divide_up(a.tokens, p.tokens), p.row_tiles = divide_up(a.n, rows);
  const int room = facts.shared_per_block - kHeaderBytes, halves = a.block.group / kChannels;
  p.stage_bytes = static_cast<int>(round_up(slabs * a.block.block_bytes() + halves * p.tokens * kRowBytes, 1024));
  p.stages = std::min(room / p.stage_bytes, kMostStages);
  p.bytes = kHeaderBytes + p.stages * p.stage_bytes;
  if (!in_streams(p.tokens)) {
    const int sum_bytes = p.tokens * (kSumStride + 1) * static_cast<int>(sizeof(float));  // and factors
    p.bytes = std::max(p.bytes, kHeaderBytes + sum_bytes);
  }
  return p;
}

}  // namespace turboquant::cuda::linear::tiles
