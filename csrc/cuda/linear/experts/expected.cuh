// How many pieces a call will have, before the device knows them. Host only.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/linear/pieces.cuh"
#include "cuda/linear/plan.cuh"

namespace turboquant::cuda::linear {

// How many pieces of up to `columns` pairs there are on average, if every pair has any expert with the same
// probability: the pairs of an expert have a Poisson distribution.
inline double expected_pieces(const Pairs& pairs, int columns) {
  const double experts = pairs.experts, mean = pairs.count / experts;
  if (mean > 200) return experts * (mean / columns + 0.5);
  double probability = std::exp(-mean), pieces = 0;
  for (int count = 1; count <= 400; ++count) {
    probability *= mean / count;
    pieces += probability * parts_of(count, columns);
  }
  return experts * pieces;
}

}  // namespace turboquant::cuda::linear
