// Attention to few exact keys, of sequences that have few queries, too: a row is a warp's, which reads its query and
// the keys from where they are and computes in float32. A key joins the row as a partial result does. The blocks that
// do this belong to the kernel that prepares queries. Units of exact keys (exact.cuh) would take as many instructions
// and barriers for two keys as for 32, and their block as long again as for its codes.
//
// All scores come first, and keys are read again for the sums: with the registers for both, these blocks would leave no
// room for those of the next kernel, which begin beside them. Every address and every loop is there once: code counts,
// because each launch brings a kernel's own along (docs/measurements/performance_split_kv.md).
#pragma once

#include "cuda/attention/exact_keys.cuh"
#include "cuda/attention/schedule.cuh"
#include "cuda/mla/joined_row.cuh"

namespace turboquant::cuda::mla {

// The row of exact_parts of row `index` < few_rows of a sequence.
template <int R>
__device__ __forceinline__ float* few_exact_row(const Plan& plan, int sequence, int index) {
  return plan.exact_parts + (int64_t{sequence} * plan.few_rows + index) * (kPartHead + R);
}

template <int R>
class FewExactKeys {
  using Row = JoinedRow<R>;
  using Rotation = typename Row::Rotation;
  static constexpr int kQuads = Row::kQuads;
  static constexpr int kRopes = 2;  // raw channels of a lane, of which there are up to 64

  // A query or a key as it came: the channels that the lane has.
  struct Words {
    uint2 latent[kQuads];
    uint16_t rope[kRopes];
  };

 public:
  explicit __device__ __forceinline__ FewExactKeys(const Latents& x)
      : x_(x), lane_(threadIdx.x % 32), elements_{x.a.dtype} {}

  // Row `index` of a sequence with few exact keys. part: [kPart]
  __device__ __forceinline__ void attend(const SequenceWork& work, int index, float* part) const {
    const Attention& a = x_.a;
    const RowPlace place = place_of_row(a, work.first_query, work.length, work.queries, index);
    const RowSight sight = sight_of(a, work.tail, work.length, work.queries, place.position);
    // Lane i knows where key i stands, and whether the row sees it.
    const int keys = work.exact(), position = work.exact_key(min(lane_, keys - 1));
    const ExactKey own = exact_key(x_, work.first_query, work.tail.slot, work.length, work.queries, position);
    const bool sees = lane_ < keys && position <= sight.position && (position < work.sinks || position >= sight.end);
    const Words query =
        load(static_cast<const uint16_t*>(a.q) + place.token * a.q_token_stride + place.head * a.q_head_stride,
             static_cast<const uint16_t*>(x_.q_rope) + place.token * x_.rope_token_stride +
                 place.head * x_.rope_head_stride);
    float score = -INFINITY;  // of the lane's key
    for_keys(own, keys, [&](int i, const Words& key) {
      const float product = multiply(query, key);
      if (lane_ == i && sees) score = product * (a.softmax_scale * kLog2E);
    });
    Row row;
    for_keys(own, keys, [&](int i, const Words& key) { row.add(as_part(key, __shfl_sync(0xffffffff, score, i))); });
    row.leave(part, lane_);
  }

 private:
  // f(i, key i) for all keys, and for the last one once more where their number is odd: two keys' loads overlap.
  template <typename F>
  __device__ __forceinline__ void for_keys(const ExactKey& own, int keys, F&& f) const {
#pragma unroll 1
    for (int i = 0; i < keys; i += 2) {
      const Words first = load(told(own.latent, i), told(own.rope, i));
      const Words second = load(told(own.latent, i + 1), told(own.rope, i + 1));
      f(i, first), f(i + 1, second);
    }
  }

  __device__ __forceinline__ Words load(const void* latent, const void* rope) const {
    Words w;
    const uint16_t* from = static_cast<const uint16_t*>(latent) + Rotation::channel(lane_, 0);
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      w.latent[i] = __ldg(reinterpret_cast<const uint2*>(from + (Rotation::channel(0, i) - Rotation::channel(0, 0))));
    }
#pragma unroll
    for (int i = 0; i < kRopes; ++i) {
      const int channel = lane_ + 32 * i;
      w.rope[i] = channel < x_.record.rope_dim ? static_cast<const uint16_t*>(rope)[channel] : 0;
    }
    return w;
  }

  __device__ __forceinline__ float2 pair(uint32_t word) const {
    if (elements_.wide()) return {__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000)};
    return __half22float2(reinterpret_cast<const __half2&>(word));
  }
  __device__ __forceinline__ float4 quad(const uint2& words) const {
    const float2 low = pair(words.x), high = pair(words.y);
    return {low.x, low.y, high.x, high.y};
  }

  __device__ __forceinline__ float multiply(const Words& query, const Words& key) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const float4 q = quad(query.latent[i]), k = quad(key.latent[i]);
      sum = fmaf(q.x, k.x, fmaf(q.y, k.y, fmaf(q.z, k.z, fmaf(q.w, k.w, sum))));
    }
#pragma unroll
    for (int i = 0; i < kRopes; ++i) sum = fmaf(elements_.number(query.rope[i]), elements_.number(key.rope[i]), sum);
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) sum += __shfl_xor_sync(0xffffffff, sum, bit);
    return sum;
  }

  // A key as a partial result: its score is the maximum, and its weight under that is 1.
  __device__ __forceinline__ typename Row::Loaded as_part(const Words& key, float score) const {
    typename Row::Loaded part;
    part.head = {score, score == -INFINITY ? 0.0f : 1.0f, 0, 0};
#pragma unroll
    for (int i = 0; i < kQuads; ++i) part.x[i] = quad(key.latent[i]);
    return part;
  }

  const Latents& x_;
  const int lane_;
  const ExactElements elements_;
};

// The rows of block `block` of those that attend to few exact keys, each by a warp. Where a sequence has no or many
// exact keys, its rows have none here.
template <int R>
__device__ __forceinline__ void attend_to_few(const Latents& x, const Plan& plan, int block) {
  const int blocks = ceil_div(plan.few_rows, kImageRows), sequence = quotient(block, blocks);
  const int index = (block - sequence * blocks) * kImageRows + static_cast<int>(threadIdx.x / 32);
  const SequenceWork work = work_of_sequence<1, costs_of_units(0)>(x.a, Divisor(kExactPerUnit), sequence, false);
  if (index >= min(work.rows(x.a), plan.few_rows)) return;
  float* part = few_exact_row<R>(plan, sequence, index);
  if (work.exact() > 0 && work.exact_apart(kExactApart)) {
    FewExactKeys<R>(x).attend(work, index, part);
  } else if (threadIdx.x % 32 == 0) {
    *reinterpret_cast<float4*>(part) = {-INFINITY, 0, 0, 0};
  }
}

}  // namespace turboquant::cuda::mla
