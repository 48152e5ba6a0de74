// Activations as operands: rotated and rounded to 8 bits.
#pragma once

#include "cuda/codec/transform.cuh"
#include "cuda/common/device.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/linear/call.cuh"

namespace turboquant::cuda::linear {

// x / y rounded to nearest even, as `/` rounds it, where no number on the way is subnormal or infinite: without the
// branch that takes care of these.
__device__ __forceinline__ float quotient_of_normals(float x, float y) {
  float r;
  asm("rcp.approx.f32 %0, %1;" : "=f"(r) : "f"(y));
  r = fmaf(fmaf(-y, r, 1.0f), r, r);
  float q = x * r;
  q = fmaf(fmaf(-y, q, x), r, q);
  return fmaf(fmaf(-y, q, x), r, q);
}

// Columns of a call from `first` on: consecutive rows of x.
struct CallColumns {
  const Call& a;
  int64_t first;
  int count;  // of a record

  __device__ __forceinline__ bool exists(int column) const { return first + column < a.columns; }
  __device__ __forceinline__ int64_t offset(int column) const { return (first + column) * a.x_stride; }
};

// A warp quantises pieces of 128 channels of a column: one group, or two of 64. A lane has four neighbouring
// channels. Two pieces at a time hide the latency of each other, and those that follow are on their way.
// SPLIT: even channels make one operand, odd channels the other (splits_channels in call.cuh).
// Columns: how many columns a record has to have, which of them exist (the others are zeros), and where their rows of x
// begin.
template <bool SPLIT, typename Columns>
class Quantiser {
  using Values = float[kPiecesAtOnce][4];
  // Four channels as they are in memory, so that nobody waits for them before they are transformed.
  struct Loaded {
    uint4 x;
    float4 by;  // of channel_inverse
  };

 public:
  // Quantises the columns of a record in groups [group, end). records: memory of their records, of group `group` first.
  __device__ __forceinline__ Quantiser(const Call& a, const RecordOfColumns& r, uint8_t* records, int group, int end,
                                       const Columns& columns)
      : a_(a), r_(r), columns_(columns) {
    whole_ = r.group == 2 * kHalfChannels, log_lanes_ = whole_ ? 5 : 4;
    lane_ = threadIdx.x % 32, inside_ = whole_ ? lane_ : lane_ % 16;
    records_ = records, group_ = group, groups_ = end - group;
    pieces_ = whole_ ? groups_ : (groups_ + 1) / 2;
    const float4 signs = __ldg(reinterpret_cast<const float4*>(a.signs) + inside_);
    sign_[0] = signs.x, sign_[1] = signs.y, sign_[2] = signs.z, sign_[3] = signs.w;
  }

  // Pieces `first`, first + step, ... of all columns. meanwhile: runs once, with the first values on their way
  template <typename F>
  __device__ __forceinline__ void run(int first, int step, const F& meanwhile) {
    Place now[kPiecesAtOnce], next[kPiecesAtOnce]{};
    Loaded loaded[kPiecesAtOnce]{};
    Values v;
    int piece = first, place = 0;
    const auto begin = [&] {
#pragma unroll
      for (int j = 0; j < kPiecesAtOnce; ++j, piece += step) {
#pragma unroll 1
        for (; piece >= pieces_ && place < columns_.count; ++place) piece -= pieces_;
        next[j] = {place, whole_ ? piece : 2 * piece + lane_ / 16};
        loaded[j] = load(next[j]);
      }
    };
    begin();
    meanwhile();
    __syncwarp();  // compilers see that no lane is elsewhere: exchanges take half of the code
    // All warps go as many rounds, so that compilers see that none of them diverges.
    const int rounds = ceil_div(pieces_ * columns_.count, step * kPiecesAtOnce);
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
#pragma unroll
      for (int j = 0; j < kPiecesAtOnce; ++j) {
        now[j] = next[j];
        unpack(loaded[j], v[j]);
      }
      if (round + 1 < rounds) begin();
      transform(v);
      store(now, v);
    }
  }

 private:
  struct Place {
    int column, group;  // in the records
  };

  __device__ __forceinline__ bool exists(const Place& p) const {
    return p.column < columns_.count && p.group < groups_;
  }

