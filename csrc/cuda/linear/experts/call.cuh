// A call of linear_experts as the kernels of few tokens see it, and how the thread blocks of a launch share its work.
#pragma once

#include "cuda/linear/call.cuh"
#include "cuda/linear/pieces.cuh"

namespace turboquant::cuda::linear::experts {

struct Call : linear::Call {  // x: [tokens, k]; packed, bias: of all experts; y: [pairs, n]
  Pairs pairs;
  Arrangement arranged;
  int64_t weight_bytes;  // of an expert
};

// Whether there is a kernel for so many tiles of columns. With products of warpgroups another one is faster for larger
// pieces. Without them nobody measured two tiles, and the library is smaller.
__host__ __device__ constexpr bool has_kernel(int tiles, bool warpgroup_products) {
  return warpgroup_products ? tiles <= 2 : tiles != 2;
}

struct Plan : StreamPlan {
  int slabs;             // of 16 rows, of an expert's weight
  int warps_rows;        // slabs that a thread block has at a time
  int warps_k;           // warps that share the channels of a slab
  Share groups_of_warp;  // of a slab
  int pairs;             // where the pairs of the columns are in shared memory
  int arranged;          // where the thread block arranges pairs in shared memory; 0: another kernel has done it
  int join;              // where the sums of warps meet that share a slab
  int blocks;            // thread blocks
};

}  // namespace turboquant::cuda::linear::experts
