// Attention to a segment's exact keys, those of the tail and the call's own: after its codes, by all warps of the
// blocks that have such units, 32 keys at a time and 32 rows. Its sums are rotated row by row, as values were, and
// added to the partial result of the codes. Weights are sums of two elements of the tensors' type, so that they keep 16
// bits.
#pragma once

#include "cuda/attention/key_tiles/shape.cuh"
#include "cuda/attention/softmax_math.cuh"
#include "cuda/common/async_copy.cuh"
#include "cuda/common/mma.cuh"

namespace turboquant::cuda::key_tiles {

constexpr int kExactKeys = 32, kExactRows = 32;  // at a time

// Elements from one key, value or query to the next: eight neighbours' words for one ldmatrix are in different banks.
__host__ __device__ constexpr int exact_stride(int channels) { return channels + 8; }
constexpr int kWeightStride = kExactKeys + 8;

// Bytes of shared memory that it needs.
constexpr int exact_bytes(int d) {
  return (2 * kExactKeys + kExactRows) * exact_stride(d) * 2 + kExactRows * kExactKeys * 4 +
         2 * kExactRows * kWeightStride * 2 + 3 * kExactRows * 4;
}

// Elements are 16 bits of either type; only four functions ask which one it is, so that all other code exists once.
template <class S>
class ExactKeys {
  static constexpr int kD = S::kDim, kTiles = kExactRows / 8, kStride = exact_stride(kD);
  using Rows = split_kv::QueryRows<S::kDim, S::kRows>;
  static_assert(kExactKeys / 16 * kTiles == kWarps && kD == 16 * kWarps);
  static_assert(kExactRows * kD * 4 <= 2 * kExactKeys * kStride * 2);  // sums take the place of keys and values

 public:
  __device__ __forceinline__ ExactKeys(const View& block, const Rows& rows, const Segment& segment)
      : block_(block), rows_(rows), segment_(segment), table_(block.table(S::kRows)) {
    keys_ = reinterpret_cast<uint16_t*>(block.shared + block.own.exact);
    values_ = keys_ + kExactKeys * kStride;
    queries_ = values_ + kExactKeys * kStride;
    scores_ = reinterpret_cast<float*>(queries_ + kExactRows * kStride);
    weights_ = reinterpret_cast<uint16_t*>(scores_ + kExactRows * kExactKeys);
    state_ = reinterpret_cast<float*>(weights_ + 2 * kExactRows * kWeightStride);
  }

  // Adds exact keys [begin, end) of the segment to `part`, [ROWS, kPart].
  __device__ __forceinline__ void attend(int begin, int end, float* part) {
    end_ = end;
#pragma unroll 1
    for (int first = 0; first < S::kRows; first += kExactRows) {
      first_ = first;
      prepare();
#pragma unroll 1
      for (int key = begin; key < end; key += kExactKeys) {
        copy_keys(key);
        wait_for_copies();  // of queries, too
        const bool spoiled = __syncthreads_or(spoiled_values());
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
      leave();
      __syncthreads();
      add_to(part);
      __syncthreads();
    }
  }

 private:
  // Starts to copy a vector, by one warp; null: zeros.
  __device__ __forceinline__ void copy(uint16_t* to, const void* from) const {
    if (block_.lane >= kD / 8) return;
    const int i = block_.lane;
    copy_or_clear(to + 8 * i, from ? static_cast<const uint4*>(from) + i : block_.call.q, from != nullptr);
  }
  // Queries may begin anywhere.
  __device__ __forceinline__ void copy_query(uint16_t* to, const uint16_t* from) const {
    if (from == nullptr || reinterpret_cast<uint64_t>(from) % 16 == 0) return copy(to, from);
#pragma unroll
    for (int i = block_.lane; i < kD; i += 32) to[i] = from[i];
  }

  __device__ __forceinline__ void prepare() {
    const Attention& a = block_.call;
    for (int r = block_.warp; r < kExactRows; r += kWarps) {
      split_kv::RowPlace place;
      const uint16_t* query = nullptr;
      if (rows_.find(segment_, first_ + r, place)) {
        query = static_cast<const uint16_t*>(a.q) + place.token * a.q_token_stride + place.head * a.q_head_stride;
      }
      copy_query(queries_ + r * kStride, query);
    }
    for (int i = threadIdx.x; i < kExactRows; i += kThreads) maximum(i) = -INFINITY, total(i) = 0;
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) sums_[i] = 0;
  }