  __device__ __forceinline__ Loaded load(const Place& p) const {
    Loaded found{};
    if (!exists(p) || !columns_.exists(p.column)) return found;
    const int64_t channel = (int64_t{group_ + p.group} << (2 + log_lanes_)) + 4 * inside_;
    const int64_t at = columns_.offset(p.column) + channel;
    if (a_.dtype == Dtype::kFloat32) {
      found.x = *reinterpret_cast<const uint4*>(static_cast<const float*>(a_.x) + at);
    } else {
      const uint2 words = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(a_.x) + at);
      found.x.x = words.x, found.x.y = words.y;
    }
    if (a_.channel_inverse) found.by = __ldg(reinterpret_cast<const float4*>(a_.channel_inverse + channel));
    return found;
  }

  __device__ __forceinline__ void unpack(const Loaded& from, float (&v)[4]) const {
    const uint32_t words[4] = {from.x.x, from.x.y, from.x.z, from.x.w};
    if (a_.dtype == Dtype::kFloat32) {
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = __uint_as_float(words[i]);
    } else if (a_.dtype == Dtype::kBFloat16) {
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = __uint_as_float(i % 2 ? words[i / 2] & 0xFFFF0000 : words[i / 2] << 16);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 both = __half22float2(reinterpret_cast<const __half2&>(words[i]));
        v[2 * i] = both.x, v[2 * i + 1] = both.y;
      }
    }
    if (!a_.channel_inverse) return;
    v[0] *= from.by.x, v[1] *= from.by.y, v[2] *= from.by.z, v[3] *= from.by.w;
  }

  __device__ __forceinline__ void transform(Values& v) const {
#pragma unroll
    for (int j = 0; j < kPiecesAtOnce; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) v[j][i] *= sign_[i];
      lane_butterflies<1, 4>(v[j]);
    }
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) {
      if (bit == 16 && !whole_) break;
      const float sign = lane_ & bit ? -1.0f : 1.0f;
#pragma unroll
      for (int j = 0; j < kPiecesAtOnce; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) v[j][i] = fmaf(v[j][i], sign, __shfl_xor_sync(0xffffffff, v[j][i], bit));
      }
    }
  }

  // Every step for all pieces, so that their latencies overlap.
  __device__ __forceinline__ void store(const Place (&places)[kPiecesAtOnce], Values& v) const {
    constexpr int N = kPiecesAtOnce;
    const float norm = whole_ ? block_norm(7) : block_norm(6);
    uint32_t most[N], word[N];  // the bits of magnitudes are ordered as they are, with NaN above infinity
    float unit[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      most[j] = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        v[j][i] *= norm;
        most[j] = max(most[j], __float_as_uint(v[j][i]) & 0x7FFFFFFF);
      }
    }
#pragma unroll
    for (int j = 0; j < N; ++j) most[j] = whole_ ? max_of_lanes(most[j]) : max_of_lanes<16>(most[j]);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      // Powers of two keep the inverse of a subnormal number finite.
      const int exponent = min(max(static_cast<int>(most[j] >> 23) - 127, -100), 100);
      const float down = __int_as_float((127 - exponent) << 23), up = __int_as_float((127 + exponent) << 23);
      const float largest = __uint_as_float(most[j]) * down;
      const float inverse = most[j] ? quotient_of_normals(127.0f, largest) : 0.0f;
      unit[j] = most[j] < kInfinityBits ? quotient_of_normals(largest, 127.0f) * up : __uint_as_float(0x7FFFFFFF);
      uint32_t q[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) q[i] = static_cast<uint32_t>(__float2int_rn(v[j][i] * down * inverse));
      word[j] = select_bytes(select_bytes(q[0], q[1], 0x0040), select_bytes(q[2], q[3], 0x0040), 0x5410);
    }
    const int step = inside_ / 8, upper = inside_ / 4 % 2;  // of the products, and which half of it
    if constexpr (SPLIT) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const uint32_t other = __shfl_xor_sync(0xffffffff, word[j], 4);
        word[j] = upper ? select_bytes(other, word[j], 0x7531) : select_bytes(word[j], other, 0x6420);
      }
    }
    const int bytes = r_.bytes();
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (!exists(places[j])) continue;
      uint8_t* const record = records_ + int64_t{places[j].group} * bytes;
      // Words of a lane t of a product are neighbours: channels 4 t to 4 t + 3 of the step, and those 16 further.
      uint8_t* operands = record + r_.operands() + (step / 2 * r_.columns + places[j].column) * kHalfChannels;
      *reinterpret_cast<uint32_t*>(operands + step % 2 * 8 + inside_ % 4 * 16 + 4 * upper) = word[j];
      if (inside_ == 0) reinterpret_cast<float*>(record)[places[j].column] = unit[j];
    }
  }

  const Call& a_;
  const RecordOfColumns& r_;
  uint8_t* records_;
  const Columns columns_;
  bool whole_;  // a piece is one group
  int log_lanes_, lane_, inside_, group_, groups_, pieces_;
  float sign_[4];
};

// Quantises all columns for the kernel that follows. The grid is [several, blocks of columns].
template <bool SPLIT>
__global__ void __launch_bounds__(32 * kQuantiseWarps)
    quantise_columns(const __grid_constant__ Call a, const __grid_constant__ Plan p) {
  let_next_kernel_begin();  // it reads only weights before it waits for this one
  wait_for_previous_kernel();
  uint8_t* const records = p.records + int64_t{blockIdx.y} * a.groups * p.record.bytes();
  const CallColumns of{a, int64_t{blockIdx.y} * p.record.columns, p.record.columns};
  const int first = blockIdx.x * kQuantiseWarps + threadIdx.x / 32, step = gridDim.x * kQuantiseWarps;
  Quantiser<SPLIT, CallColumns>(a, p.record, records, 0, a.groups, of).run(first, step, [] {});
}

}  // namespace turboquant::cuda::linear
