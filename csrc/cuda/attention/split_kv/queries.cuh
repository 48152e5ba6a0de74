// The queries of a segment as tensor cores take them: rotated, rounded to 16-bit integers, and split into a high and a
// low byte, which are two neighbouring columns of a product.
#pragma once

#include "cuda/attention/split_kv/rows.cuh"

namespace turboquant::cuda::split_kv {

constexpr float kLargestQuery = 127 * 256;  // keeps the high byte within +-127

// Where the high byte of row r is among the operands [rows / 4, frags, 32 lanes, x and y, 4]. place: of its channel.
template <int D>
__device__ __forceinline__ uint8_t* operand_of_row(uint8_t* operands, int r,
                                                   const typename QueryOperands<D>::Place& place) {
  constexpr int kFrags = SplitKvTraits<D, 1>::kFrags;
  return operands + ((r / 4 * kFrags + place.frag) * 32 + 8 * (r % 4) + place.t) * 8 + 4 * place.half + place.byte;
}
// Channels c to c + 3, c a multiple of 4, differ in two bits, and a place is the bits of its channel in another order.
// So their operands lie as far from the first one as those of channels 0 to 3 do.
template <int D>
__device__ __forceinline__ uint8_t* operand_behind(uint8_t* first, CodeOrder order, int i) {
  return operand_of_row<D>(first, 0, QueryOperands<D>::place(order, i));
}
__device__ __forceinline__ void store_operand(uint8_t* to, int x) {
  constexpr int kNextColumn = 4 * 8;  // bytes: a column is four lanes of eight bytes
  const int high = (x + 128) >> 8;
  to[0] = static_cast<uint8_t>(high);
  to[kNextColumn] = static_cast<uint8_t>(x - 256 * high);
}

// Corrects what codes count too often (KeyCodes::kShifts): subtracts from each odd channel a sixteenth of the next
// channel, if the codes of both share a word.
template <int D>
__device__ __forceinline__ void subtract_neighbours(float (&y)[RowLanes<D>::kPerLane], int lane) {
  using Lanes = RowLanes<D>;
  constexpr int kVec = Lanes::Rotation::kVec;
  static_assert(kVec == 1 || kVec % 2 == 0);
#pragma unroll
  for (int k = 0; k < Lanes::kPerLane; k += kVec) {
    const float of_next_lane = __shfl_down_sync(0xffffffff, y[k], 1);
#pragma unroll
    for (int i = kVec == 1 ? 0 : 1; i < kVec; i += 2) {
      const int c = Lanes::channel(lane, k + i);
      const bool none = (kVec == 1 && c % 2 == 0) || c % 8 == 7;
      y[k + i] = fmaf(none ? 0 : i + 1 < kVec ? y[k + i + 1] : of_next_lane, -1.0f / 16, y[k + i]);
    }
  }
}

template <int D, int N>
class Queries {
  using X = SplitKvTraits<D, N>;
  using Rows = QueryRows<D, X::kRows>;
  using Lanes = RowLanes<D>;

 public:
  explicit __device__ __forceinline__ Queries(const BlockView& block) : block_(block) {}

