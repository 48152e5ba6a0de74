// Attention to a segment's exact keys, those of the tail and the call's own: after its codes, by all warps of the
// blocks that have such units, 32 keys at a time, as a partial result of each block's own. The keys and the queries as
// they came lie in the memory of the ring. Weights are sums of two elements of the tensors' type, so that they keep 16
// bits.
#pragma once

#include "cuda/attention/softmax_math.cuh"
#include "cuda/common/async_copy.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/mla/shape.cuh"

namespace turboquant::cuda::mla {

constexpr int kExactKeys = 32;
__host__ __device__ constexpr int exact_rows(int rows) { return rows < 32 ? rows : 32; }  // at a time

// Elements from one key or query to the next: eight neighbours' words for one ldmatrix stand in different banks.
__host__ __device__ constexpr int exact_stride(int channels) { return channels + 8; }
constexpr int kWeightStride = kExactKeys + 8;

// Bytes of the ring that it needs.
inline int exact_bytes(int channels, int rows) {
  const int r = exact_rows(rows);
  return (kExactKeys + r) * exact_stride(channels) * 2 + 2 * r * kExactKeys * 4 + 2 * r * kWeightStride * 2 + 3 * r * 4;
}

// Elements are 16 bits of either type; only four functions ask which one it is, so that all other code exists once.
template <class S>
class ExactKeys {
  static constexpr int kRows = exact_rows(S::kRows), kTiles = kRows / 8;
  static constexpr int kScoreTiles = kExactKeys / 16 * kTiles;     // products of a step of channels
  static constexpr int kParts = kScoreTiles >= S::kWarps ? 1 : 2;  // of the channels, for different warps
  static constexpr int kSumWarps = S::kWarps < 8 ? S::kWarps : 8, kSums = S::kLatent / 16 / kSumWarps;

 public:
  __device__ __forceinline__ ExactKeys(const BlockView& block, const Segment& segment)
      : block_(block), segment_(segment), stride_(exact_stride(block.call.channels())) {
    keys_ = reinterpret_cast<uint16_t*>(block.shared);
    queries_ = keys_ + kExactKeys * stride_;
    scores_ = reinterpret_cast<float*>(queries_ + kRows * stride_);
    weights_ = reinterpret_cast<uint16_t*>(scores_ + 2 * kRows * kExactKeys);
    state_ = reinterpret_cast<float*>(weights_ + 2 * kRows * kWeightStride);
  }

  // Exact keys [begin, end) of the segment. part: [ROWS, kPart]
  __device__ __forceinline__ void attend(int begin, int end, float* part) {
    end_ = end;
#pragma unroll 1
    for (int first = 0; first < S::kRows; first += kRows) {
      first_row_ = segment_.block * S::kRows + first;
      prepare();
#pragma unroll 1
      for (int key = begin; key < end; key += kExactKeys) {
        copy_keys(key);
        wait_for_copies();  // of queries, too
        const bool spoiled = __syncthreads_or(spoiled_keys());
        multiply_keys();
        __syncthreads();
        weigh(key);
        __syncthreads();
        rescale();
        if (spoiled) {
          sum_seen();
        } else {
          multiply_values();
        }
        __syncthreads();
      }
      leave(part + first * S::kPart);
      __syncthreads();
    }
  }

 private:
  // Starts to copy a vector of latent and rotary channels, by one warp; null: zeros.
  __device__ __forceinline__ void copy(uint16_t* to, const void* latent, const void* rope) const {
    constexpr int kWords = S::kLatent / 8;
    const int words = kWords + block_.call.record.rope_dim / 8;
#pragma unroll
    for (int k = 0; k < (kWords + 8 + 31) / 32; ++k) {
      const int i = 32 * k + block_.lane;
      const uint4* from =
          i < kWords ? static_cast<const uint4*>(latent) + i : static_cast<const uint4*>(rope) + i - kWords;
      if (i < words) copy_or_clear(to + 8 * i, latent ? from : block_.call.a.q, latent != nullptr);
    }
  }
  // Whether one of the latent channels that the lane has copied to there is infinite or NaN.
  __device__ __forceinline__ bool is_spoiled(const uint16_t* vector) const {
    const uint32_t exponent = wide() ? 0x7F80 : 0x7C00;
    bool spoiled = false;
#pragma unroll
    for (int i = block_.lane; i < S::kLatent / 8; i += 32) {
      const uint4 x = *reinterpret_cast<const uint4*>(vector + 8 * i);
      const uint32_t word[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        spoiled |= (word[k] & exponent) == exponent || (word[k] >> 16 & exponent) == exponent;
      }
    }
    return spoiled;
  }
  __device__ __forceinline__ RowPlace place(int index) const {
    const SequenceWork& work = segment_.work;
    return place_of_row(block_.call.a, segment_.sequence, work.length, work.queries, index);
  }
  __device__ __forceinline__ bool exists(int index) const { return index < segment_.work.rows(block_.call.a); }