  __device__ __forceinline__ void copy_keys(int first) const {
    const Attention& a = block_.call;
    const SequenceWork& work = segment_.work;
    const int new_begin = a.new_begin(work.length, work.queries);
    for (int i = block_.warp; i < kExactKeys; i += kWarps) {
      const void *key = nullptr, *value = nullptr;
      if (first + i < end_) {
        const int position = work.exact_key(first + i);
        if (position >= new_begin) {
          const int64_t token = work.first_query + position - new_begin;
          key = a.new_row(token, segment_.head, false), value = a.new_row(token, segment_.head, true);
        } else {
          const int rows = a.sink_tokens + a.ring, row = format::tail_row(position, a.sink_tokens, a.ring);
          const int64_t at =
              format::tail_offset<int64_t>(work.tail.slot, a.tail_stride, segment_.head, row, rows, int64_t{kD}, 0);
          key = static_cast<const uint16_t*>(a.tail) + at, value = static_cast<const uint16_t*>(key) + kD;
        }
      }
      copy(keys_ + i * kStride, key), copy(values_ + i * kStride, value);
    }
  }
  // Whether a channel of the values that the warp has copied is infinite or NaN.
  __device__ __forceinline__ bool spoiled_values() const {
    const uint32_t exponent = wide() ? 0x7F80 : 0x7C00;
    bool spoiled = false;
    for (int r = block_.warp; r < kExactKeys; r += kWarps) {
      const uint2 x = *reinterpret_cast<const uint2*>(values_ + r * kStride + 4 * block_.lane);
      const uint32_t word[2] = {x.x, x.y};
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        spoiled |= (word[k] & exponent) == exponent || (word[k] >> 16 & exponent) == exponent;
      }
    }
    return spoiled;
  }

  // scores_[row][key]: a warp has 16 keys and eight rows.
  __device__ __forceinline__ void multiply_keys() const {
    const int lane = block_.lane, tile = block_.warp % kTiles, half = block_.warp / kTiles;
    const uint16_t* keys = keys_ + (half * 16 + lane % 16) * kStride + lane / 16 * 8;
    const uint16_t* queries = queries_ + (tile * 8 + lane % 8) * kStride + lane / 8 * 8;
    float d[2][4] = {};
#pragma unroll 2
    for (int s = 0; s < kD / 16; s += 2) {
      const uint4 q = load_tiles(queries + s * 16);
      multiply(d[0], load_tiles(keys + s * 16), q.x, q.y);
      multiply(d[1], load_tiles(keys + (s + 1) * 16), q.z, q.w);
    }
    float* to = scores_ + (tile * 8 + 2 * block_.t) * kExactKeys + half * 16 + block_.g;
    to[0] = d[0][0] + d[1][0], to[kExactKeys] = d[0][1] + d[1][1];
    to[8] = d[0][2] + d[1][2], to[kExactKeys + 8] = d[0][3] + d[1][3];
  }

  // A warp for a row, a lane for a key.
  __device__ __forceinline__ void weigh(int first) const {
    const Attention& a = block_.call;
    const SequenceWork& work = segment_.work;
    for (int r = block_.warp; r < kExactRows; r += kWarps) {
      float x = scores_[r * kExactKeys + block_.lane] * a.softmax_scale;
      if (a.soft_cap > 0) x = a.soft_cap * tanh_fast(__fdividef(x, a.soft_cap));
      x *= kLog2E;
      split_kv::RowPlace place;
      bool sees = rows_.find(segment_, first_ + r, place) && first + block_.lane < end_;
      if (sees) {
        const int key = work.exact_key(first + block_.lane);
        sees = key >= a.first_visible(place.position) && key <= place.position &&
               (key < work.sinks || key >= table_.end[first_ + r]);
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
      to[0] = element(p), to[kExactRows * kWeightStride] = element(p - number(to[0]));
      __syncwarp();
      if (block_.lane == 0) {
        const float by = weight_of(before, top);
        // A row of which every key is NaN has a maximum, too, so that its NaN counts.
        maximum(r) = top == -INFINITY && sum != 0 ? 0 : top, total(r) = total(r) * by + sum, factor(r) = by;
      }
    }
  }

  __device__ __forceinline__ void rescale() {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const float by[2] = {factor(8 * j + 2 * block_.t), factor(8 * j + 2 * block_.t + 1)};
#pragma unroll
      for (int i = 0; i < 4; ++i) sums_[4 * j + i] *= by[i % 2];
    }
  }