  // Lays the rows of a segment out as operands, a warp per row, and ends with all warps holding theirs.
  __device__ __forceinline__ void prepare(const Rows& rows, const Segment& segment) {
    const Attention& a = block_.call;
    const int lane = computed_here(block_.lane);
    uint8_t* operands = block_.shared + block_.plan.operands;  // [N, frags, 32 lanes, x and y, 4]
    wait_for_committed_copies();
    __syncwarp();
#pragma unroll 1
    for (int r = rows.first_of_warp(); r < X::kRows; r += block_.plan.warps) {
      RowPlace place;
      float y[Lanes::kPerLane] = {};
      QueryRow row{1, 0, 0, 0, 0};
      const bool real = rows.find(segment, r, place);
      if (real) {
        with_float_type(a.dtype, [&](auto tag) {
          const auto* from = reinterpret_cast<const typename decltype(tag)::type*>(rows.raw()) + r * D;
#pragma unroll
          for (int i = 0; i < Lanes::kPerLane; ++i) y[i] = static_cast<float>(from[Lanes::channel(lane, i)]);
        });
        const format::Channels of_head = a.channels.of_head(segment.head, D);
        if (of_head.center) {
#pragma unroll
          for (int i = 0; i < Lanes::kPerLane; ++i) {
            row.shift = fmaf(y[i], of_head.center[Lanes::channel(lane, i)], row.shift);
          }
        }
        if (of_head.inverse) Lanes::apply(of_head.inverse, lane, y);
        const SequenceWork& work = segment.work;
        row.first = max(a.first_visible(place.position), work.tail.sinks);
        row.end = a.recent(work.tail, place.position, a.new_begin(work.length, work.queries));
      }
      Lanes::apply(block_.signs(), lane, y);
      transform<typename Lanes::Rotation>(y, lane);
      if (block_.plan.codes.shifts) subtract_neighbours<D>(y, lane);
      float largest = 1e-30f;
#pragma unroll
      for (int i = 0; i < Lanes::kPerLane; ++i) largest = max_or_nan(largest, fabsf(y[i]));
      // Floats that are not negative are ordered like integers, with NaN above all.
      largest = __int_as_float(max_of_lanes(__float_as_int(largest)));
      if (a.channels.center) {
#pragma unroll
        for (int bit = 1; bit < Lanes::kLanes; bit *= 2) row.shift += __shfl_xor_sync(0xffffffff, row.shift, bit);
      }
      const float scale = a.softmax_scale * kLog2E, factor = (scale < 0 ? -kLargestQuery : kLargestQuery) / largest;
      int sum = 0;
      constexpr int kNeighbours = std::min(Lanes::Rotation::kVec, 4);
#pragma unroll
      for (int k = 0; k < Lanes::kPerLane; k += kNeighbours) {
        uint8_t* first = operand(operands, r, Lanes::channel(lane, k));
#pragma unroll
        for (int i = 0; i < kNeighbours; ++i) {
          const int x = __float2int_rn(y[k + i] * factor);
          if (!Lanes::writes(lane)) continue;
          store_operand(operand_behind<D>(first, block_.plan.codes.order, i), x);
          sum += x * block_.plan.codes.twice_zero(Lanes::channel(lane, k + i));
        }
      }
#pragma unroll
      for (int c = D + lane; c < X::Operands::kChannels; c += 32) {  // padding of the last chunk
        store_operand(operand(operands, r, c), 0);
      }
      sum = sum_of_lanes(sum);
      if (lane == 0) {
        row.scale = max_or_nan(largest / kLargestQuery * fabsf(scale) * format::kLevelUnit * block_.plan.codes.key_unit,
                               1e-30f);
        row.shift *= scale;
        row.zero = sum >> 1;
        block_.rows()[r] = row;
      }
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < X::kFrags; ++i) {
        operand_[n][i] = reinterpret_cast<const uint2*>(operands)[(n * X::kFrags + i) * 32 + lane];
      }
      const QueryRow& row = block_.rows()[4 * n + block_.t];
      scale_[n] = a.soft_cap > 0 ? 1.0f : row.scale, zero_[n] = row.zero;
    }
    const bool real = lane < min(X::kRows, segment.work.rows(a) - segment.block * X::kRows);
    all_first_ = max_of_lanes(real ? block_.rows()[lane].first : 0);
    all_end_ = -max_of_lanes(real ? -block_.rows()[lane].end : -INT32_MAX);
  }

  // Operand `frag` of rows 4 n to 4 n + 3.
  __device__ __forceinline__ uint2 operand(int n, int frag) const { return operand_[n][frag]; }
  // Of row 4 n + t: what a score is multiplied by to be a power of two (capped scores are such already), and
  // QueryRow::zero.
  __device__ __forceinline__ float scale(int n) const { return scale_[n]; }
  __device__ __forceinline__ int zero(int n) const { return zero_[n]; }
  // Row 4 n + t.
  __device__ __forceinline__ const QueryRow& row(int n) const { return block_.rows()[4 * n + block_.t]; }
  // Whether all rows see the keys from token `begin` up to `end`.
  __device__ __forceinline__ bool all_see(int begin, int end) const { return !(begin < all_first_ || end > all_end_); }

 private:
  __device__ __forceinline__ uint8_t* operand(uint8_t* operands, int r, int channel) const {
    return operand_of_row<D>(operands, r, X::Operands::place(block_.plan.codes.order, channel));
  }

  const BlockView block_;

  uint2 operand_[N][X::kFrags];
  float scale_[N];           // of row 4 n + t
  int zero_[N];              // of row 4 n + t
  int all_first_, all_end_;  // all rows see keys [all_first_, all_end_)
};

}  // namespace turboquant::cuda::split_kv
