// linear_experts: the kernel of few columns, with a weight that is chosen for each column.
//
// A column is a pair of a token and one of its experts, and a block of columns has one. The experts are known when the
// previous kernel has ended, so nothing of a weight is read before.
#pragma once

#include "cuda/linear/choice.cuh"
#include "cuda/linear/kernel.cuh"

namespace turboquant::cuda::linear {

// Zeros for a column whose expert does not exist.
__device__ inline void store_zeros(const Call& a, const Plan& p) {
  if (blockIdx.x != 0) return;  // parts share rows
  const int64_t first = int64_t{p.slabs_of_block.begin(blockIdx.y)} * 16;
  const int64_t end = min(a.n, int64_t{p.slabs_of_block.begin(blockIdx.y + 1)} * 16);
  with_float_type(a.dtype, [&](auto tag) {
    using Element = typename decltype(tag)::type;
    auto* const y = static_cast<Element*>(a.y) + blockIdx.z * a.n;
    for (int64_t row = first + threadIdx.x; row < end; row += blockDim.x) y[row] = static_cast<Element>(0.0f);
  });
}

template <Codes CODES, bool SUB>
__global__ void __launch_bounds__(32 * num_warps(1), 1)
    experts_kernel(const __grid_constant__ Call a, const __grid_constant__ Plan p, const __grid_constant__ Choice c) {
  extern __shared__ uint4 dynamic[];
  wait_for_previous_kernel();
  const int64_t pair = blockIdx.z, expert = c.experts[pair];
  if (expert < 0 || expert >= c.count) return store_zeros(a, p);
  // A block takes its column for that of x and of the quantised activations: both are moved so that it is the token.
  Call own = a;
  Plan plan = p;
  const int64_t moved = pair / c.choices - pair;
  own.packed += expert * c.weight_bytes;
  with_float_type(a.dtype, [&](auto tag) {
    using Element = typename decltype(tag)::type;
    own.x = static_cast<const Element*>(a.x) + moved * a.x_stride;
    if (a.bias) own.bias = static_cast<const Element*>(a.bias) + expert * a.n;
  });
  if (p.records) plan.records += moved * a.groups * p.record.bytes();
  Block<CODES, SUB, 1> block(own, plan, reinterpret_cast<uint8_t*>(dynamic));
  block.run();
}

}  // namespace turboquant::cuda::linear
