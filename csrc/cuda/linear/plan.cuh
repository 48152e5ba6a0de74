// How a call of up to 64 columns is shared by thread blocks and warps.
#pragma once

#include <algorithm>

#include "choices/device.h"
#include "cuda/linear/call.cuh"

namespace turboquant::cuda::linear {

// Shared memory that makes a second block of a multiprocessor worth while.
constexpr int kLeastRoom = 64 << 10;
constexpr int kSumBytes = 512;  // of a warp's sums of 16 rows and a tile of columns

inline int divide_up(int64_t x, int64_t y) { return static_cast<int>((x + y - 1) / y); }

// What a part of the rows costs besides reading its units, in units: writing, counting, waiting for others.
constexpr int kJoinUnits = 40;

constexpr int kCopyUnits = 2;  // that a warp copies at a time

// tiles: of the kernel
inline Plan plan_of(const Call& a, int unit_bytes, const RecordOfColumns& record, int tiles, const DeviceFacts& facts) {
  Plan p{};
  p.record = record, p.unit_bytes = unit_bytes;
  p.slabs = divide_up(a.n, 16);
  // The next launch finds room beside this one even where a multiprocessor has one block of it.
  const auto room_of = [&](int blocks) {
    return std::min(facts.shared_per_block, facts.shared_per_multiprocessor / blocks - kReservedSharedBytes);
  };
  int fit = blocks_per_multiprocessor(tiles);
  if (room_of(fit) < kLeastRoom) fit = 1;
  const int room = room_of(fit);
  // Of a warp: whole units that have room for its sums, which meet those of others there.
  const int least_ring = kWarps * unit_bytes * divide_up(kSumBytes * tiles, unit_bytes);
  const int most_records = std::min(room / 2, room - kHeaderBytes - 128 - least_ring);
  int64_t least = INT64_MAX;
  for (int each = fit; each > 0; --each) {
    for (int parts = 1; parts <= a.groups; ++parts) {
      const int groups = divide_up(a.groups, parts);
      if (int64_t{groups} * record.bytes() > most_records && parts < a.groups) continue;
      const int row_blocks = std::min(p.slabs, std::max(each * facts.multiprocessors / parts, 1));
      const int blocks = divide_up(int64_t{parts} * row_blocks, facts.multiprocessors);  // of a multiprocessor
      const int64_t cost = int64_t{divide_up(p.slabs, row_blocks)} * groups * blocks + (parts > 1 ? kJoinUnits : 0);
      if (cost < least) least = cost, p.parts = parts, p.row_blocks = row_blocks, p.per_multiprocessor = each;
      if (parts >= each * facts.multiprocessors) break;
    }
  }
  const int slabs = divide_up(p.slabs, p.row_blocks), passes = divide_up(slabs, kWarps);
  p.warps_rows = divide_up(slabs, passes);
  const int groups = divide_up(a.groups, p.parts);
  p.warps_k = std::min(kWarps / p.warps_rows, groups);
  const int units = divide_up(groups, p.warps_k);
  p.ring = (kHeaderBytes + groups * record.bytes() + 127) / 128 * 128;
  const int per_warp = (room - p.ring) / kWarps;
  p.chunk = std::min(kCopyUnits, units);
  while (p.chunk > 1 && 2 * p.chunk * unit_bytes > per_warp) --p.chunk;
  const int copies = divide_up(units, p.chunk) * passes, slot_bytes = p.chunk * unit_bytes;
  p.slots = std::max(std::min({copies, kMostSlots, per_warp / slot_bytes}), 1);
  while (p.warps_k > 1 && p.slots * slot_bytes < kSumBytes * tiles) ++p.slots;
  p.bytes = p.ring + kWarps * p.slots * p.chunk * unit_bytes;
  return p;
}

// Spans of 1,024 channels, of all columns, that the warps of a thread block may quantise before they multiply.
constexpr int kMostQuantised = 8;

inline bool quantises_first(const Call& a, const Plan& p) {
  return quantise_spans(divide_up(a.groups, p.parts), a.group) * p.record.columns > kMostQuantised;
}

}  // namespace turboquant::cuda::linear
