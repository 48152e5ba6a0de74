// The query rows of a block as float16 in shared memory, and what turns their products into scores.
#pragma once

#include "cuda/attention/general/block_context.cuh"
#include "cuda/attention/general/half_scale.cuh"
#include "cuda/attention/general/operand_layout.cuh"
#include "cuda/attention/general/row_transform.cuh"
#include "cuda/attention/softmax_math.cuh"

namespace turboquant::cuda::general {

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) x += __shfl_xor_sync(0xffffffff, x, bit);
  return x;
}

// For keys in codes, which are rotated, queries are rotated too; for exact keys they are as they are. Each row has a
// power of two of its own, so that its largest element is between 2^14 and 2^15 and float16 loses as little as it can.
// A row with an infinity or a NaN becomes zeros with a factor of NaN.

// Row r of `work` with its signs and channel scales to float32 [d] in shared memory, zeros behind the last row; by a
// warp. Returns its product with the center, which is added to its scores. center, inverse: of the head, or null.
__device__ __forceinline__ float load_query(const Arguments& x, const WorkItem& work, int r, const float* center,
                                            const float* inverse, bool rotated, int lane, float* to) {
  const Attention& a = x.a;
  float dot = 0;
  for (int o = lane; o < x.layout.octets; o += 32) {
    float y[8] = {};
    if (r < work.rows) {
      const WorkItem::Query at = work.query(r, a.group);
      load_floats_as<8>(a.q, a.dtype, at.token * a.q_token_stride + at.head * a.q_head_stride + 8 * o, y);
    }
    float other[8];
    if (center) {
      load_floats<8>(center + 8 * o, other);
#pragma unroll
      for (int i = 0; i < 8; ++i) dot += y[i] * other[i];
    }
    if (rotated) {
      load_floats<8>(a.key_signs + 8 * o, other);
#pragma unroll
      for (int i = 0; i < 8; ++i) y[i] *= other[i];
      if (inverse) {
        load_floats<8>(inverse + 8 * o, other);
#pragma unroll
        for (int i = 0; i < 8; ++i) y[i] *= other[i];
      }
    }
    store_shared(y, to + 8 * o);
  }
  if (center) dot = sum_of_warp(dot);
  return dot * a.softmax_scale * kLog2E;
}

// A row from float32 to float16; by a warp. store(o, word) gets its octets, with zeros from d up to 8 `octets`. The
// sign of softmax_scale goes into the elements. Returns the row's factor: base-2 score = product * factor.
template <typename Store>
__device__ __forceinline__ float round_query(const Arguments& x, const float* row, bool rotated, int octets, int lane,
                                             Store&& store) {
  uint32_t largest = 0;
  for (int c = lane; c < x.layout.head_dim; c += 32) largest = max(largest, magnitude_bits(row[c]));
  largest = max_of_lanes(largest);
  const bool finite = largest < kInfinityBits;
  const int e = half_exponent(largest);
  const float scale = x.a.softmax_scale;
  const float up = !finite || scale == 0 ? 0 : copysignf(clamped_power_of_two(kHalfExponent - e), scale);
  for (int o = lane; o < octets; o += 32) {
    float y[8] = {};
    if (o < x.layout.octets && up != 0) load_shared(row + 8 * o, y);
    store(o, uint4{halves(y[0] * up, y[1] * up), halves(y[2] * up, y[3] * up), halves(y[4] * up, y[5] * up),
                   halves(y[6] * up, y[7] * up)});
  }
  const float unit = clamped_power_of_two(e - kHalfExponent) * (scale == 0 ? 1.0f : fabsf(scale) * kLog2E);
  return !finite ? quiet_nan() : rotated ? unit * x.norm : unit;
}

template <typename S>
class Queries {
 public:
  __device__ __forceinline__ explicit Queries(const BlockContext<S>& block) : block_(block) {}

  // Writes queries, `factor` and `shift`; the caller synchronises. The keys' shared memory is scratch meanwhile.
  __device__ __forceinline__ void prepare(bool exact) const {
    const Arguments& x = block_.x;
    const int d = x.layout.head_dim, warp = block_.thread.warp, lane = block_.thread.lane;
    BlockConstants<S>& constants = block_.shared.constants();
    float* rows = block_.shared.query_rows(warp, kRowsAtOnce, d);
    const bool rotated = !exact;
    const format::Channels channels = block_.a.channels.of_head(block_.work.kv_head, d);
    const float* center = x.centered(exact) ? channels.center : nullptr;
    for (int first = kRowsAtOnce * warp; first < S::kRows; first += kRowsAtOnce * S::kWarps) {
#pragma unroll
      for (int k = 0; k < kRowsAtOnce; ++k) {
        load(first + k, center, channels.inverse, rotated, rows + k * d);
      }
      __syncwarp();
      if (rotated) transform_rows(rows, d, kRowsAtOnce, x.split, constants.hartley, lane);
#pragma unroll 1
      for (int k = 0; k < kRowsAtOnce; ++k) round(first + k, rotated, rows + k * d);
      __syncwarp();
    }
  }

 private:
  static constexpr int kRowsAtOnce = kQueryRowsAtOnce;

  __device__ __forceinline__ void load(int r, const float* center, const float* inverse, bool rotated,
                                       float* to) const {
    const float shift = load_query(block_.x, block_.work, r, center, inverse, rotated, block_.thread.lane, to);
    if (block_.thread.lane == 0) block_.shared.constants().shift[r] = shift;
  }
  __device__ __forceinline__ void round(int r, bool rotated, const float* row) const {
    const auto store = [&](int o, const uint4& word) {
      OperandLayout<S>::store_query(block_.shared.queries(), r, o, word);
    };
    const float factor = round_query(block_.x, row, rotated, S::kChannelOctets, block_.thread.lane, store);
    if (block_.thread.lane == 0) block_.shared.constants().factor[r] = factor;
  }

  const BlockContext<S>& block_;
};

}  // namespace turboquant::cuda::general
