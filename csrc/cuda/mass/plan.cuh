// How the work of paged_mass is cut, and where its kernel (mass/kernel.cuh) has everything in shared memory: what the
// host decides about a launch.
#pragma once

#include <algorithm>

#include "choices/device.h"
#include "cuda/attention/general/work_item.cuh"

namespace turboquant::cuda::mass {

using general::Arguments;

constexpr int kStepKeys = 32;  // keys that a warp takes at once: the rows of two products
constexpr int kMostWarps = 8;  // of a block

// Where a stage, the codes of a step, has everything. Rows are copied in lines of whole 16-byte chunks: a line is a
// row, or four rows where a row has no whole chunks. A gap behind each row keeps the rows of eight lanes in different
// banks.
struct Stage {
  int row_stride;                            // bytes from one row to the next
  int line_shift, line_chunks, line_stride;  // rows of a line (log 2), its chunks, bytes from one line to the next
  int lane_shift;                            // lanes that share a line (log 2)
  int planes, scales, bytes;

  Stage() = default;
  explicit Stage(const format::Record& record) {
    const int row = record.key_row_bytes();
    const bool whole = row % 16 == 0;
    const int gap = format::levels_are_codes(record.key_width()) ? 32 : 16;  // a lane reads eight bytes, or four
    row_stride = row + (whole && row % (2 * gap) == 0 ? gap : 0);
    line_shift = whole ? 0 : 2;
    line_chunks = (row << line_shift) / 16, line_stride = row_stride << line_shift;
    lane_shift = 0;
    while (lane_shift < 5 && 1 << lane_shift < line_chunks) ++lane_shift;
    planes = kStepKeys * row_stride;
    scales = planes + kStepKeys * record.key_plane_bytes();
    bytes = scales + kStepKeys * 2;
  }
};

struct MassArguments {
  Arguments x;
  const float* lse;      // [tokens, q_heads]
  float* mass;           // [seqs, kv_heads, keys]
  int64_t keys;          // that `mass` has room for
  int spans, span_keys;  // of a sequence
  Stage stage;
  int stages;      // of a warp, one of which is used while the others are filled
  int warp_bytes;  // of shared memory, for the stages of a warp
};

// Query rows that a warp prepares at once, of 8 n: their loads are in flight together.
TURBOQUANT_HD constexpr int rows_at_once(int n) { return n < 4 ? n : 4; }
// Of 8 n query rows as float16, in slices of 32 channels.
TURBOQUANT_HD constexpr int query_bytes(int n, int head_dim) { return (head_dim + 31) / 32 * 32 * 2 * 8 * n; }

struct LaunchPlan {
  int warps = 0, bytes = 0;  // of a block; no warps: the device has too little shared memory
  int blocks_at_once = 0;    // on the device
};

// Blocks are as large as two of them fit a multiprocessor, else as one does. Fills in what `m` has of that. Queries are
// prepared in the last stage, while the others are filled. own_bytes: shared memory that the kernel has by itself
inline LaunchPlan plan_launch(MassArguments& m, int n, bool exact, int own_bytes, const DeviceFacts& device) {
  const int d = m.x.layout.head_dim, scratch = rows_at_once(n) * d * 4;  // float32 rows of queries
  m.stage = Stage(m.x.a.record);
  for (const int together : {2, 1}) {
    for (int warps = kMostWarps; warps > (together == 2 ? kMostWarps / 2 : 0); warps /= 2) {
      for (const int stages : {3, 2}) {
        m.stages = stages;
        m.warp_bytes = exact ? scratch : (stages - 1) * m.stage.bytes + std::max(m.stage.bytes, scratch);
        const int bytes = query_bytes(n, d) + warps * m.warp_bytes, all = bytes + own_bytes;
        if (all > device.shared_per_block) continue;
        if (together * (all + kReservedSharedBytes) > device.shared_per_multiprocessor) continue;
        return {warps, bytes, together * device.multiprocessors};
      }
    }
  }
  return {};
}

// Cuts the keys of all sequences, which have up to `keys`, into spans. Every span prepares the queries of its sequence,
// which takes as long as some keys, and long spans leave multiprocessors idle at the end. Of the cuts that take about
// as long as the best one if all sequences are equally long, the finest is taken, because sequences may differ.
inline void cut_spans(MassArguments& m, int64_t keys, const LaunchPlan& launch) {
  constexpr int64_t kPreparation = 1024;
  const int64_t heads = std::max<int64_t>(int64_t{m.x.a.seqs} * m.x.a.kv_heads, 1), unit = launch.warps * kStepKeys;
  const int64_t most = std::max<int64_t>(4 * launch.blocks_at_once / heads, 2);
  const auto cut = [&](int64_t parts) {
    m.span_keys = static_cast<int>(std::max<int64_t>((keys + parts * unit - 1) / (parts * unit), 1) * unit);
    m.spans = static_cast<int>(std::max<int64_t>((keys + m.span_keys - 1) / m.span_keys, 1));
    const int64_t waves = (heads * m.spans + launch.blocks_at_once - 1) / launch.blocks_at_once;
    return waves * (m.span_keys + kPreparation);
  };
  int64_t least = INT64_MAX;
  for (int64_t parts = 1; parts <= most; ++parts) least = std::min(least, cut(parts));
  for (int64_t parts = most; cut(parts) > least + least / 16;) --parts;
}

}  // namespace turboquant::cuda::mass
