// How a call is cut into tiles and shared by workers. Host only.
#pragma once

#include <algorithm>
#include <cmath>

#include "choices/device.h"
#include "cuda/linear/experts/expected.cuh"
#include "cuda/linear/plan.cuh"
#include "cuda/linear/tiles/call.cuh"

namespace turboquant::cuda::linear::tiles {

// What a worker costs, in microseconds on an H100 or H200: for each group of channels, for each part of a tile that
// others have summed, and besides (to fill the ring, for results). They only decide which tiles are chosen.
struct TileCost {
  int tokens;
  float group, byte_group;  // at 4 and at 8 bits, of which tiles of 256 tokens have too little room
};
constexpr TileCost kTileCosts[] = {{32, 0.85f, 0.85f}, {64, 0.97f, 0.97f}, {96, 0.82f, 0.85f}, {128, 0.93f, 0.97f},
                                   {160, 1.0f, 1.05f}, {192, 1.2f, 1.25f}, {224, 1.36f, 1.4f}, {256, 1.52f, 1.9f}};
constexpr float kWorkerCost = 8;
constexpr float part_cost(int tokens) { return 0.4f + 0.008f * static_cast<float>(tokens); }

// Chooses the number of workers that costs least, of as many as a device has room for; returns the cost.
inline float choose_workers(const Call& a, int most, int64_t tiles, float group, Plan& p) {
  float least = INFINITY;
  const int slices = static_cast<int>(tiles * a.groups);
  for (int workers = 1; workers <= std::min(most, slices); ++workers) {
    const int each = parts_of(slices, workers);
    const bool even = slices % workers == 0, whole = even && each % a.groups == 0;
    const int parts = parts_of(a.groups, each) + (whole || (even && a.groups % each == 0) ? 0 : 1);
    const float cost =
        kWorkerCost + group * static_cast<float>(each) + part_cost(p.tokens) * static_cast<float>(parts - 1);
    if (cost < least) least = cost, p.workers = workers, p.whole_tiles = whole;
  }
  p.slices = Share(slices, p.workers);
  return least;
}

// The same for tiles that only the device will count: all workers have a part, whatever they begin and end in.
inline float expect_tiles(const Call& a, int most, double tiles, float group, Plan& p) {
  p.workers = static_cast<int>(std::clamp(std::ceil(tiles * a.groups), 1.0, static_cast<double>(most)));
  return kWorkerCost + group * static_cast<float>(tiles * a.groups / p.workers) + part_cost(p.tokens);
}

// The plan with the tiles that cost least.
inline Plan plan_of(const Call& a, const DeviceFacts& facts, int most_workers) {
  Plan p{};
  float least = INFINITY;
  for (const TileCost& cost : kTileCosts) {
    const int row_tiles = parts_of(a.n, kBlocks * slabs_of(cost.tokens) * format::kWeightRows);
    const float group = format::levels_are_codes(a.block.width()) ? cost.byte_group : cost.group;
    Plan q{};
    q.tokens = cost.tokens, q.row_tiles = row_tiles;
    const float whole =
        a.has_experts()
            ? expect_tiles(a, most_workers, row_tiles * expected_pieces(a.pairs, cost.tokens), group, q)
            : choose_workers(a, most_workers, int64_t{row_tiles} * parts_of(a.tokens, cost.tokens), group, q);
    if (whole < least) least = whole, p = q;
  }
  const int slabs = slabs_of(p.tokens);
  p.column_tiles = a.has_experts() ? static_cast<int>(most_pieces(a.pairs, p.tokens)) : parts_of(a.tokens, p.tokens);
  const int room = facts.shared_per_block - kHeaderBytes, halves = a.block.group / kChannels;
  p.stage_bytes = round_up(slabs * a.block.block_bytes() + halves * p.tokens * kRowBytes, 1024);
  p.stages = std::min(room / p.stage_bytes, kMostStages);
  p.bytes = kHeaderBytes + p.stages * p.stage_bytes;
  return p;
}

}  // namespace turboquant::cuda::linear::tiles
