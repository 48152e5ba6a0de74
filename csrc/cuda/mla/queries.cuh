// Queries as operands of the products with codes and with rotary channels, and what else a row of scores needs.
#pragma once

#include "cuda/common/wgmma.cuh"
#include "cuda/mla/expansion.cuh"

namespace turboquant::cuda::mla {

// All warps call it: each prepares some rows of the segment's block of rows.
//
// A latent query is multiplied by inverse and signs and transformed (docs/format.md section 13), times a power of two
// that makes its largest channel about 2^13, and rounded to float16; a factor of 1/16 cancels the 16 of odd pairs.
template <class S>
__device__ __forceinline__ void prepare_queries(const BlockView& block, const Segment& segment) {
  using Rotation = typename S::Rotation;
  constexpr int kPerLane = Rotation::kPerLane;
  const Latents& x = block.call;
  const Attention& a = x.a;
  const int lane = block.lane, rope_dim = x.record.rope_dim;
  const float to_base_2 = a.softmax_scale * kLog2E;
#pragma unroll 1
  for (int r = block.warp; r < S::kRows; r += S::kWarps) {
    const int index = segment.block * S::kRows + r;
    const bool exists = index < segment.work.rows(a);
    float y[kPerLane] = {}, center = 0;
    RowPlace place{};
    if (exists) {
      place = place_of_row(a, segment.sequence, segment.work.length, segment.work.queries, index);
      load_as<Rotation>(a.q, a.dtype, place.token * a.q_token_stride + place.head * a.q_head_stride, lane, y);
    }
    if (a.channels.center) {
      float c[kPerLane];
      load<Rotation>(a.channels.center, lane, c);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) center = fmaf(y[i], c[i], center);
    }
    if (a.channels.inverse) apply_signs<Rotation>(y, a.channels.inverse, lane);
    if (x.signs) {
      apply_signs<Rotation>(y, x.signs, lane);
      transform<Rotation>(y, lane);
    }
    float most = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) most = fmaxf(most, fabsf(y[i]));
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) {
      most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, bit));
      center += __shfl_xor_sync(0xffffffff, center, bit);
    }
    // exponents so that neither power leaves the normal numbers
    const int e = most > 0 && most < INFINITY ? min(max(12 - (__float_as_int(most) >> 23) + 127, -100), 100) : 0;
    const float up = __int_as_float((127 + e) << 23), down = __int_as_float((127 - e) << 23);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const ChannelPlace at =
          place_of_channel<S::kKind>(Rotation::channel(lane, i / Rotation::kVec) + i % Rotation::kVec);
      const __half v = __float2half_rn(y[i] * up * (S::kKind == kNibbles && at.high ? 1.0f / 16 : 1.0f));
      sum = fmaf(__half2float(v), S::kKind == kNibbles && at.high ? 16.0f : 1.0f, sum);
      *reinterpret_cast<__half*>(block.queries() + at.step * S::kStepBytes + place_in_operand(S::kRowTiles, r, at.k)) = v;
    }
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) sum += __shfl_xor_sync(0xffffffff, sum, bit);
    for (int c = lane; c < rope_dim; c += 32) {
      const int64_t at = place.token * x.rope_token_stride + place.head * x.rope_head_stride + c;
      const uint16_t v = exists ? static_cast<const uint16_t*>(x.q_rope)[at] : uint16_t{0};
      *reinterpret_cast<uint16_t*>(block.queries() + (S::kSteps + c / 16) * S::kStepBytes +
                                   place_in_operand(S::kRowTiles, r, c % 16)) = v;
    }
    if (lane == 0) {
      RowConstants& row = block.rows()[r];
      row.scale = S::kMult * (1 << 24) * format::kLevelUnit * down;
      row.start = sum * (-S::kOffset / (S::kMult * (1 << 24)));
      row.shift = center * to_base_2;
      row.first = INT32_MIN, row.end = INT32_MAX;  // nobody reads the results of a row that does not exist
      if (exists) {
        const RowSight sight =
            sight_of(a, segment.sequence, segment.work.length, segment.work.queries, place.position);
        row.first = sight.first, row.end = sight.end;
      }
    }
  }
  publish_operands();
  __syncthreads();
  if (block.warp == 0) {
    int first = INT32_MIN, end = INT32_MAX;
    for (int r = lane; r < S::kRows; r += 32) {
      first = max(first, block.rows()[r].first), end = min(end, block.rows()[r].end);
    }
    first = max_of_lanes(first), end = ~max_of_lanes(~end);
    if (lane == 0) block.notes().first_all = first, block.notes().end_all = end;
  }
  __syncthreads();
}

}  // namespace turboquant::cuda::mla
