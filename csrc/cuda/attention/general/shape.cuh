// How the general attention kernel cuts its work: which rows and keys a thread block holds at once, and which of them
// belong to a thread.
//
// A row is one query of one query head. Rows are multiplied in strips: 16 rows are one tensor-core product of a warp,
// 64 rows one of a warpgroup. A team is the warps that hold the same strips: on Hopper the four warps of a warpgroup,
// elsewhere the warps that share rows and divide the value channels among themselves. Keys are taken kKeys at a time,
// which is called a step.
#pragma once

#include <cuda_runtime.h>

namespace turboquant::cuda::general {

// DIM: channels, d rounded up. ROW_WARPS x COLUMN_WARPS warps have STRIPS strips each and divide the value channels by
// COLUMN_WARPS. With two BUFFERS the keys of the next step are expanded while those of this step are multiplied.
// STAGED: codes are copied to shared memory two steps ahead. HOPPER: products of warpgroups (common/wgmma.cuh).
template <int DIM, int STRIPS, int ROW_WARPS, int COLUMN_WARPS, int KEYS, int BUFFERS, bool STAGED, bool HOPPER = false>
struct Shape {
  static constexpr int kDim = DIM, kStrips = STRIPS, kRowWarps = ROW_WARPS, kColumnWarps = COLUMN_WARPS, kKeys = KEYS;
  static constexpr int kBuffers = BUFFERS;
  static constexpr bool kStaged = STAGED, kHopper = HOPPER;

  static constexpr int kWarps = ROW_WARPS * COLUMN_WARPS, kThreads = 32 * kWarps;
  static constexpr int kStripRows = HOPPER ? 64 : 16;
  static constexpr int kTeamRows = kStripRows * STRIPS;
  static constexpr int kRows = 16 * STRIPS * ROW_WARPS;
  static constexpr int kLaneRows = 2 * STRIPS;  // rows of which a lane holds some columns

  // Slices are the channels that a warp multiplies at once: 32 of keys in two products, 16 of values.
  static constexpr int kChannelOctets = DIM / 8, kKeySlices = DIM / 32, kValueSlices = DIM / 16;
  static constexpr int kWarpSlices = kValueSlices / COLUMN_WARPS;  // of values, those that a warp sums
  static constexpr int kProductChannels = DIM % 64 ? 32 : 64;      // value channels of a warpgroup's product
  static constexpr bool kWhole =
      DIM <= 256;  // the zeros between d and DIM are multiplied too, which costs less than to skip them

  static constexpr int kKeyOctets = KEYS / 8, kValueBlocks = KEYS / 16;
  static constexpr int kOperandWords = KEYS * DIM / 8;  // of 16 bytes: the keys (or values) of a step as float16
  static constexpr int kThreadWords = kOperandWords / kThreads;
  static_assert(kOperandWords % kThreads == 0 && kWarps % kKeyOctets == 0 && kWarps % kValueBlocks == 0);
  static_assert(kValueSlices % COLUMN_WARPS == 0);
};

// A thread's place in its block. In a tensor-core fragment a lane holds row (or column) g = lane / 4 and the pair t =
// lane % 4.
template <typename S>
struct Thread {
  int index, warp, lane, g, t, row_warp, column_warp;

  __device__ __forceinline__ Thread()
      : index(threadIdx.x), warp(threadIdx.x / 32), lane(threadIdx.x % 32), g(lane / 4), t(lane % 4),
        row_warp(warp % S::kRowWarps), column_warp(warp / S::kRowWarps) {}

  // The first row of this warp's team, and row i of those of which this lane holds some columns.
  __device__ __forceinline__ int team_row() const { return (S::kHopper ? warp / 4 : row_warp) * S::kTeamRows; }
  __device__ __forceinline__ int lane_row(int i) const {
    return team_row() + i / 2 * S::kStripRows + (S::kHopper ? warp % 4 * 16 : 0) + i % 2 * 8 + g;
  }
};

}  // namespace turboquant::cuda::general
