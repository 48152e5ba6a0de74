// The kernel that stores the latents of a decode step: few tokens of 512 channels.
//
// Between the kernels of a model nothing is in the caches, neither instructions nor a table of candidates, so the
// shortest code is the fastest. A block has a token. Each of its first eight warps holds the latent, as the step
// encoder holds a key (codec/encode_step.cu), and tries one candidate of the step by a binary search in registers; four
// of them store a quarter of the codes each. All loads are issued before the first of them is waited for. The ninth
// warp stores the raw channels, the tenth the exact tail.
#pragma once

#include "choices/mla.h"
#include "cuda/codec/encode_step_vector.cuh"
#include "cuda/mla/store.cuh"

namespace turboquant::cuda {

// Warps of a block: one for each candidate, and two more.
constexpr int kCodeWarps = choices::kMostCandidates, kStoreStepWarps = kCodeWarps + 2;

__global__ void __launch_bounds__(32 * kStoreStepWarps) store_step_kernel(const __grid_constant__ LatentStore a) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800  // choose_latent_store asks
  using namespace encode_step;
  using Traits = StepTraits<9>;
  constexpr int kQuads = Traits::kChunks, kPerLane = Traits::kPerLane, kDim = Traits::kDim;
  static_assert(kDim == kStoreStepDim && kQuads <= kCodeWarps);
  let_next_kernel_begin();  // the next kernel is usually mla_attention's
  __shared__ alignas(16) PairBoundaries boundaries[kMostCandidates];
  __shared__ alignas(16) PairLevels levels[kCodeWarps];  // a copy for every warp, so that none waits for another
  __shared__ float steps[kMostCandidates];
  __shared__ int2 sums[kMostCandidates];
  __shared__ uint16_t selectors[kMostCandidates][kQuads][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t token = blockIdx.x, slot = a.slots[token];
  if (warp >= kCodeWarps) {
    const Token to = a.pages.token(slot, 0, a.layout);
    if (!to.tile) return;
    if (warp == kCodeWarps) return a.store_raw(token, to, lane);
    if (uint8_t* exact = a.exact_row(token, kDim)) a.store_exact(token, kDim, exact, lane);
    return;
  }

  const Width width = a.book.width;
  // Two lanes load the same entry, and write it.
  const int number_j = lane % kMostBoundaries;
  const PairEntry entry(format::num_bits(width), a.book.levels, a.book.steps, a.book.num_steps, warp, number_j);
  const uint8_t* from = static_cast<const uint8_t*>(a.latent) + token * a.latent_stride * element_size(a.dtype);
  uint32_t word[kQuads][2];
  load_words<Traits>(from, lane, word);
  float signs[kPerLane], center[kPerLane] = {}, factor[kPerLane] = {};
  load<Traits>(a.signs, lane, signs);
  if (a.channels.center) load<Traits>(a.channels.center, lane, center);
  if (a.channels.scale) load<Traits>(a.channels.scale, lane, factor);

  float x[kPerLane], y[kPerLane];
  prepare_channels<Traits>(word, a.dtype == Dtype::kFloat16, a.channels.center, center, a.channels.scale, factor, signs,
                           x);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) y[i] = x[i];
  butterflies<Traits>(y, lane);
  boundaries[warp].at[number_j] = entry.boundary();  // independent work, to hide the latency of the shuffles
  steps[warp] = entry.step, levels[warp].of[number_j] = entry.level();
  __syncwarp();
  const StepVector<Traits> vector(x, y, lane);
  Quad quads[kQuads];
#pragma unroll
  for (int q = 0; q < kQuads; ++q) quads[q] = Quad(y + 4 * q, vector.scaled.k);
  const QuadLevels of_magnitude{*reinterpret_cast<const uint4*>(levels[warp].of)};
  const auto leave = [&](const auto& tried) {
    tried.put_selectors(selectors[warp], lane);
    const int2 sum = tried.sums();
    if (lane == 0) sums[warp] = sum;
  };
  if (format::fits_nibble(width)) {
    leave(Tried<Traits, false>(quads, boundaries[warp], of_magnitude));
  } else {
    leave(Tried<Traits, true>(quads, boundaries[warp], of_magnitude));
  }
  sync_threads(1, 32 * kCodeWarps);

  // Four warps find the best candidate, and store the codes of one quad of each lane.
  if (warp >= kQuads) return;
  const int2 sum = lane < a.book.num_steps ? sums[lane % kMostCandidates] : make_int2(0, 0);
  const Fit fit = Fit::of_sums(sum.x, sum.y, steps[lane % kMostCandidates]);
  const int kept = best_lane<32>(fit, 0);
  const Token to = a.pages.token(slot, 0, a.layout);
  Quad own = quads[0];
#pragma unroll
  for (int q = 1; q < kQuads; ++q) {
    if (q == warp) own = quads[q];
  }
  const QuadCodes codes(own, selectors[kept][warp][lane], width, vector.finite);
  constexpr int kWords = kDim / 2 / format::kLatentWord;  // of a row of nibbles
  const int at = format::swapped_word(kWords, to.number, 4 * warp + lane / 8) * format::kLatentWord + lane % 8 * 2;
  put_step_key(codes.low, codes.high, width, lane, to.tile, to.key_row(a.layout) + at,
               to.key_plane(a.layout) + warp * (Traits::kLanes / 2));
  if (warp > 0) return;
  const uint16_t scale = vector.scale(fit, a.book.scale_mode);
  if (to.tile && lane == kept) *to.key_scale(a.layout) = scale;
#endif
}

inline void launch_store_step(const LatentStore& a, cudaStream_t stream) {
  store_step_kernel<<<static_cast<unsigned>(a.tokens), 32 * kStoreStepWarps, 0, stream>>>(a);
}

}  // namespace turboquant::cuda
