// How a call of few columns is shared by thread blocks and warps. A multiprocessor has one thread block.
#pragma once

#include <algorithm>

#include "choices/device.h"
#include "cuda/linear/call.cuh"
#include "format.h"

namespace turboquant::cuda::linear {

constexpr int kSumBytes = 512;  // of a warp's sums of a slab and a tile of columns

// x / each, rounded up: what is shared has fewer than 2^31 parts.
inline int parts_of(int64_t x, int64_t each) { return static_cast<int>(divide_up(x, each)); }

// What it costs that thread blocks share the channels of rows, as many units as could be read meanwhile: they write
// their sums, count arrivals and wait for each other.
constexpr int kJoinUnits = 40;

// What blocks of so many tiles of columns cost on an H200.
struct TilesCost {
  double unit;   // how many times as long a unit takes as with one tile
  double block;  // how many units more the block takes: registers leave no room for one that quantises the next call
};
constexpr TilesCost cost_of(int tiles) {
  return tiles == 1 ? TilesCost{1, 0} : tiles == 2 ? TilesCost{1.15, 0} : TilesCost{1.75, 25};
}

// The most tiles of columns that a thread block has room for. Compute capability 7.5 has 64 KB of shared memory. Where
// warpgroups multiply, more than 32 columns take their tiles or two blocks.
constexpr int most_tiles(const DeviceFacts& facts) {
  constexpr int kLargeShared = 96 << 10;
  return facts.warpgroup_products ? 4 : facts.shared_per_block < kLargeShared ? 2 : kMostColumns / kTileColumns;
}

constexpr int kCopyUnits = 4, kCopyBytes = 4400;  // that a warp copies at a time, at most

// Pieces of activations, of all columns, that a warp of a thread block may quantise before it multiplies.
constexpr int kMostQuantised = 2;

inline bool quantises_first(const Call& a, const Plan& p) {
  const int pieces = quantise_pieces(p.groups_of_part.each, a.group) * p.record.columns;
  return pieces > kMostQuantised * kWarps;
}

// What a few idle multiprocessors, up to kFewIdle, cost: in a chain of calls most blocks that quantise for the next
// call start there, and wait for each other.
constexpr int kFewIdle = 8, kCrowdUnits = 50;

// A plan, and what its busiest thread block costs, in units of a block of one tile.
struct CostedPlan {
  Plan plan;
  double cost;
};

// The plan for blocks of up to `most_columns` columns. Thread blocks share channels by units and kJoinUnits alone: a
// part of the channels also has fewer activations to read, but counting them would make too many share. The cost that
// is returned compares numbers of tiles.
inline CostedPlan plan_with(const Call& a, const format::WeightBlock& unit, int most_columns,
                            const DeviceFacts& facts) {
  Plan p{};
  const int column_blocks = parts_of(a.columns, most_columns), columns = parts_of(a.columns, column_blocks);
  const int tiles = tiles_of(columns), unit_bytes = unit.block_bytes();
  const RecordOfColumns record{unit.group, columns, tiles};
  p.record = record, p.unit_bytes = unit_bytes, p.has_subs = unit.sub > 0;
  p.slabs = parts_of(a.n, format::kWeightRows);
  const int room = facts.shared_per_block;
  // The smallest rings have a unit for each warp, or two where bulk copies fill them: one is copied while the other is
  // multiplied. A warp's sums may wait there for other warps, too.
  const int least_units = facts.warpgroup_products ? 2 : 1;
  const int sum_bytes = kSumBytes * tiles, least_ring = kWarps * std::max(sum_bytes, least_units * unit_bytes);
  const bool even = has_even_shares(tiles, facts.warpgroup_products);
  const int sums = even ? kWarps * sum_bytes : 0;
  const int most_records = std::min(3 * room / 5, room - kHeaderBytes - 128 - least_ring - sums);
  const int blocks = std::max(facts.multiprocessors / column_blocks, 1);
  int64_t least = INT64_MAX;
  for (int parts = 1; parts <= a.groups; ++parts) {
    const int groups = parts_of(a.groups, parts);
    if (int64_t{groups} * record.bytes() > most_records && parts < a.groups) continue;
    const int row_blocks = std::min(p.slabs, std::max(blocks / parts, 1));
    const int64_t cost = int64_t{parts_of(p.slabs, row_blocks)} * groups + (parts > 1 ? kJoinUnits : 0);
    if (cost < least) least = cost, p.parts = parts, p.row_blocks = row_blocks;
    if (parts >= blocks) break;
  }
  p.groups_of_part = Share(a.groups, p.parts), p.slabs_of_block = Share(p.slabs, p.row_blocks);
  const int slabs = parts_of(p.slabs, p.row_blocks), groups = parts_of(a.groups, p.parts);
  p.warps_k = std::clamp(kWarps / slabs, 1, groups);
  const int units = even ? parts_of(slabs * groups, kWarps) : parts_of(slabs, kWarps) * parts_of(groups, p.warps_k);
  const int working = even ? kWarps : std::min(kWarps, slabs * p.warps_k);
  p.join = round_up(kHeaderBytes + groups * record.bytes(), 128), p.ring = p.join + sums;
  const int per_warp = (room - p.ring) / working;
  p.chunk = std::min({kCopyUnits, std::max(kCopyBytes / unit_bytes, 1), units, groups});
  while (p.chunk > 1 && 2 * p.chunk * unit_bytes > per_warp) --p.chunk;
  const int copies = parts_of(units, p.chunk) + parts_of(units, groups), slot_bytes = p.chunk * unit_bytes;
  p.slots = std::max(std::min({copies, kMostSlots, per_warp / slot_bytes}), 1);
  p.ring_stride = p.slots * slot_bytes;
  if (!even && p.warps_k > 1) p.ring_stride = std::max(p.ring_stride, sum_bytes);
  p.join_stride = even ? sum_bytes : p.ring_stride;  // rings that have been read have room for sums
  p.bytes = p.ring + working * p.ring_stride;
  const TilesCost of = cost_of(tiles);
  const double activations = 1.0 * groups * record.bytes() / unit_bytes;  // are read as weights are
  const double join = p.parts > 1 ? kJoinUnits / 2.0 * p.parts : 0;
  const int idle = facts.multiprocessors - p.parts * p.row_blocks * column_blocks;
  const int crowd = idle > 0 && idle <= kFewIdle && quantises_first(a, p) ? kCrowdUnits : 0;
  return {p, of.unit * slabs * groups + of.block + activations + join + crowd};
}

// With products of warpgroups, the plan that costs least of those with blocks of 8, 16 and 32 columns. Elsewhere nobody
// has measured more blocks of columns than needed.
inline Plan plan_of(const Call& a, const format::WeightBlock& unit, const DeviceFacts& facts) {
  CostedPlan best = plan_with(a, unit, kTileColumns * most_tiles(facts), facts);
  if (!facts.warpgroup_products) return best.plan;
  for (int tiles = best.plan.record.tiles / 2; tiles > 0; tiles /= 2) {
    const CostedPlan other = plan_with(a, unit, kTileColumns * tiles, facts);
    if (other.cost < best.cost) best = other;
  }
  return best.plan;
}

}  // namespace turboquant::cuda::linear
