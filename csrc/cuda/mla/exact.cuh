// Attention to a segment's exact keys, those of the tail and the call's own: after its codes, by all warps of the
// blocks that have such units, 32 keys at a time, as a partial result of each block's own. The keys and the queries as
// they came lie in the memory of the ring. Weights are sums of two elements of the tensors' type, so that they keep 16
// bits.
#pragma once

#include "cuda/attention/exact_keys.cuh"
#include "cuda/attention/softmax_math.cuh"
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
  return (kExactKeys + r) * exact_stride(channels) * 2 + 2 * r * kExactKeys * 4 + 2 * r * kWeightStride * 2 + 5 * r * 4;
}

template <class S>
class ExactKeys {
  static constexpr int kRows = exact_rows(S::kRows), kTiles = kRows / 8;
  static constexpr int kScoreTiles = kExactKeys / 16 * kTiles;            // products of a step of channels
  static constexpr int kChannelParts = kScoreTiles >= S::kWarps ? 1 : 2;  // of the channels, for different warps
  static constexpr int kLanesOfRow = 8, kRowsAtOnce = 32 / kLanesOfRow, kKeysOfLane = kExactKeys / kLanesOfRow;
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
        first_ = key;
        copy_keys();
        attend_to_copied(*this);  // queries have been copied, too
      }
      leave(part + first * S::kPart);
      __syncthreads();
    }
  }

 private:
  friend void attend_to_copied<ExactKeys>(ExactKeys&);

  __device__ __forceinline__ ExactElements elements() const { return {block_.call.a.dtype}; }

  // Starts to copy a vector of latent and raw channels, by one warp; null: zeros.
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
    const uint32_t exponent = elements().exponent();
    bool spoiled = false;
