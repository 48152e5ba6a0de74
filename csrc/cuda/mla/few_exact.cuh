// Attention to few exact keys, of sequences that have few queries, too: a row is a warp's, which reads its query and the
// keys from where they are and computes in float32. A key joins the row as a partial result does. The blocks that do
// this belong to the kernel that prepares queries. Units of exact keys (exact.cuh) would take as many instructions and
// barriers for two keys as for 32, and their block as long again as for its codes.
#pragma once

#include "cuda/attention/schedule.cuh"
#include "cuda/mla/joined_row.cuh"

namespace turboquant::cuda::mla {

// The row of exact_parts of row `index` < few_rows of a sequence.
template <int R>
__device__ __forceinline__ float* few_exact_row(const Plan& plan, int sequence, int index) {
  return plan.exact_parts + (int64_t{sequence} * plan.few_rows + index) * (kPartHead + R);
}

// T: the type of queries and keys. All scores come first, and keys are read again for the sums: with the registers for
// both, these blocks would leave no room for those of the next kernel, which begin beside them.
template <int R, typename T>
class FewExactKeys {
  using Row = JoinedRow<R>;
  using Rotation = typename Row::Rotation;
  static constexpr int kAtOnce = 2;  // keys whose loads overlap
  static constexpr int kRopes = 2;   // raw channels of a lane, of which there are up to 64

  // A query or a key: the channels that the lane has.
  struct Vector {
    uint2 latent[Row::kQuads];
    T rope[kRopes];

    __device__ __forceinline__ float4 quad(int i) const {
      const uint32_t word[2] = {latent[i].x, latent[i].y};
      float x[4];
      floats_of_words<T>(word, x);
      return {x[0], x[1], x[2], x[3]};
    }
  };

 public:
  explicit __device__ __forceinline__ FewExactKeys(const Latents& x) : x_(x), lane_(threadIdx.x % 32) {}

  // Row `index` of a sequence with few exact keys. part: [kPart]
  __device__ __forceinline__ void attend(const SequenceWork& work, int index, float* part) const {
    const Attention& a = x_.a;
    const RowPlace place = place_of_row(a, work.first_query, work.length, work.queries, index);
    const RowSight sight = sight_of(a, work.tail, work.length, work.queries, place.position);
    const Vector query =
        load(static_cast<const T*>(a.q) + place.token * a.q_token_stride + place.head * a.q_head_stride,
             static_cast<const T*>(x_.q_rope) + place.token * x_.rope_token_stride + place.head * x_.rope_head_stride);
    const int keys = work.exact();
    float scores = -INFINITY;  // of the lane's key
    for_keys(work, keys, [&](int i, const Vector& key) {
      const int position = work.exact_key(i);
      const bool sees = i < keys && position <= sight.position && (position < work.sinks || position >= sight.end);
      const float score = product(query, key) * (a.softmax_scale * kLog2E);
      if (lane_ == i && sees) scores = score;
    });
    Row row;
    for_keys(work, keys, [&](int i, const Vector& key) { row.add(as_part(key, __shfl_sync(0xffffffff, scores, i))); });
    row.leave(part, lane_);
  }

 private:
  __device__ __forceinline__ Vector load(const void* latent, const void* rope) const {
    Vector v;
#pragma unroll
    for (int i = 0; i < Row::kQuads; ++i) {
      v.latent[i] = __ldg(reinterpret_cast<const uint2*>(static_cast<const T*>(latent) + Rotation::channel(lane_, i)));
    }
#pragma unroll
    for (int i = 0; i < kRopes; ++i) {
      const int channel = lane_ + 32 * i;
      v.rope[i] = channel < x_.record.rope_dim ? static_cast<const T*>(rope)[channel] : T(0.0f);
    }
    return v;
  }

  static __device__ __forceinline__ float product(const Vector& query, const Vector& key) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < Row::kQuads; ++i) {
      const float4 q = query.quad(i), k = key.quad(i);
      sum = fmaf(q.x, k.x, fmaf(q.y, k.y, fmaf(q.z, k.z, fmaf(q.w, k.w, sum))));
    }
#pragma unroll
    for (int i = 0; i < kRopes; ++i) {
      sum = fmaf(static_cast<float>(query.rope[i]), static_cast<float>(key.rope[i]), sum);
    }
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) sum += __shfl_xor_sync(0xffffffff, sum, bit);
    return sum;
  }

  // f(i, key i) for all keys and for those that fill up the last batch.
  template <typename F>
  __device__ __forceinline__ void for_keys(const SequenceWork& work, int keys, F&& f) const {
#pragma unroll 1
    for (int i = 0; i < keys; i += kAtOnce) {
      Vector key[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const ExactKey at = exact_key(x_, work.first_query, work.tail.slot, work.length, work.queries,
                                      work.exact_key(min(i + k, keys - 1)));
        key[k] = load(at.latent, at.rope);
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) f(i + k, key[k]);
    }
  }

  // A key as a partial result: its score is the maximum, and its weight under that is 1.
  static __device__ __forceinline__ typename Row::Loaded as_part(const Vector& key, float score) {
    typename Row::Loaded part;
    part.head = {score, score == -INFINITY ? 0.0f : 1.0f, 0, 0};
#pragma unroll
    for (int i = 0; i < Row::kQuads; ++i) part.x[i] = key.quad(i);
    return part;
  }

  const Latents& x_;
  const int lane_;
};

// The rows of block `block` of those that attend to few exact keys, each by a warp.
template <int R>
__device__ __forceinline__ void attend_to_few(const Latents& x, const Plan& plan, int block) {
  const int blocks = ceil_div(plan.few_rows, kImageRows), sequence = quotient(block, blocks);
  const int index = (block - sequence * blocks) * kImageRows + static_cast<int>(threadIdx.x / 32);
  const SequenceWork work = work_of_sequence<1, costs_of_units(0)>(x.a, Divisor(kExactPerUnit), sequence, false);
  if (index >= min(work.rows(x.a), plan.few_rows)) return;
  float* part = few_exact_row<R>(plan, sequence, index);
  if (work.exact() == 0 || !work.exact_apart(kExactApart)) {  // none here
    if (threadIdx.x % 32 == 0) *reinterpret_cast<float4*>(part) = {-INFINITY, 0, 0, 0};
  } else if (x.a.dtype == Dtype::kBFloat16) {
    FewExactKeys<R, __nv_bfloat16>(x).attend(work, index, part);
  } else {
    FewExactKeys<R, __half>(x).attend(work, index, part);
  }
}

}  // namespace turboquant::cuda::mla