  __device__ __forceinline__ void prepare() {
    const Latents& x = block_.call;
    for (int r = block_.warp; r < kRows; r += S::kWarps) {
      const uint16_t *latent = nullptr, *rope = nullptr;
      if (exists(first_row_ + r)) {
        const RowPlace row = place(first_row_ + r);
        latent = static_cast<const uint16_t*>(x.a.q) + row.token * x.a.q_token_stride + row.head * x.a.q_head_stride;
        rope = static_cast<const uint16_t*>(x.q_rope) + row.token * x.rope_token_stride + row.head * x.rope_head_stride;
      }
      copy(queries_ + r * stride_, latent, rope);
    }
    for (int i = threadIdx.x; i < kRows; i += S::kThreads) maximum(i) = -INFINITY, total(i) = 0;
#pragma unroll
    for (int b = 0; b < kSums; ++b) {
#pragma unroll
      for (int i = 0; i < 4 * kTiles; ++i) sums_[b][i] = 0;
    }
  }

  __device__ __forceinline__ void copy_keys(int first) const {
    const SequenceWork& work = segment_.work;
    for (int i = block_.warp; i < kExactKeys; i += S::kWarps) {
      ExactKey key{};
      if (first + i < end_) {
        key = exact_key(block_.call, segment_.sequence, work.length, work.queries, work.exact_key(first + i));
      }
      copy(keys_ + i * stride_, key.latent, key.rope);
    }
  }
  __device__ __forceinline__ bool spoiled_keys() const {
    bool spoiled = false;
    for (int i = block_.warp; i < kExactKeys; i += S::kWarps) spoiled |= is_spoiled(keys_ + i * stride_);
    return spoiled;
  }

  // scores_[part][row][key], over a part of the channels
  __device__ __forceinline__ void multiply_keys() const {
    const int lane = block_.lane, steps = block_.call.channels() / 16;
    for (int i = block_.warp; i < kScoreTiles * kParts; i += S::kWarps) {
      const int part = i / kScoreTiles, tile = i % kScoreTiles % kTiles, half = i % kScoreTiles / kTiles;
      const uint16_t* keys = keys_ + (half * 16 + lane % 16) * stride_ + lane / 16 * 8;
      const uint16_t* queries = queries_ + (tile * 8 + lane % 8) * stride_ + lane / 8 * 8;
      float d[2][4] = {};
      const int begin = steps / 2 * part / kParts * 2,
                end = part + 1 == kParts ? steps : steps / 2 * (part + 1) / kParts * 2;
#pragma unroll 2
      for (int s = begin; s < end; s += 2) {  // channels are a multiple of 32
        const uint4 q = load_tiles(queries + s * 16);
        multiply(d[0], load_tiles(keys + s * 16), q.x, q.y);
        multiply(d[1], load_tiles(keys + (s + 1) * 16), q.z, q.w);
      }
      float* to = scores_ + (part * kRows + tile * 8 + 2 * block_.t) * kExactKeys + half * 16 + block_.g;
      to[0] = d[0][0] + d[1][0], to[kExactKeys] = d[0][1] + d[1][1];
      to[8] = d[0][2] + d[1][2], to[kExactKeys + 8] = d[0][3] + d[1][3];
    }
  }

  // A warp for a row, a lane for a key.
  __device__ __forceinline__ void weigh(int first) const {
    const Attention& a = block_.call.a;
    const SequenceWork& work = segment_.work;
    for (int r = block_.warp; r < kRows; r += S::kWarps) {
      float x = 0;
#pragma unroll
      for (int p = 0; p < kParts; ++p) x += scores_[(p * kRows + r) * kExactKeys + block_.lane];
      x *= a.softmax_scale * kLog2E;
      bool sees = exists(first_row_ + r) && first + block_.lane < end_;
      if (sees) {
        const RowSight sight =
            sight_of(a, segment_.sequence, work.length, work.queries, place(first_row_ + r).position);
        const int key = work.exact_key(first + block_.lane);
        sees = key <= sight.position && (key < work.sinks || key >= sight.end);
      }
      float top = sees ? x : -INFINITY;
#pragma unroll
      for (int bit = 1; bit < 32; bit *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, bit));
      const float before = maximum(r);
      top = fmaxf(top, before);
      const float p = sees ? exp2_fast(x - (top == -INFINITY ? 0 : top)) : 0;
      float sum = p;
#pragma unroll
      for (int bit = 1; bit < 32; bit *= 2) sum += __shfl_xor_sync(0xffffffff, sum, bit);
      uint16_t* to = weights_ + r * kWeightStride + block_.lane;
      to[0] = element(p), to[kRows * kWeightStride] = element(p - number(to[0]));
      __syncwarp();
      if (block_.lane == 0) {
        const float by = weight_of(before, top);
        maximum(r) = top, total(r) = total(r) * by + sum, factor(r) = by;
      }
    }
  }

