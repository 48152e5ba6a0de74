// Puts pairs into the order of their experts, and cuts them into pieces. A thread block for each expert counts the
// pairs of all of them in shared memory, which tells where its own begin, and puts those there in the order that they
// have: which piece a pair is in decides in which order a tile's sums are added.
#include "cuda/linear/experts/arrange.cuh"

#include "choices/linear.h"
#include "cuda/common/torch.cuh"

namespace turboquant::cuda::linear {
namespace {

constexpr int kArrangeThreads = 1024;
constexpr int kThreadExperts = kMostExperts / kArrangeThreads;  // whose pieces a thread writes

struct PairsAndPieces {
  int pairs, pieces;
};

// The sum of what the threads before this one have, and of what all have in `total`. All threads call it once.
__device__ __forceinline__ PairsAndPieces sum_before(PairsAndPieces own, PairsAndPieces (&of_warps)[32],
                                                     PairsAndPieces& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  PairsAndPieces sum = own;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int pairs = __shfl_up_sync(0xffffffff, sum.pairs, distance);
    const int pieces = __shfl_up_sync(0xffffffff, sum.pieces, distance);
    if (lane >= distance) sum.pairs += pairs, sum.pieces += pieces;
  }
  if (lane == 31) of_warps[warp] = sum;
  __syncthreads();
  PairsAndPieces before{};
  total = {};
  for (int i = 0; i < kArrangeThreads / 32; ++i) {
    if (i < warp) before.pairs += of_warps[i].pairs, before.pieces += of_warps[i].pieces;
    total.pairs += of_warps[i].pairs, total.pieces += of_warps[i].pieces;
  }
  return {before.pairs + sum.pairs - own.pairs, before.pieces + sum.pieces - own.pieces};
}

// The grid has a thread block for each expert, and one for the pairs without. columns: the most pairs of a piece.
__global__ void __launch_bounds__(kArrangeThreads)
    arrange_pairs(const __grid_constant__ Pairs a, const __grid_constant__ Arrangement to, int columns) {
  __shared__ int counts[kMostExperts];  // pairs of each expert
  __shared__ PairsAndPieces of_warps[32];
  __shared__ PairsAndPieces start;  // the pairs and pieces of the experts before this one
  __shared__ int of_runs[32];       // pairs of this expert in a warp's run
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, own = blockIdx.x;
  const int first = threadIdx.x * kThreadExperts;
#pragma unroll
  for (int i = 0; i < kThreadExperts; ++i) counts[first + i] = 0;
  __syncthreads();
  let_next_kernel_begin();
  wait_for_previous_kernel();
  const auto expert_of_pair = [&](int pair) { return expert_of(a.chosen[pair], a.experts); };
#pragma unroll 4
  for (int i = threadIdx.x; i < a.count; i += kArrangeThreads) {
    if (const int expert = expert_of_pair(i); expert < a.experts) atomicAdd(counts + expert, 1);
  }
  __syncthreads();
  const auto pieces_of = [&](int count) { return count > 0 ? quotient(count - 1, columns) + 1 : 0; };
  PairsAndPieces mine{}, total;
#pragma unroll
  for (int i = 0; i < kThreadExperts; ++i) mine.pairs += counts[first + i], mine.pieces += pieces_of(counts[first + i]);
  PairsAndPieces at = sum_before(mine, of_warps, total);
#pragma unroll
  for (int i = 0; i < kThreadExperts; ++i) {
    if (first + i == own) start = at;
    at.pairs += counts[first + i], at.pieces += pieces_of(counts[first + i]);
  }
  if (threadIdx.x == 0 && own == a.experts) {
    start = total;
    to.totals[0] = total.pieces, to.totals[1] = total.pairs;
  }
  // Each warp has a run of neighbouring pairs, so that those of the expert stay in their order.
  const int length = (ceil_div(a.count, kArrangeThreads)) * 32;
  const int begin = min(a.count, warp * length), end = min(a.count, begin + length);
  int found = 0;
#pragma unroll 4
  for (int i = begin + lane; i < end; i += 32) found += expert_of_pair(i) == own;
  found = sum_of_lanes(found);
  if (lane == 0) of_runs[warp] = found;
  __syncthreads();
  int place = start.pairs + sum_of_lanes(lane < warp ? of_runs[lane] : 0);
#pragma unroll 1
  for (int i = begin; i < end; i += 32) {
    const int pair = i + lane;
    const bool is = pair < end && expert_of_pair(pair) == own;
    const uint32_t those = __ballot_sync(0xffffffff, is);
    if (is) {
      const int to_place = place + __popc(those & ((1u << lane) - 1));
      if (to.order) to.order[to_place] = pair;
      if (to.slots) to.slots[to_place] = own < a.experts ? start.pieces * columns + to_place - start.pairs : -1;
      if (to.tokens) to.tokens[to_place] = quotient(pair, a.choices);
      if (to.places) to.places[pair] = to_place;
    }
    place += __popc(those);
  }
  const int count = own < a.experts ? counts[own] : 0;
  for (int i = threadIdx.x; i < pieces_of(count); i += kArrangeThreads) {
    to.pieces[start.pieces + i] = {own, start.pairs + i * columns, min(columns, count - i * columns), 0};
  }
}

}  // namespace

void arrange(const Pairs& pairs, const Arrangement& to, int columns, const Device& device, cudaStream_t stream) {
  void* arguments[] = {const_cast<Pairs*>(&pairs), const_cast<Arrangement*>(&to), &columns};
  check_cuda(launch_early(reinterpret_cast<const void*>(&arrange_pairs), pairs.experts + 1, kArrangeThreads, 0,
                          arguments, stream, device.facts.major),
             "linear_experts");
}

}  // namespace turboquant::cuda::linear
