// A row of results while partial results are added to it, by a warp whose lanes hold its channels.
#pragma once

#include "cuda/attention/softmax_math.cuh"
#include "cuda/mla/shape.cuh"

namespace turboquant::cuda::mla {

// Where rows go, and what turns their sums into latents. In registers: a function that is not inlined would read the
// members of the call from memory, one after the other, whenever it needs them.
struct Results {
  const float *signs, *inverse, *center;
  void* out;
  float* lse;
  Dtype dtype;

  explicit __device__ __forceinline__ Results(const Latents& x)
      : signs(x.signs), inverse(x.a.channels.inverse), center(x.a.channels.center), out(x.a.out), lse(x.a.lse),
        dtype(x.a.dtype) {}
};

// A row while partial results are added to it; a lane has some of its channels.
template <int R>
struct JoinedRow {
  using Rotation = RowRotation<R>;
  static constexpr int kPerLane = Rotation::kPerLane, kQuads = kPerLane / 4;

  float top = -INFINITY, total = 0, y[kPerLane] = {};

  struct Loaded {
    float4 head, x[kQuads];
  };
  // part: a row of a partial result, which other blocks may have written
  static __device__ __forceinline__ Loaded read(const float* part, int lane) {
    Loaded l;
    l.head = __ldcg(reinterpret_cast<const float4*>(part));
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      l.x[i] = __ldcg(reinterpret_cast<const float4*>(part + kPartHead + Rotation::channel(lane, i)));
    }
    return l;
  }
  static __device__ __forceinline__ Loaded read_shared(const float* part, int lane) {
    Loaded l;
    l.head = *reinterpret_cast<const float4*>(part);
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      l.x[i] = *reinterpret_cast<const float4*>(part + kPartHead + Rotation::channel(lane, i));
    }
    return l;
  }
  __device__ __forceinline__ void add(const Loaded& l) {
    if (l.head.x == -INFINITY && l.head.y == 0) return;  // no keys: the sums may be anything
    const float higher = fmaxf(top, l.head.x), by = weight_of(top, higher), weight = weight_of(l.head.x, higher);
    top = higher, total = total * by + weight * l.head.y;
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const float x[4] = {l.x[i].x, l.x[i].y, l.x[i].z, l.x[i].w};
#pragma unroll
      for (int k = 0; k < 4; ++k) y[4 * i + k] = y[4 * i + k] * by + weight * (x[k] - l.head.z);
    }
  }
  // Parts first, first + step, .. of `count`, a few at a time, so that their loads overlap. at(i): row of part i
  template <int kBatch, typename At>
  __device__ __forceinline__ void add_all(int first, int step, int count, int lane, At&& at) {
#pragma unroll 1
    for (int i = first; i < count; i += kBatch * step) {
      Loaded l[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        l[k].head = {-INFINITY, 0, 0, 0};
        if (i + k * step < count) l[k] = read(at(i + k * step), lane);
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) add(l[k]);
    }
  }

  // A row in memory, like that of a partial result.
  __device__ __forceinline__ void leave(float* to, int lane) const {
    if (lane == 0) *reinterpret_cast<float4*>(to) = {top, total, 0, 0};
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      *reinterpret_cast<float4*>(to + kPartHead + Rotation::channel(lane, i)) = {y[4 * i], y[4 * i + 1], y[4 * i + 2],
                                                                                 y[4 * i + 3]};
    }
  }

  // Sums of levels become sums of latents.
  __device__ __forceinline__ void rotate_back(const Results& to, int lane) {
    if (to.signs) {
      transform<Rotation>(y, lane);
      apply_signs<Rotation>(y, to.signs, lane);
    }
    if (to.inverse) apply_signs<Rotation>(y, to.inverse, lane);
    if (to.center) {
      float c[kPerLane];
      load<Rotation>(to.center, lane, c);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) y[i] = fmaf(total, c[i], y[i]);
    }
  }

  // row: token * q_heads + head
  __device__ __forceinline__ void write(const Results& to, int64_t row, int lane) {
    const float inverse = total == 0 ? 0 : 1 / total;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) y[i] *= inverse;
    with_16_bit_type(to.dtype, [&](auto tag) {
      store<Rotation>(y, lane, static_cast<typename decltype(tag)::type*>(to.out) + row * R);
    });
    if (lane == 0) to.lse[row] = total == 0 ? -INFINITY : (top + log2f(total)) * kLn2;
  }
};

}  // namespace turboquant::cuda::mla