  __device__ __forceinline__ void rescale() {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const float by[2] = {factor(8 * j + 2 * block_.t), factor(8 * j + 2 * block_.t + 1)};
#pragma unroll
      for (int b = 0; b < kSums; ++b) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums_[b][4 * j + i] *= by[i % 2];
      }
    }
  }

  // Element 4 j + i of sums_[b] is row 8 j + 2 t + i % 2 and this channel.
  __device__ __forceinline__ int channel(int b, int i) const {
    return (b * kSumWarps + block_.warp) * 16 + block_.g + i / 2 * 8;
  }

  // Weight 0 times an infinite channel or a NaN is NaN: where there is such a channel, a row adds only the keys that it
  // sees.
  __device__ __forceinline__ void sum_seen() {
    if (block_.warp >= kSumWarps) return;
#pragma unroll 1
    for (int k = 0; k < kExactKeys; ++k) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint16_t* weight = weights_ + (8 * j + 2 * block_.t + i % 2) * kWeightStride + k;
          const float p = number(weight[0]) + number(weight[kRows * kWeightStride]);
          if (p == 0) continue;
#pragma unroll
          for (int b = 0; b < kSums; ++b) {
            float& sum = sums_[b][4 * j + i];
            sum = fmaf(p, number(keys_[k * stride_ + channel(b, i)]), sum);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void multiply_values() {
    if (block_.warp >= kSumWarps) return;
    const int lane = block_.lane;
#pragma unroll 1
    for (int s = 0; s < kExactKeys / 16; ++s) {
      const uint16_t* keys = keys_ + (s * 16 + lane % 8 + lane / 16 * 8) * stride_ + lane / 8 % 2 * 8;
      uint4 v[kSums];
#pragma unroll
      for (int b = 0; b < kSums; ++b) v[b] = load_transposed(keys + (b * kSumWarps + block_.warp) * 16);
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          const uint16_t* weights =
              weights_ + (part * kRows + 8 * j + block_.g) * kWeightStride + s * 16 + 2 * block_.t;
          const uint32_t low = *reinterpret_cast<const uint32_t*>(weights);
          const uint32_t high = *reinterpret_cast<const uint32_t*>(weights + 8);
#pragma unroll
          for (int b = 0; b < kSums; ++b) {
            multiply(reinterpret_cast<float (&)[4]>(sums_[b][4 * j]), v[b], low, high);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void leave(float* part) const {
    for (int r = threadIdx.x; r < kRows; r += S::kThreads) {
      float* head = part + r * S::kPart;
      head[0] = maximum(r), head[1] = total(r), head[2] = 0;
    }
    if (block_.warp >= kSumWarps) return;
#pragma unroll
    for (int b = 0; b < kSums; ++b) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          part[(8 * j + 2 * block_.t + i % 2) * S::kPart + kPartHead + channel(b, i)] = sums_[b][4 * j + i];
        }
      }
    }
  }

  __device__ __forceinline__ bool wide() const { return block_.call.a.dtype == Dtype::kBFloat16; }
  __device__ __forceinline__ void multiply(float (&d)[4], const uint4& a, uint32_t b0, uint32_t b1) const {
    if (wide()) {
      mma_floats<__nv_bfloat16>(d, a, b0, b1);
    } else {
      mma_floats<__half>(d, a, b0, b1);
    }
  }
  __device__ __forceinline__ uint16_t element(float x) const {
    return static_cast<uint16_t>(wide() ? word_of_floats<__nv_bfloat16>(x, 0) : word_of_floats<__half>(x, 0));
  }
  __device__ __forceinline__ float number(uint16_t element) const {
    return wide() ? __uint_as_float(uint32_t{element} << 16) : __half2float(__ushort_as_half(element));
  }

  __device__ __forceinline__ float& maximum(int r) const { return state_[r]; }
  __device__ __forceinline__ float& total(int r) const { return state_[kRows + r]; }
  __device__ __forceinline__ float& factor(int r) const { return state_[2 * kRows + r]; }

  const BlockView block_;
  const Segment segment_;
  const int stride_;
  int first_row_;              // of the sequence's rows
  int end_;                    // of the block's exact keys
  uint16_t *keys_, *queries_;  // [32, stride], [kRows, stride]
  float* scores_;              // [2, kRows, 32]
  uint16_t* weights_;          // [2, kRows, kWeightStride]: weights, and what rounding has left of them
  float* state_;               // [3, kRows]
  float sums_[kSums][4 * kTiles];
};

}  // namespace turboquant::cuda::mla
