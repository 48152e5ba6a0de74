// The kernel that puts pairs into the order of their experts.
#pragma once

#include "cuda/common/device_facts.cuh"
#include "cuda/linear/pieces.cuh"

namespace turboquant::cuda::linear {

constexpr int kMostExperts = 4096;

// Memory of an arrangement in pieces of up to `columns`, with `orders` numbers of each pair, and its parts. memory:
// aligned to 16 bytes.
inline int64_t arrangement_bytes(const Pairs& pairs, int columns, int orders) {
  const int64_t bytes = static_cast<int64_t>(sizeof(Piece)) * (1 + most_pieces(pairs.count, pairs.experts, columns)) +
                        static_cast<int64_t>(sizeof(int)) * orders * pairs.count;
  return (bytes + 15) / 16 * 16;
}
inline Arrangement arrangement_in(void* memory, const Pairs& pairs, int columns, int orders) {
  auto* const pieces = static_cast<Piece*>(memory) + 1;
  auto* const order = reinterpret_cast<int*>(pieces + most_pieces(pairs.count, pairs.experts, columns));
  return {.totals = static_cast<int*>(memory),
          .pieces = pieces,
          .order = order,
          .slots = orders > 1 ? order + pairs.count : nullptr,
          .tokens = nullptr,
          .places = nullptr};
}

// Arranges pairs in pieces of up to `columns`.
void arrange(const Pairs& pairs, const Arrangement& to, int columns, const Device& device, cudaStream_t stream);

}  // namespace turboquant::cuda::linear
