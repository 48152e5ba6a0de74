// Exact keys of calls with few units (few_units.cuh): 16 at a time, from where they are, with weights that are not
// rounded.
#pragma once

#include "cuda/attention/split_kv/few_units.cuh"

namespace turboquant::cuda::split_kv {

template <int D, int M>
__device__ __forceinline__ bool FewUnits<D, M>::attend_exact(int task, int tasks, int step) {
  if (task >= tasks) return false;
  if (block_.call.dtype == Dtype::kBFloat16) {
    attend_exact_as<__nv_bfloat16>(task, tasks, step);
  } else {
    attend_exact_as<__half>(task, tasks, step);
  }
  return true;
}

template <int D, int M>
template <typename T>
__device__ __forceinline__ void FewUnits<D, M>::attend_exact_as(int task, int tasks, int step) {
#pragma unroll 1
  for (int n = 0; n < M; ++n) attend_exact_rows<T>(n, task, tasks, step);
}

template <int D, int M>
template <typename T>
__device__ __forceinline__ void FewUnits<D, M>::attend_exact_rows(int n, int task, int tasks, int step) {
  const Attention& a = block_.call;
  const int lane = block_.lane, g = block_.g, t = block_.t;
  float* rows = state(block_.warp) + 4 * n * kRowFloats;
  float* weights = rows;  // [kExactKeys, 4], until the state is left there
  RowPlace place, of_query;
  const bool real = find(member_ * kRows + 4 * n + t, place);
  // A product's column g is of row g / 2, so a lane reads that row's query; where there is none, the first one.
  if (!find(member_ * kRows + 4 * n + g / 2, of_query)) find(0, of_query);
  const uint4* q = reinterpret_cast<const uint4*>(query(of_query));
  int first = 0, end = 0;  // the row's keys in codes lie between its exact ones
  if (real) {
    first = a.first_visible(place.position);
    end = a.recent(work_.tail, place.position, a.new_begin(work_.length, work_.queries));
  }
  float m = -INFINITY, total = 0, sum[4][kPer] = {};
#pragma unroll 1
  for (int begin = task * kExactKeys; begin < tasks * kExactKeys; begin += step * kExactKeys) {
    const int count = min(work_.exact() - begin, kExactKeys);
    // A lane without a key reads the last one, with weight 0.
    const uint8_t* row = exact_row(begin + min(lane % kExactKeys, count - 1));
    if (lane >= kExactKeys) {
      asm volatile("prefetch.global.L1 [%0];" ::"l"(row));
      asm volatile("prefetch.global.L1 [%0];" ::"l"(row + 2 * D - 16));
    }
    const uint4* low = reinterpret_cast<const uint4*>(of_lane(row, g));
    const uint4* high = reinterpret_cast<const uint4*>(of_lane(row, g + 8));
    float dot[4] = {};
#pragma unroll
    for (int c = 0; c < D / 32; ++c) {  // a lane has the same channels of keys and queries, in any order
      const uint4 x = low[4 * c + t], y = high[4 * c + t], z = q[4 * c + t];
      mma_floats<T>(dot, uint4{x.x, y.x, x.y, y.y}, z.x, z.y);
      mma_floats<T>(dot, uint4{x.z, y.z, x.w, y.w}, z.z, z.w);
    }
    float score[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int i = 8 * h + g, key = work_.exact_key(begin + i);
      score[h] = dot[2 * h] * a.softmax_scale;
      if (a.soft_cap > 0) score[h] = a.soft_cap * tanh_fast(__fdividef(score[h], a.soft_cap));
      const bool sees = real && i < count && key >= first && key <= place.position && (key < work_.sinks || key >= end);
      score[h] = sees ? score[h] * kLog2E : -INFINITY;
    }
    const float top = fmaxf(m, over_tokens(fmaxf(score[0], score[1]), [](float x, float y) { return fmaxf(x, y); }));
    const float by = weight_of(m, top), p0 = weight_of(score[0], top), p1 = weight_of(score[1], top);
    m = top, total = fmaf(total, by, p0 + p1);
    __syncwarp();
    weights[4 * g + t] = p0, weights[4 * (g + 8) + t] = p1;
    __syncwarp();
    if (begin != task * kExactKeys) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float of_row = __shfl_sync(0xffffffff, by, r);
#pragma unroll
        for (int i = 0; i < kPer; ++i) sum[r][i] *= of_row;
      }
    }
#pragma unroll 1
    for (int key = 0; key < count; key += 4) {
#pragma unroll
      for (int k = 0; k < 4; ++k) add_value<T>(of_lane(row, kExactKeys + key + k), weights + 4 * (key + k), sum);
    }
  }
  leave_exact(rows, m, over_tokens(total, [](float x, float y) { return x + y; }), sum);
}

template <int D, int M>
template <typename T>
__device__ __forceinline__ void FewUnits<D, M>::add_value(const uint8_t* row, const float* weights,
                                                          float (&sum)[4][kPer]) const {
  uint32_t word[kPer / 2];
  if constexpr (kPer == 4) {
    const uint2 w = reinterpret_cast<const uint2*>(row)[block_.lane];
    word[0] = w.x, word[1] = w.y;
  } else {
    word[0] = reinterpret_cast<const uint32_t*>(row)[block_.lane];
  }
  float v[kPer];
  floats_of_words<T>(word, v);
  const float4 w = *reinterpret_cast<const float4*>(weights);
  const float weight[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
  for (int r = 0; r < 4; ++r) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) sum[r][i] = weight[r] == 0 ? sum[r][i] : fmaf(weight[r], v[i], sum[r][i]);
  }
}

template <int D, int M>
__device__ __forceinline__ void FewUnits<D, M>::leave_exact(float* rows, float m, float total,
                                                            const float (&sum)[4][kPer]) {
  float sign[kPer];
  load_now(block_.call.value_signs + channel(), sign);
  __syncwarp();
#pragma unroll
  for (int r = 0; r < 4; ++r) store(sum[r], rows + r * kRowFloats + channel());
  if (block_.g == 0) set_head(rows + block_.t * kRowFloats, total == 0 ? -INFINITY : m, total);
#pragma unroll 1
  for (int r = 0; r < 4; ++r) {
    float y[kPer];
#pragma unroll
    for (int i = 0; i < kPer; ++i) y[i] = rows[r * kRowFloats + channel() + i] * sign[i];
    transform<typename Lanes::Rotation>(y, block_.lane);
    store(y, rows + r * kRowFloats + channel());
  }
  __syncwarp();
}

}  // namespace turboquant::cuda::split_kv
