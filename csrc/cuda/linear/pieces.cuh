// The pairs of a call of linear_experts, and how they are put into the order of their experts (experts/arrange.cu).
//
// A pair is a token and one of its choices. A piece is some pairs of one expert, which are multiplied together. Which
// pieces there are is known on the device only.
#pragma once

#include <cstdint>

#include "cuda/common/device.cuh"

namespace turboquant::cuda::linear {

struct Piece {
  int expert, first, count, unused;  // pairs `first` to first + count - 1 of the order; 16 bytes
};

// The pairs of a call.
struct Pairs {
  const int64_t* chosen;  // [pairs]: the expert of each
  int count, experts;
  Divisor choices;  // of a token
};

// What the kernel that arranges pairs writes (arrange.cuh). What is null is not wanted.
struct Arrangement {
  int* totals;      // [2]: pieces, and pairs that have an expert; the others are the last of the order
  Piece* pieces;    // [most_pieces(...)], in the order of their experts
  int* order;       // [pairs]: the pairs in their order
  int* slots;       // [pairs]: of pairs in their order, `columns` times the piece plus the place there; -1: no expert
  int64_t* tokens;  // [pairs]: those of pairs in their order
  int64_t* places;  // [pairs]: where in the order a pair is
};

// The most pieces that there are, if a piece has up to `columns` pairs.
constexpr int64_t most_pieces(int64_t pairs, int64_t experts, int64_t columns) {
  const int64_t full = pairs / columns;
  return pairs < full + experts ? pairs : full + experts;
}

// Zeros as the results [n] of a pair that has no expert; the threads of the block share them.
__device__ __forceinline__ void clear_results(int pair, void* y, Dtype dtype, int64_t n) {
  const int64_t words = n * (dtype == Dtype::kFloat32 ? 2 : 1);  // of 16 bits
  auto* const to = static_cast<uint16_t*>(y) + pair * words;
  for (int64_t i = threadIdx.x; i < words; i += blockDim.x) to[i] = 0;
}

}  // namespace turboquant::cuda::linear
