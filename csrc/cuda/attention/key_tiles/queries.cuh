// Queries as an operand of products with codes, and what else a row of scores needs.
#pragma once

#include "cuda/attention/key_tiles/expansion.cuh"
#include "cuda/attention/key_tiles/shape.cuh"
#include "cuda/attention/query_bytes.cuh"
#include "cuda/attention/softmax_math.cuh"

namespace turboquant::cuda::key_tiles {

// Of channel place `k` of 32 of product `step`, where the high byte of a row stands; the low byte is 16 bytes behind
// it. Core matrices are 8 columns of 16 bytes. They hold the bytes of rows 0, 2, 4 and 6 of eight, or of the others: a
// lane of a product then has the sums of both bytes, of the rows that it has in products of float16 (scores.cuh).
template <class S>
__device__ __forceinline__ int place_of_query(int row, int step, int k) {
  return step * S::kStepBytes + k / 16 * (S::kStepBytes / 2) + row / 8 * 256 + row % 2 * 128 + row % 8 / 2 * 32 +
         k % 16;
}

// Prepares the rows of a segment, a warp for each: as integers of 16 bits in the rotated space.
template <class S>
__device__ __forceinline__ void prepare_queries(const View& block, const split_kv::QueryRows<S::kDim, S::kRows>& rows,
                                                const Segment& segment) {
  using Lanes = split_kv::RowLanes<S::kDim>;
  constexpr int kPer = Lanes::kPerLane;
  const Attention& a = block.call;
  const int lane = block.lane;
  const RowTable table = block.table(S::kRows);
  const format::Channels channels = a.channels.of_head(segment.head, S::kDim);
#pragma unroll 1
  for (int r = block.warp; r < S::kRows; r += kWarps) {
    split_kv::RowPlace place;
    const bool exists = rows.find(segment, r, place);
    float y[kPer], shift = 0;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const int64_t at = place.token * a.q_token_stride + place.head * a.q_head_stride + Lanes::channel(lane, i);
      y[i] = exists ? load_float(a.q, a.dtype, at) : 0;
    }
    if (channels.center) {
#pragma unroll
      for (int i = 0; i < kPer; ++i) shift = fmaf(y[i], channels.center[Lanes::channel(lane, i)], shift);
    }
    if (channels.inverse) Lanes::apply(channels.inverse, lane, y);
    Lanes::apply(block.signs(), lane, y);
    transform<typename Lanes::Rotation>(y, lane);
    float most = 0;
#pragma unroll
    for (int i = 0; i < kPer; ++i) most = max_or_nan(most, fabsf(y[i]));
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) {
      most = max_or_nan(most, __shfl_xor_sync(0xffffffff, most, bit));
      shift += __shfl_xor_sync(0xffffffff, shift, bit);
    }
    // A query that is not finite has no integers, and a factor that is not a number.
    const float up = most > kLeastQuery ? kMostQuery / most : 0;
    int sum = 0;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const int x = __float2int_rn(y[i] * up), high = (x + 128) >> 8;
      const auto at = QueryOperands<S::kDim>::place(block.own.order, Lanes::channel(lane, i));
      uint8_t* to = block.queries() + place_of_query<S>(r, at.frag, 16 * at.half + 4 * at.t + at.byte);
      to[0] = static_cast<uint8_t>(high), to[16] = static_cast<uint8_t>(x - 256 * high);
      sum += x;
    }
    sum = sum_of_lanes(sum);
    if (lane == 0) {
      const float scale = a.softmax_scale * kLog2E;
      const float unit = (most <= kLeastQuery ? 0 : most / kMostQuery) * format::kLevelUnit * scale;
      table.factor[r] = unit * block.own.key_step, table.start[r] = -unit * block.own.key_offset * sum;
      table.shift[r] = shift * scale;
      table.first[r] = exists ? max(a.first_visible(place.position), segment.work.tail.sinks) : INT32_MIN;
      table.end[r] =
          exists ? a.recent(segment.work.tail, place.position, a.new_begin(segment.work.length, segment.work.queries))
                 : INT32_MAX;
    }
  }
}

}  // namespace turboquant::cuda::key_tiles
