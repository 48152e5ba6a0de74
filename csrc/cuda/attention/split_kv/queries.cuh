// The queries of a segment as tensor cores take them: rotated, rounded to 16-bit integers, and split into a high and a
// low byte, which are two neighbouring columns of a product.
#pragma once

#include "cuda/attention/query_bytes.cuh"
#include "cuda/attention/split_kv/rows.cuh"

namespace turboquant::cuda::split_kv {

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

// What a score is multiplied by to be a power of two. Capped scores are such already.
__device__ __forceinline__ float score_scale(const Attention& a, const QueryRow& row) {
  return a.soft_cap > 0 ? 1.0f : row.scale;
}

template <int D, int N>
class Queries {
  using X = SplitKvTraits<D, N>;
  using Rows = QueryRows<D, X::kRows>;
  using Lanes = RowLanes<D>;

 public:
  explicit __device__ __forceinline__ Queries(const BlockView& block) : block_(block) {}

  // Lays the rows of a segment out as operands, and ends with all warps holding theirs.
  __device__ __forceinline__ void prepare(const Rows& rows, const Segment& segment) {
    const Attention& a = block_.call;
    const int lane = lane_computed_here(block_.lane);
    const uint8_t* operands = block_.shared + block_.plan.operands;  // [N, frags, 32 lanes, x and y, 4]
    wait_for_committed_copies();
    __syncwarp();
#pragma unroll 1
    for (int r = rows.first_of_warp(); r < X::kRows; r += kAtOnce * block_.plan.warps) prepare_rows(rows, segment, r);
    __syncthreads();
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < X::kFrags; ++i) {
        operand_[n][i] = reinterpret_cast<const uint2*>(operands)[(n * X::kFrags + i) * 32 + lane];
      }
      const QueryRow& row = block_.rows()[4 * n + block_.t];
      scale_[n] = score_scale(a, row), zero_[n] = row.zero;
    }
    const bool real = lane < min(X::kRows, segment.work.rows(a) - segment.block * X::kRows);
    all_first_ = max_of_lanes(real ? block_.rows()[lane].first : 0);
    all_end_ = -max_of_lanes(real ? -block_.rows()[lane].end : -INT32_MAX);
  }

  // Operand `frag` of rows 4 n to 4 n + 3.
  __device__ __forceinline__ uint2 operand(int n, int frag) const { return operand_[n][frag]; }
  // Of row 4 n + t: score_scale and QueryRow::zero.
  __device__ __forceinline__ float scale(int n) const { return scale_[n]; }
  __device__ __forceinline__ int zero(int n) const { return zero_[n]; }
  // Row 4 n + t.
  __device__ __forceinline__ const QueryRow& row(int n) const { return block_.rows()[4 * n + block_.t]; }
  // Whether all rows see the keys from token `begin` up to `end`.
  __device__ __forceinline__ bool all_see(int begin, int end) const { return !(begin < all_first_ || end > all_end_); }

 private:
  // Rows that a warp rotates together, because each waits for exchanges between lanes most of the time.
  static constexpr int kAtOnce = rows_at_once(X::kRows);

  // The k-th of the rows that a warp rotates from row r on, and whether the block has it.
  __device__ __forceinline__ int row_at(int r, int k) const { return r + k * block_.plan.warps; }
  __device__ __forceinline__ bool holds(int r, int k) const { return k == 0 || row_at(r, k) < X::kRows; }

  // Lays out row r, which the block has, and the next ones, kAtOnce in all.
  __device__ __forceinline__ void prepare_rows(const Rows& rows, const Segment& segment, int r) const {
    const Attention& a = block_.call;
    const int lane = lane_computed_here(block_.lane);
    uint8_t* operands = block_.shared + block_.plan.operands;
    float y[kAtOnce][Lanes::kPerLane];
    QueryRow row[kAtOnce];
    with_float_type(a.dtype, [&](auto tag) {
      const auto* raw = reinterpret_cast<const typename decltype(tag)::type*>(rows.raw());
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const auto* from = raw + (holds(r, k) ? row_at(r, k) : r) * D;
#pragma unroll
        for (int i = 0; i < Lanes::kPerLane; ++i) y[k][i] = static_cast<float>(from[Lanes::channel(lane, i)]);
      }
    });
    const format::Channels of_head = a.channels.of_head(segment.head, D);
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      RowPlace place;
      const bool real = holds(r, k) && rows.find(segment, row_at(r, k), place);
#pragma unroll
      for (int i = 0; i < Lanes::kPerLane; ++i) y[k][i] = real ? y[k][i] : 0;
      row[k] = {1, 0, 0, 0, 0};
      const SequenceWork& work = segment.work;
      if (real) {
        row[k].first = max(a.first_visible(place.position), work.tail.sinks);
        row[k].end = a.recent(work.tail, place.position, a.new_begin(work.length, work.queries));
      }
    }
    if (of_head.center) {
#pragma unroll
      for (int i = 0; i < Lanes::kPerLane; ++i) {
        const float center = of_head.center[Lanes::channel(lane, i)];
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) row[k].shift = fmaf(y[k][i], center, row[k].shift);
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
#pragma unroll
        for (int bit = 1; bit < Lanes::kLanes; bit *= 2) {
          row[k].shift += __shfl_xor_sync(0xffffffff, row[k].shift, bit);
        }
      }
    }
    if (of_head.inverse) {
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) Lanes::apply(of_head.inverse, lane, y[k]);
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      Lanes::apply(block_.signs(), lane, y[k]);
      transform<typename Lanes::Rotation>(y[k], lane);
    }
    if (block_.plan.codes.shifts) {
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) subtract_neighbours<D>(y[k], lane);
    }
    float largest[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      largest[k] = kLeastQuery;
#pragma unroll
      for (int i = 0; i < Lanes::kPerLane; ++i) largest[k] = max_or_nan(largest[k], fabsf(y[k][i]));
      // Floats that are not negative are ordered like integers, with NaN above all.
      largest[k] = __int_as_float(max_of_lanes(__float_as_int(largest[k])));
    }
    const float scale = a.softmax_scale * kLog2E;
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int at = row_at(r, k);
      const bool writes = Lanes::writes(lane) && holds(r, k);
      const float factor = (scale < 0 ? -kMostQuery : kMostQuery) / largest[k];
      int sum = 0;
      constexpr int kNeighbours = std::min(Lanes::Rotation::kVec, 4);
#pragma unroll
      for (int j = 0; j < Lanes::kPerLane; j += kNeighbours) {
        uint8_t* first = operand(operands, at, Lanes::channel(lane, j));
#pragma unroll
        for (int i = 0; i < kNeighbours; ++i) {
          const int x = __float2int_rn(y[k][j + i] * factor);
          if (!writes) continue;
          store_operand(operand_behind<D>(first, block_.plan.codes.order, i), x);
          sum += x * block_.plan.codes.twice_zero(Lanes::channel(lane, j + i));
        }
      }
      if (!holds(r, k)) continue;
#pragma unroll
      for (int c = D + lane; c < X::Operands::kChannels; c += 32) {  // padding of the last chunk
        store_operand(operand(operands, at, c), 0);
      }
      sum = sum_of_lanes(sum);
      if (lane == 0) {
        row[k].scale =
            max_or_nan(largest[k] / kMostQuery * fabsf(scale) * format::kLevelUnit * block_.plan.codes.key_unit,
                       kLeastQuery);
        row[k].shift *= scale;
        row[k].zero = sum >> 1;
        block_.rows()[at] = row[k];
      }
    }
  }

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
