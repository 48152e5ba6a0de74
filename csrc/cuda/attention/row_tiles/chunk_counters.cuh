// How the blocks of the kernel of chunks (chunks.cuh) wait for each other.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace turboquant::cuda::row_tiles {

// Counters of a launch; tiles of rows: of all long sequences and KV heads.
struct ChunkCounters {
  uint32_t* tasks;     // handed out
  uint32_t* expanded;  // [kMaxSlots] tasks that expanded something in a slot of the ring, in all its uses
  uint32_t* left;      // [kMaxSlots] tiles of rows that have attended to what is there
  uint32_t* uses;      // [kMaxSlots] of a slot that have ended
  uint32_t* turns;     // [tiles of rows] stretches that a tile of rows is done with; 0 again after the last one

  static constexpr int kMaxSlots = 256;
  static constexpr int kFixed = 1 + 3 * kMaxSlots;
  __device__ __forceinline__ explicit ChunkCounters(uint32_t* all)
      : tasks(all), expanded(all + 1), left(expanded + kMaxSlots), uses(left + kMaxSlots), turns(uses + kMaxSlots) {}
};

}  // namespace turboquant::cuda::row_tiles
