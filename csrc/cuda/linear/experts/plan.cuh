// How a call of linear_experts is shared by thread blocks and warps, before the device knows its pieces. Host only.
#pragma once

#include <algorithm>
#include <cmath>

#include "choices/device.h"
#include "cuda/linear/experts/arrange_few.cuh"
#include "cuda/linear/experts/call.cuh"
#include "cuda/linear/experts/expected.cuh"
#include "cuda/linear/plan.cuh"

namespace turboquant::cuda::linear::experts {

// Kernels, and what a piece costs with so many tiles of columns, relative to one tile, where its weight is read from
// memory.
struct PieceCost {
  int tiles;
  double cost;
};
constexpr PieceCost kPieceCosts[] = {{1, 1.0}, {2, 1.2}, {4, 1.9}};

// The plan with the least cost. There is one wherever choices/linear.h has room for a token's channels.
inline Plan plan_of(const Call& a, const format::WeightBlock& unit, const DeviceFacts& facts) {
  Plan best{};
  double least = INFINITY;
  const int64_t tokens = a.pairs.count / std::max<int>(a.pairs.choices, 1);
  for (const PieceCost& cost : kPieceCosts) {
    if (!has_kernel(cost.tiles, facts.warpgroup_products) || cost.tiles > most_tiles(facts)) continue;
    Plan p{};
    p.unit_bytes = unit.block_bytes(), p.has_subs = unit.sub > 0, p.slabs = parts_of(a.n, format::kWeightRows);
    const auto fill_in = [&](int columns) {
      p.record = {a.group, columns, cost.tiles};
      const double pieces = expected_pieces(a.pairs, columns);
      const int64_t most = int64_t{p.slabs} * most_pieces(a.pairs, columns);
      p.blocks = static_cast<int>(std::min<int64_t>(facts.multiprocessors, most));
      // As many slabs as a block has, or as of a piece, if that has fewer.
      const int slabs = std::max(1, std::min(p.slabs, static_cast<int>(std::ceil(pieces * p.slabs / p.blocks))));
      p.warps_rows = parts_of(slabs, parts_of(slabs, kWarps));
      p.warps_k = std::min(kWarps / p.warps_rows, a.groups);
      p.groups_of_warp = Share(a.groups, p.warps_k);
      p.pairs = kHeaderBytes + a.groups * p.record.bytes();
      const int behind = p.pairs + static_cast<int>(sizeof(int)) * kTileColumns * cost.tiles;
      const bool few = a.pairs.count <= kMostArrangedPairs;
      p.arranged = few ? round_up(behind, 16) : 0;
      p.join = round_up(few ? p.arranged + few_bytes(a.pairs.count) : behind, 128);
      p.ring = p.join + (p.warps_k > 1 ? kWarps * kSumBytes * cost.tiles : 0);
      return pieces * cost.cost;
    };
    const auto fits = [&] { return p.ring + kWarps * p.unit_bytes <= facts.shared_per_block; };
    const int most = static_cast<int>(std::min<int64_t>(kTileColumns * cost.tiles, tokens));
    int columns = most;
    double total = fill_in(columns);
    while (!fits() && columns > 1) total = fill_in(--columns);
    if (!fits() || total >= least) continue;
    const int per_warp = (facts.shared_per_block - p.ring) / kWarps / p.unit_bytes;
    p.chunk = std::clamp(per_warp / 2, 1, std::min(kCopyUnits, parts_of(a.groups, p.warps_k)));
    p.slots = std::clamp(per_warp / p.chunk, 1, kMostSlots);
    p.ring_stride = p.slots * p.chunk * p.unit_bytes;
    p.bytes = p.ring + kWarps * p.ring_stride;
    least = total, best = p;
  }
  return best;
}

}  // namespace turboquant::cuda::linear::experts
