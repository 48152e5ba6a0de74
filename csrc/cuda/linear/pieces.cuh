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
inline int64_t most_pieces(const Pairs& pairs, int columns) {
  const int64_t most = int64_t{pairs.count / columns} + pairs.experts;
  return pairs.count < most ? pairs.count : most;
}

// Bytes of an arrangement of up to `pieces` pieces, with `orders` numbers of each pair: none, `order`, or `slots` too.
__host__ __device__ constexpr int64_t arrangement_bytes(int64_t pairs, int64_t pieces, int orders) {
  const int64_t bytes =
      static_cast<int64_t>(sizeof(Piece)) * (1 + pieces) + static_cast<int64_t>(sizeof(int)) * orders * pairs;
  return (bytes + 15) / 16 * 16;
}
// Its parts. memory: aligned to 16 bytes
__host__ __device__ inline Arrangement arrangement_in(void* memory, int64_t pairs, int64_t pieces, int orders) {
  auto* const first = static_cast<Piece*>(memory) + 1;
  auto* const order = reinterpret_cast<int*>(first + pieces);
  return {.totals = static_cast<int*>(memory),
          .pieces = first,
          .order = orders > 0 ? order : nullptr,
          .slots = orders > 1 ? order + pairs : nullptr,
          .tokens = nullptr,
          .places = nullptr};
}

// The expert of a choice; `experts` if none has this number.
__device__ __forceinline__ int expert_of(int64_t choice, int experts) {
  return choice >= 0 && choice < experts ? static_cast<int>(choice) : experts;
}

// Zeros as the results [n] of a pair that has no expert; the threads of the block share them.
__device__ __forceinline__ void clear_results(int pair, void* y, Dtype dtype, int64_t n) {
  const int64_t words = n * (dtype == Dtype::kFloat32 ? 2 : 1);  // of 16 bits
  auto* const to = static_cast<uint16_t*>(y) + pair * words;
  for (int64_t i = threadIdx.x; i < words; i += blockDim.x) to[i] = 0;
}

}  // namespace turboquant::cuda::linear
