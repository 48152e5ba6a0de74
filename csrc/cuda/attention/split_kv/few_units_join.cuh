// The end of calls with few units (few_units.cuh): the states of warps become rows of results, or of a partial result
// that the segment's last block joins with those of others in the same way.
#pragma once

#include <bit>

#include "cuda/attention/split_kv/few_units.cuh"

namespace turboquant::cuda::split_kv {

template <int D, int M>
__device__ __forceinline__ void FewUnits<D, M>::join(int blocks) {
  float sign[kPer];
  load_now(block_.call.value_signs + channel(), sign);
  if (!rehearses_) __syncthreads();
  const int rows = work_.queries * block_.call.group;
  int& last = *reinterpret_cast<int*>(ready() + 1);
  int count = plan_.slots;
  bool whole = blocks == 1;
#pragma unroll 1
  for (;;) {
#pragma unroll 1
    for (int r = block_.warp; r < rows; r += block_.plan.warps) join_row(r, count, whole, sign);
    if (whole || rehearses_) return;
    __syncthreads();
    if (threadIdx.x == 0) last = count_arrival(block_.plan.arrivals + segment_, blocks);
    __syncthreads();
    if (!last) return;
    gather(blocks);
    __syncthreads();
    whole = true, count = plan_.shares;
  }
}

template <int D, int M>
__device__ __forceinline__ void FewUnits<D, M>::join_row(int r, int count, bool whole,
                                                         const float (&sign)[kPer]) const {
  const Attention& a = block_.call;
  const int lane = block_.lane, step = kRows * kRowFloats << plan_.team_shift;
  const float* from = state(0) + r * kRowFloats;
  float2 head{-INFINITY, 0};
  if (lane < count) head = *reinterpret_cast<const float2*>(from + lane * step + D);
  float m = max_over_lanes(head.x);
  const float weight = weight_of(head.x, m);
  float total = sum_over_lanes(weight * head.y), y[kPer] = {};
#pragma unroll 2
  for (int i = 0; i < count; ++i, from += step) {
    const float by = __shfl_sync(0xffffffff, weight, i);
    if (by == 0) continue;
#pragma unroll
    for (int k = 0; k < kPer; ++k) y[k] = fmaf(by, from[channel() + k], y[k]);
  }
  if (!whole) {
    if (rehearses_) return;
    float* to = partial(part_, r);
    store(y, to + kPartHead + channel());
    if (lane == 0) *reinterpret_cast<float2*>(to) = float2{m, total};
    return;
  }
  RowPlace row;
  find(r, row);
  transform<typename Lanes::Rotation>(y, lane);
  const float by = a.sink_logits ? add_sink(a.sink_logits[row.head], m, total) : 1;
  const float inverse = total == 0 ? 0 : by / total;
#pragma unroll
  for (int i = 0; i < kPer; ++i) y[i] *= sign[i] * inverse;
  if (rehearses_) return;
  const int64_t at = int64_t{row.token} * a.q_heads + row.head;
  uint32_t* out = static_cast<uint32_t*>(a.out) + (at * D + channel()) / 2;
#pragma unroll
  for (int i = 0; i < kPer; i += 2) {
    out[i / 2] = a.dtype == Dtype::kBFloat16 ? word_of_floats<__nv_bfloat16>(y[i], y[i + 1])
                                             : word_of_floats<__half>(y[i], y[i + 1]);
  }
  if (lane == 0) {
    a.lse[at] = total == 0 ? -INFINITY : by == 0 ? a.sink_logits[row.head] : (m + log2f(total)) * kLn2;
  }
}

template <int D, int M>
__device__ __forceinline__ void FewUnits<D, M>::gather(int blocks) const {
  constexpr int kBatch = 8;
  const int lane = block_.lane, row_shift = std::countr_zero(static_cast<unsigned>(kRows)) + plan_.team_shift;
#pragma unroll 1
  for (int i = block_.warp; i < plan_.shares << row_shift; i += block_.plan.warps) {
    const int share = i >> row_shift, r = i - (share << row_shift);
    float m = -INFINITY, total = 0, y[kPer] = {};
#pragma unroll 1
    for (int begin = share; begin < blocks; begin += 32 * plan_.shares) {
      const int mine = begin + lane * plan_.shares;
      float2 head{-INFINITY, 0};
      if (mine < blocks) head = __ldcg(reinterpret_cast<const float2*>(partial(mine, r)));
      const float top = fmaxf(m, max_over_lanes(head.x)), by = weight_of(m, top), weight = weight_of(head.x, top);
      m = top, total = fmaf(total, by, sum_over_lanes(weight * head.y));
#pragma unroll
      for (int k = 0; k < kPer; ++k) y[k] *= by;
#pragma unroll 1
      for (int j = 0; j < 32 && begin + j * plan_.shares < blocks; j += kBatch) {
        float x[kBatch][kPer] = {};
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          const int part = begin + (j + k) * plan_.shares;
          if (part < blocks) load_part(partial(part, r) + kPartHead + channel(), x[k]);
        }
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          const float of_part = __shfl_sync(0xffffffff, weight, j + k);
          if (of_part == 0) continue;
#pragma unroll
          for (int c = 0; c < kPer; ++c) y[c] = fmaf(of_part, x[k][c], y[c]);
        }
      }
    }
    float* to = state(share << plan_.team_shift) + r * kRowFloats;
    store(y, to + channel());
    if (lane == 0) set_head(to, m, total);
  }
}

}  // namespace turboquant::cuda::split_kv
