// How a call of up to 64 columns is shared by thread blocks and warps. A multiprocessor has one thread block.
#pragma once

#include <algorithm>

#include "choices/device.h"
#include "cuda/linear/call.cuh"
#include "format.h"

namespace turboquant::cuda::linear {

constexpr int kSumBytes = 512;  // of a warp's sums of 16 rows and a tile of columns

inline int divide_up(int64_t x, int64_t y) { return static_cast<int>((x + y - 1) / y); }

// What it costs that thread blocks share the channels of rows, as many units as could be read meanwhile: they write
// their sums, count arrivals and wait for each other.
constexpr int kJoinUnits = 40;

// The most tiles of columns that a thread block has room for. Compute capability 7.5 has 64 KB of shared memory.
constexpr int most_tiles(const DeviceFacts& facts) {
  constexpr int kLargeShared = 96 << 10;
  return facts.shared_per_block < kLargeShared ? 2 : kMostColumns / kTileColumns;
}

// Activations of a group carry sums of their integers only where tables hold levels less 1: of all of them, or of those
// that have a multiplier, which all do where the kernel takes units with and without (either).
inline int corrections(const format::WeightBlock& unit, bool uniform, bool either) {
  if (uniform || format::levels_are_codes(unit.width())) return 0;
  return unit.sub || either ? unit.group / format::kSubChannels : 1;
}

constexpr int kCopyUnits = 4;  // that a warp copies at a time

// The plan whose busiest thread block reads the fewest units.
inline Plan plan_of(const Call& a, const format::WeightBlock& unit, const RecordOfColumns& record,
                    const DeviceFacts& facts) {
  Plan p{};
  const int unit_bytes = unit.block_bytes();
  p.record = record, p.unit_bytes = unit_bytes, p.has_subs = unit.sub > 0;
  p.slabs = divide_up(a.n, 16);
  const int warps = num_warps(record.tiles), header = header_bytes(record.tiles);
  const int room = facts.shared_per_block;
  // The smallest rings: of each warp as many units as have room for its sums, which meet those of other warps there.
  const int least_ring = warps * unit_bytes * divide_up(kSumBytes * record.tiles, unit_bytes);
  const int most_records = std::min(room / 2, room - header - 128 - least_ring);
  int64_t least = INT64_MAX;
  for (int parts = 1; parts <= a.groups; ++parts) {
    const int groups = divide_up(a.groups, parts);
    if (int64_t{groups} * record.bytes() > most_records && parts < a.groups) continue;
    const int row_blocks = std::min(p.slabs, std::max(facts.multiprocessors / parts, 1));
    const int64_t cost = int64_t{divide_up(p.slabs, row_blocks)} * groups + (parts > 1 ? kJoinUnits : 0);
    if (cost < least) least = cost, p.parts = parts, p.row_blocks = row_blocks;
    if (parts >= facts.multiprocessors) break;
  }
  p.groups_of_part = Share(a.groups, p.parts), p.slabs_of_block = Share(p.slabs, p.row_blocks);
  const int slabs = divide_up(p.slabs, p.row_blocks), passes = divide_up(slabs, warps);
  p.warps_rows = divide_up(slabs, passes);
  const int groups = divide_up(a.groups, p.parts);
  p.warps_k = std::min(warps / p.warps_rows, groups);
  for (int more = 0; more < 2; ++more) p.groups_of_warp[more] = Share(p.groups_of_part.each + more, p.warps_k);
  const int units = divide_up(groups, p.warps_k);
  p.ring = (header + groups * record.bytes() + 127) / 128 * 128;
  const int per_warp = (room - p.ring) / warps;
  p.chunk = std::min(kCopyUnits, units);
  while (p.chunk > 1 && 2 * p.chunk * unit_bytes > per_warp) --p.chunk;
  const int copies = divide_up(units, p.chunk) * passes, slot_bytes = p.chunk * unit_bytes;
  p.slots = std::max(std::min({copies, kMostSlots, per_warp / slot_bytes}), 1);
  while (p.warps_k > 1 && p.slots * slot_bytes < kSumBytes * record.tiles) ++p.slots;
  p.bytes = p.ring + warps * p.slots * p.chunk * unit_bytes;
  return p;
}

// Pieces of activations, of all columns, that a warp of a thread block may quantise before it multiplies.
constexpr int kMostQuantised = 2;

inline bool quantises_first(const Call& a, const Plan& p) {
  const int pieces = quantise_pieces(p.groups_of_part.each, a.group) * p.record.columns;
  return pieces > kMostQuantised * num_warps(p.record.tiles);
}

}  // namespace turboquant::cuda::linear
