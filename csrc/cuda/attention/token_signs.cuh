// Signs of tokens in sums of products of weights and codes, for kernels that leave these sums to tensor cores.
#pragma once

namespace turboquant::cuda {

// Whether a block of 16 tokens, of the four in a unit, counts negatively: its weights are negated, and so are the levels
// of its values, which leaves their products as they are. Tensor cores add float32 numbers by cutting digits off, so
// sums of codes, which are all positive, would become too small by as many units in the last place as there are
// products: 3% over 131,072 tokens that weigh the same. With such signs they stay near 0, and so does what is cut off.
__host__ __device__ constexpr bool counts_negatively(int block) { return block == 1 || block == 2; }

}  // namespace turboquant::cuda
