// Activations as operands: rotated and rounded to 8 bits.
#pragma once

#include "cuda/common/device.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/linear/call.cuh"

namespace turboquant::cuda::linear {

// A warp quantises 1,024 channels of a column: 8 groups (HALVES = 2) or 16. A lane takes 32 neighbouring channels, a
// step of the products, so that most of the transform and all sums of a step stay in a lane.
template <Codes CODES, int HALVES>
class Quantiser {
  static constexpr int kLanes = 2 * HALVES;  // that share a group

 public:
  static constexpr int kGroups = 32 / kLanes;

  __device__ __forceinline__ Quantiser(const Call& a, const RecordOfColumns& r, int lane)
      : a_(a), r_(r), lane_(lane), step_(lane % kLanes) {}

  // Groups from `first` on; those from `end` on are left out. records: of group `origin`. place: of the column in them
  __device__ __forceinline__ void run(uint8_t* records, int origin, int first, int end, int64_t column, int place) {
    const int group = first + lane_ / kLanes;
    const bool valid = group < end;
    load(group, valid && column < a_.columns, column);
    transform();
    uint32_t most = 0;  // the bits of magnitudes are ordered as they are, with NaN above infinity
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      v_[i] *= HALVES == 2 ? 0.08838834764831845f : 0.125f;
      most = max(most, __float_as_uint(v_[i]) & 0x7FFFFFFF);
    }
    most = max_of_lanes<kLanes>(most);
    // Powers of two keep the inverse of a subnormal number finite.
    const int exponent = min(max(static_cast<int>(most >> 23) - 127, -100), 100);
    const float down = __int_as_float((127 - exponent) << 23), up = __int_as_float((127 + exponent) << 23);
    const float largest = __uint_as_float(most) * down, inverse = most ? __fdiv_rn(127.0f, largest) : 0.0f;
    uint32_t word[8];
    int sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      uint32_t q[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) q[j] = static_cast<uint32_t>(__float2int_rn(v_[4 * i + j] * down * inverse));
      word[i] = select_bytes(select_bytes(q[0], q[1], 0x0040), select_bytes(q[2], q[3], 0x0040), 0x5410);
      sum = __dp4a(static_cast<int>(word[i]), 0x01010101, sum);
    }
    if (CODES == Codes::kLloyd && r_.corrections == 1) sum = sum_of_lanes<kLanes>(sum);
    if (!valid) return;
    uint8_t* const record = records + int64_t{group - origin} * r_.bytes();
    store(record, place, word);
    if (step_ == 0) {
      reinterpret_cast<float*>(record + r_.units())[place] =
          most < 0x7F800000 ? __fdiv_rn(largest, 127.0f) * up : __uint_as_float(0x7FFFFFFF);
    }
    if (CODES == Codes::kLloyd && step_ < r_.corrections) {
      int* to = reinterpret_cast<int*>(record + r_.corrections_at() + step_ * r_.correction_bytes());
      to += place / 2 * 4 + place % 2, to[0] = to[2] = sum;
    }
  }

 private:
  // The lane's channels times their scales and signs.
  __device__ __forceinline__ void load(int group, bool valid, int64_t column) {
#pragma unroll
    for (int i = 0; i < 32; ++i) v_[i] = 0;
    if (!valid) return;
    const int64_t channel = (int64_t{group} * kLanes + step_) * 32;
    load_floats_as<32>(a_.x, a_.dtype, column * a_.x_stride + channel, v_);
    if (a_.channel_inverse) multiply(a_.channel_inverse + channel);
    multiply(a_.signs + 32 * step_);
  }
  __device__ __forceinline__ void multiply(const float* factors) {
#pragma unroll
    for (int i = 0; i < 32; i += 4) {
      const float4 f = __ldg(reinterpret_cast<const float4*>(factors + i));
      v_[i] *= f.x, v_[i + 1] *= f.y, v_[i + 2] *= f.z, v_[i + 3] *= f.w;
    }
  }

  __device__ __forceinline__ void transform() {
#pragma unroll
    for (int h = 1; h < 32; h *= 2) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        if (i & h) continue;
        const float x = v_[i], y = v_[i + h];
        v_[i] = x + y, v_[i + h] = x - y;
      }
    }
#pragma unroll
    for (int bit = 1; bit < kLanes; bit *= 2) {
      const float sign = lane_ & bit ? -1.0f : 1.0f;
#pragma unroll
      for (int i = 0; i < 32; ++i) v_[i] = fmaf(v_[i], sign, __shfl_xor_sync(0xffffffff, v_[i], bit));
    }
  }

  // word i: channels 4 i to 4 i + 3 of the step; those of i and i + 4 are neighbours for lane t = i of a product.
  __device__ __forceinline__ void store(uint8_t* record, int place, const uint32_t (&word)[8]) const {
    uint8_t* to = record + (step_ / 2 * r_.columns + place) * kHalfChannels + step_ % 2 * 8;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      uint2 both = make_uint2(word[t], word[t + 4]);
      if constexpr (CODES == Codes::kUniform) {  // even channels make one operand, odd channels the other
        both = make_uint2(select_bytes(both.x, both.y, 0x6420), select_bytes(both.x, both.y, 0x7531));
      }
      *reinterpret_cast<uint2*>(to + 16 * t) = both;
    }
  }

  const Call& a_;
  const RecordOfColumns& r_;
  int lane_, step_;
  float v_[32];
};

// Quantises groups [first, end) of all columns of a block of columns, from `column` on, into records in shared memory.
// Warps of the thread block share the work.
template <Codes CODES, int HALVES>
__device__ __forceinline__ void quantise_block(const Call& a, const RecordOfColumns& r, uint8_t* records, int first,
                                               int end, int64_t column) {
  using Q = Quantiser<CODES, HALVES>;
  const int spans = ceil_div(end - first, Q::kGroups);
#pragma unroll 1
  for (int i = threadIdx.x / 32; i < spans * r.columns; i += kWarps) {
    const int place = quotient(i, spans), span = i - place * spans;
    Q(a, r, threadIdx.x % 32).run(records, first, first + span * Q::kGroups, end, column + place, place);
  }
}

// Quantises all columns for the kernel that follows.
template <Codes CODES>
__global__ void __launch_bounds__(32 * kQuantiseWarps)
    quantise_columns(const __grid_constant__ Call a, const __grid_constant__ Plan p) {
  let_next_kernel_begin();  // it reads only weights before it waits for this one
  wait_for_previous_kernel();
  const int lane = threadIdx.x % 32, spans = quantise_spans(a.groups, a.group);
  const int64_t number = int64_t{blockIdx.x} * kQuantiseWarps + threadIdx.x / 32, column = number / spans;
  const int64_t block = column / p.record.columns, blocks = (a.columns + p.record.columns - 1) / p.record.columns;
  if (block >= blocks) return;
  uint8_t* records = p.records + block * a.groups * p.record.bytes();
  const int place = static_cast<int>(column - block * p.record.columns),
            span = static_cast<int>(number - column * spans);
  const auto quantise = [&](auto halves) {
    using Q = Quantiser<CODES, halves>;
    Q(a, p.record, lane).run(records, 0, span * Q::kGroups, a.groups, column, place);
  };
  if (a.group == 2 * kHalfChannels) {
    quantise(std::integral_constant<int, 2>{});
  } else {
    quantise(std::integral_constant<int, 1>{});
  }
}

}  // namespace turboquant::cuda::linear