#pragma unroll
    for (int i = block_.lane; i < S::kLatent / 8; i += 32) {
      look_for_spoiled(*reinterpret_cast<const uint4*>(vector + 8 * i), exponent, spoiled);
    }
    return spoiled;
  }
  // A warp has rows and keys i, i + kWarps and so on. Its lane k finds where the k-th of them stands.
  __device__ __forceinline__ void prepare() {
    const Latents& x = block_.call;
    const SequenceWork& work = segment_.work;
    const int row = block_.warp + block_.lane * S::kWarps, index = first_row_ + row;
    const uint16_t *latent = nullptr, *rope = nullptr;
    if (row < kRows) {
      int last_seen = -1, coded_end = 0;
      if (index < work.rows(x.a)) {
        const RowPlace place = place_of_row(x.a, work.first_query, work.length, work.queries, index);
        const RowSight sight = sight_of(x.a, work.tail, work.length, work.queries, place.position);
        last_seen = sight.position, coded_end = sight.end;
        latent =
            static_cast<const uint16_t*>(x.a.q) + place.token * x.a.q_token_stride + place.head * x.a.q_head_stride;
        rope = static_cast<const uint16_t*>(x.q_rope) + place.token * x.rope_token_stride +
               place.head * x.rope_head_stride;
      }
      maximum(row) = -INFINITY, total(row) = 0, last_of(row) = last_seen, coded_end_of(row) = coded_end;
    }
    for (int k = 0, r = block_.warp; r < kRows; ++k, r += S::kWarps) {
      copy(queries_ + r * stride_, told(latent, k), told(rope, k));
    }
#pragma unroll
    for (int b = 0; b < kSums; ++b) {
#pragma unroll
      for (int i = 0; i < 4 * kTiles; ++i) sums_[b][i] = 0;
    }
  }

  __device__ __forceinline__ void copy_keys() const {
    const SequenceWork& work = segment_.work;
    const int mine = block_.warp + block_.lane * S::kWarps;
    ExactKey key{};
    if (mine < kExactKeys && first_ + mine < end_) {
      key = exact_key(block_.call, work.first_query, work.tail.slot, work.length, work.queries,
                      work.exact_key(first_ + mine));
    }
    for (int k = 0, i = block_.warp; i < kExactKeys; ++k, i += S::kWarps) {
      copy(keys_ + i * stride_, told(key.latent, k), told(key.rope, k));
    }
  }
  __device__ __forceinline__ bool spoiled_values() const {
    bool spoiled = false;
    for (int i = block_.warp; i < kExactKeys; i += S::kWarps) spoiled |= is_spoiled(keys_ + i * stride_);
    return spoiled;
  }

  // scores_[part][row][key], over a part of the channels
  __device__ __forceinline__ void multiply_keys() const {
    const int lane = block_.lane, steps = block_.call.channels() / 16;
    for (int i = block_.warp; i < kScoreTiles * kChannelParts; i += S::kWarps) {
      const int part = i / kScoreTiles, tile = i % kScoreTiles % kTiles, half = i % kScoreTiles / kTiles;
      const uint16_t* keys = keys_ + (half * 16 + lane % 16) * stride_ + lane / 16 * 8;
      const uint16_t* queries = queries_ + (tile * 8 + lane % 8) * stride_ + lane / 8 * 8;
      float d[2][4] = {};
      const int begin = steps / 2 * part / kChannelParts * 2,
                end = part + 1 == kChannelParts ? steps : steps / 2 * (part + 1) / kChannelParts * 2;
#pragma unroll 2
      for (int s = begin; s < end; s += 2) {  // channels are a multiple of 32
        const uint4 q = load_tiles(queries + s * 16);
        elements().multiply(d[0], load_tiles(keys + s * 16), q.x, q.y);
        elements().multiply(d[1], load_tiles(keys + (s + 1) * 16), q.z, q.w);
      }
      float* to = scores_ + (part * kRows + tile * 8 + 2 * block_.t) * kExactKeys + half * 16 + block_.g;
      to[0] = d[0][0] + d[1][0], to[kExactKeys] = d[0][1] + d[1][1];
      to[8] = d[0][2] + d[1][2], to[kExactKeys + 8] = d[0][3] + d[1][3];
    }
  }

  // Eight lanes for a row, each of which has every eighth key.
  __device__ __forceinline__ void weigh() const {
    const SequenceWork& work = segment_.work;
    const int own = block_.lane % kLanesOfRow;
#pragma unroll 1
    for (int r = block_.warp * kRowsAtOnce + block_.lane / kLanesOfRow; r < kRows; r += S::kWarps * kRowsAtOnce) {
      const int last_seen = last_of(r), coded_end = coded_end_of(r);
      const float before = maximum(r);
      float x[kKeysOfLane], top = before, sum = 0;
#pragma unroll
      for (int n = 0; n < kKeysOfLane; ++n) {
        const int i = own + n * kLanesOfRow, key = work.exact_key(first_ + i);
        const bool sees = first_ + i < end_ && key <= last_seen && (key < work.sinks || key >= coded_end);
        x[n] = 0;
#pragma unroll
        for (int p = 0; p < kChannelParts; ++p) x[n] += scores_[(p * kRows + r) * kExactKeys + i];
        x[n] = sees ? x[n] * (block_.call.a.softmax_scale * kLog2E) : -INFINITY, top = fmaxf(top, x[n]);
      }
#pragma unroll
      for (int bit = 1; bit < kLanesOfRow; bit *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, bit));
#pragma unroll
      for (int n = 0; n < kKeysOfLane; ++n) {
        const float p = exp2_fast(x[n] - (top == -INFINITY ? 0 : top));
        uint16_t* to = weights_ + r * kWeightStride + own + n * kLanesOfRow;
        to[0] = elements().element(p), to[kRows * kWeightStride] = elements().element(p - elements().number(to[0])),
        sum += p;
      }
#pragma unroll
      for (int bit = 1; bit < kLanesOfRow; bit *= 2) sum += __shfl_xor_sync(0xffffffff, sum, bit);
      if (own == 0) {
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

  // Each row adds only the keys that it sees.
  __device__ __forceinline__ void sum_seen() {
    if (block_.warp >= kSumWarps) return;
#pragma unroll 1
    for (int k = 0; k < kExactKeys; ++k) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint16_t* weight = weights_ + (8 * j + 2 * block_.t + i % 2) * kWeightStride + k;
          const float p = elements().number(weight[0]) + elements().number(weight[kRows * kWeightStride]);
          if (p == 0) continue;
#pragma unroll
          for (int b = 0; b < kSums; ++b) {
            float& sum = sums_[b][4 * j + i];
            sum = fmaf(p, elements().number(keys_[k * stride_ + channel(b, i)]), sum);
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
            elements().multiply(reinterpret_cast<float (&)[4]>(sums_[b][4 * j]), v[b], low, high);
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

  __device__ __forceinline__ float& maximum(int r) const { return state_[r]; }
  __device__ __forceinline__ float& total(int r) const { return state_[kRows + r]; }
  __device__ __forceinline__ float& factor(int r) const { return state_[2 * kRows + r]; }
  // The last key that a row sees (-1: there is no such row), and the end of those that it sees from codes.
  __device__ __forceinline__ int& last_of(int r) const { return reinterpret_cast<int*>(state_)[3 * kRows + r]; }
  __device__ __forceinline__ int& coded_end_of(int r) const { return reinterpret_cast<int*>(state_)[4 * kRows + r]; }

  const BlockView block_;
  const Segment segment_;
  const int stride_;
  int first_row_;              // of the sequence's rows
  int first_, end_;            // the first of the keys that are attended to; the end of the block's exact keys
  uint16_t *keys_, *queries_;  // [32, stride], [kRows, stride]
  float* scores_;              // [2, kRows, 32]
  uint16_t* weights_;          // [2, kRows, kWeightStride]: weights, and what rounding has left of them
  float* state_;               // [5, kRows]
  float sums_[kSums][4 * kTiles];
};

}  // namespace turboquant::cuda::mla
