// Queries as operands of the products with codes and with rotary channels, and what else a row of scores needs.
#pragma once

#include "cuda/common/wgmma.cuh"
#include "cuda/mla/expansion.cuh"

namespace turboquant::cuda::mla {

constexpr float kMostQuery = 32512;    // 127 * 256: the high byte of the largest channel is 127
constexpr float kLeastQuery = 1e-30f;  // queries of no larger channel count as 0

// The column of the high byte of row n, whose low byte's is the next one: a lane then has the sums of both, of the rows
// that it has in products of float16 (mla/scores.cuh).
__device__ __forceinline__ int byte_column(int n) { return 8 * (n / 8 * 2 + n % 2) + n % 8 / 2 * 2; }

// All warps call it: each prepares some rows of the segment's block of rows.
//
// A latent query is multiplied by inverse and signs and transformed (docs/format.md section 12), and rounded to
// integers of 16 bits, whose high and low bytes are columns of their own.
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
    for (int i = 0; i < kPerLane; ++i) most = max_or_nan(most, fabsf(y[i]));
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) {
      most = max_or_nan(most, __shfl_xor_sync(0xffffffff, most, bit));
      center += __shfl_xor_sync(0xffffffff, center, bit);
    }
    const float up = most > kLeastQuery ? kMostQuery / most : 0;
    int sum = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const ChannelPlace at =
          place_of_channel(block.plan.kind, Rotation::channel(lane, i / Rotation::kVec) + i % Rotation::kVec);
      const int v = __float2int_rn(y[i] * up), high = v + 128 >> 8;
      sum += v;
      uint8_t* to = block.queries() + at.step * S::kByteStep + at.k / 16 * (2 * S::kRowTiles * 128) + at.k % 16 +
                    byte_column(r) * 16;
      to[0] = static_cast<uint8_t>(high), to[16] = static_cast<uint8_t>(v - 256 * high);
    }
    sum = sum_of_lanes(sum);
    for (int c = lane; c < rope_dim; c += 32) {
      const int64_t at = place.token * x.rope_token_stride + place.head * x.rope_head_stride + c;
      const uint16_t v = exists ? static_cast<const uint16_t*>(x.q_rope)[at] : uint16_t{0};
      *reinterpret_cast<uint16_t*>(block.queries() + S::kQueryBytes + c / 16 * S::kStepBytes +
                                   place_in_operand(S::kRowTiles, r, c % 16)) = v;
    }
    if (lane == 0) {
      RowConstants& row = block.rows()[r];
      const Kind kind = block.plan.kind;
      row.scale = level_step(kind) * format::kLevelUnit * (most <= kLeastQuery ? 0 : most / kMostQuery);
      row.start = kind == kBytes ? 0 : sum * (-level_offset(kind) / level_step(kind));
      row.shift = center * to_base_2;
      row.first = INT32_MIN, row.end = INT32_MAX;  // a row that does not exist: nothing is masked for it
      if (exists) {
        const RowSight sight = sight_of(a, segment.sequence, segment.work.length, segment.work.queries, place.position);
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
