// Puts few pairs into the order of their experts in shared memory, for a thread block that multiplies them: a launch of
// the kernel that arranges more (arrange.cu) would take as long as the products of one token.
#pragma once

#include "cuda/linear/pieces.cuh"

namespace turboquant::cuda::linear::experts {

constexpr int kMostArrangedPairs = 256;  // no more than a thread block has threads

// Bytes of shared memory, and the arrangement there. Nobody asks for its slots; arrange_few works in their memory.
__host__ __device__ constexpr int few_bytes(int pairs) { return static_cast<int>(arrangement_bytes(pairs, pairs, 2)); }
__device__ __forceinline__ Arrangement few_in(uint8_t* memory, int pairs) {
  return arrangement_in(memory, pairs, pairs, 2);
}

// Writes the arrangement few_in(memory, count). All threads of the block call it. columns: the most pairs of a piece.
// One copy of the code is enough for all kernels of a file; by value, because addresses would keep arguments in memory.
__device__ __noinline__ void arrange_few(const int64_t* chosen, int count, int experts, int columns, uint8_t* memory) {
  const Arrangement to = few_in(memory, count);
  int* const keys = to.slots;  // twice the expert of a pair, plus 1 if a piece begins with it
  const int pair = threadIdx.x;
  const bool exists = pair < count;
  int expert = experts;  // none
  if (exists) {
    expert = expert_of(chosen[pair], experts);
    keys[pair] = 2 * expert;
  }
  __syncthreads();
  int smaller = 0, before = 0, same = 0;  // pairs of experts with smaller numbers; of its own, those before it and all
  if (exists) {
#pragma unroll 4
    for (int i = 0; i < count; ++i) {
      const int other = keys[i];
      smaller += other < 2 * expert, same += other == 2 * expert, before += other == 2 * expert && i < pair;
    }
    to.order[smaller + before] = pair;
  }
  const int with_expert = __syncthreads_count(exists && expert < experts);
  const int earlier = quotient(before, columns);  // pieces of this expert
  const bool begins = exists && expert < experts && before == earlier * columns;
  if (begins) ++keys[pair];
  const int pieces = __syncthreads_count(begins);
  if (begins) {
    int piece = earlier;
#pragma unroll 4
    for (int i = 0; i < count; ++i) piece += keys[i] < 2 * expert ? keys[i] & 1 : 0;
    to.pieces[piece] = {expert, smaller + before, min(columns, same - before), 0};
  }
  if (threadIdx.x == 0) to.totals[0] = pieces, to.totals[1] = with_expert;
  __syncthreads();
}

}  // namespace turboquant::cuda::linear::experts