  // Element 4 j + i of sums_ is row 8 j + 2 t + i % 2 and this channel.
  __device__ __forceinline__ int channel(int i) const { return block_.warp * 16 + block_.g + i / 2 * 8; }

  // Weight 0 times an infinite channel or a NaN is NaN: where there is such a channel, a row adds only the keys that it
  // sees.
  __device__ __forceinline__ void sum_seen() {
#pragma unroll 1
    for (int k = 0; k < kExactKeys; ++k) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint16_t* weight = weights_ + (8 * j + 2 * block_.t + i % 2) * kWeightStride + k;
          const float p = number(weight[0]) + number(weight[kExactRows * kWeightStride]);
          if (p == 0) continue;
          sums_[4 * j + i] = fmaf(p, number(values_[k * kStride + channel(i)]), sums_[4 * j + i]);
        }
      }
    }
  }

  __device__ __forceinline__ void multiply_values() {
    const int lane = block_.lane;
#pragma unroll 1
    for (int s = 0; s < kExactKeys / 16; ++s) {
      const uint4 v = load_transposed(values_ + (s * 16 + lane % 8 + lane / 16 * 8) * kStride + block_.warp * 16 +
                                      lane / 8 % 2 * 8);
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          const uint16_t* weights =
              weights_ + (part * kExactRows + 8 * j + block_.g) * kWeightStride + s * 16 + 2 * block_.t;
          multiply(reinterpret_cast<float (&)[4]>(sums_[4 * j]), v, *reinterpret_cast<const uint32_t*>(weights),
                   *reinterpret_cast<const uint32_t*>(weights + 8));
        }
      }
    }
  }

  // Sums [rows, d], in place of keys and values.
  __device__ __forceinline__ float* sums_of(int row) const { return reinterpret_cast<float*>(keys_) + row * kD; }
  __device__ __forceinline__ void leave() const {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums_of(8 * j + 2 * block_.t + i % 2)[channel(i)] = sums_[4 * j + i];
    }
  }

  // A warp for a row.
  __device__ __forceinline__ void add_to(float* part) const {
    using Lanes = split_kv::RowLanes<kD>;
#pragma unroll 1
    for (int r = block_.warp; r < kExactRows; r += kWarps) {
      if (total(r) == 0) continue;
      float y[Lanes::kPerLane];
#pragma unroll
      for (int i = 0; i < Lanes::kPerLane; ++i) y[i] = sums_of(r)[Lanes::channel(block_.lane, i)];
      Lanes::apply(block_.signs() + kD, block_.lane, y);
      transform<typename Lanes::Rotation>(y, block_.lane);
      float* row = part + (first_ + r) * S::kPart;
      const float top = fmaxf(row[0], maximum(r)), by = weight_of(row[0], top), mine = weight_of(maximum(r), top);
      const float sum = by * row[1] + mine * total(r);
#pragma unroll
      for (int i = 0; i < Lanes::kPerLane; ++i) {
        float& x = row[split_kv::kPartHead + Lanes::channel(block_.lane, i)];
        x = by * x + mine * y[i];
      }
      __syncwarp();
      if (block_.lane == 0) row[0] = top, row[1] = sum;
    }
  }

  __device__ __forceinline__ bool wide() const { return block_.call.dtype == Dtype::kBFloat16; }
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
  __device__ __forceinline__ float& total(int r) const { return state_[kExactRows + r]; }
  __device__ __forceinline__ float& factor(int r) const { return state_[2 * kExactRows + r]; }

  const View block_;
  const Rows rows_;
  const Segment& segment_;
  const RowTable table_;
  int first_, end_;                      // the first of the 32 rows; the end of the block's exact keys
  uint16_t *keys_, *values_, *queries_;  // [32, stride] each
  float* scores_;                        // [32 rows, 32 keys]
  uint16_t* weights_;                    // [2, 32, kWeightStride]: weights, and what rounding has left of them
  float* state_;                         // [3, 32]
  float sums_[4 * kTiles];
};

}  // namespace turboquant::cuda::key_tiles
