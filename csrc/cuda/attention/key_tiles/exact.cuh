// Attention to a segment's exact keys, those of the tail and the call's own: after its codes, by all warps of the
// blocks that have such units. Its sums are rotated row by row, as values were, and added to the partial result of the
// codes. Weights are sums of two elements of the tensors' type, so that they keep 16 bits.
//
// Most of its time passes while warps wait: for keys, for exchanges between lanes, and at barriers. So all exact keys
// that a segment usually has are attended to at once, and a warp has four rows or twelve keys under way at a time.
#pragma once

#include "cuda/attention/exact_keys.cuh"
#include "cuda/attention/key_tiles/shape.cuh"
#include "cuda/attention/softmax_math.cuh"

namespace turboquant::cuda::key_tiles {

constexpr int kExactKeys = 96;  // at a time: a window of 64 tokens, sinks and drafts
// Rows at a time, of a block of so many: a power of two, which the warps divide among them.
__host__ __device__ constexpr int exact_rows(int rows) { return rows <= 16 ? 16 : 32; }

// Elements from one key, value or query to the next: eight neighbours' words for one ldmatrix are in different banks.
__host__ __device__ constexpr int exact_stride(int channels) { return channels + 8; }
// From one row's scores or weights to the next one's, so that eight words of four rows are in different banks, and four
// words of eight rows of weights.
constexpr int kScoreStride = kExactKeys + 8, kWeightStride = kExactKeys + 8;

// Bytes of shared memory that it needs.
constexpr int exact_bytes(int d, int rows) {
  return (2 * kExactKeys + exact_rows(rows)) * exact_stride(d) * 2 + exact_rows(rows) * (kScoreStride + 6) * 4;
}

template <class S>
class ExactKeys {
  static constexpr int kExactRows = exact_rows(S::kRows);
  static constexpr int kD = S::kDim, kTiles = kExactRows / 8, kStride = exact_stride(kD);
  static constexpr int kRowsOfWarp = kExactRows / kWarps, kKeysOfWarp = kExactKeys / kWarps;
  static constexpr int kLanesOfRow = 32 / kRowsOfWarp;
  using Rows = split_kv::QueryRows<S::kDim, S::kRows>;
  static_assert(S::kRows <= kExactRows && kD <= 16 * kWarps);  // each warp sums 16 channels, if there are so many
  static_assert(kD <= 8 * 16 && kKeysOfWarp <= 16 && kRowsOfWarp % 2 == 0);  // half a warp copies a vector
  // Weights take the place of keys, sums that of keys and values.
  static_assert(2 * kExactRows * kWeightStride <= kExactKeys * kStride &&
                kExactRows * kD * 2 <= 2 * kExactKeys * kStride);

 public:
  __device__ __forceinline__ ExactKeys(const View& block, const Rows& rows, const Segment& segment)
      : block_(block), rows_(rows), segment_(segment) {
    keys_ = reinterpret_cast<uint16_t*>(block.shared + block.own.exact);
    values_ = keys_ + kExactKeys * kStride;
    queries_ = values_ + kExactKeys * kStride;
    scores_ = reinterpret_cast<float*>(queries_ + kExactRows * kStride);
    state_ = scores_ + kExactRows * kScoreStride;
  }

  // Adds exact keys [begin, end) of the segment to `part`, [ROWS, kPart].
  __device__ __forceinline__ void attend(int begin, int end, float* part) {
    prepare();
#pragma unroll 1
    for (int key = begin; key < end; key += kExactKeys) {
      first_ = key, count_ = min(end - key, kExactKeys), blocks_ = (count_ + 15) / 16;
      copy_keys();
      attend_to_copied(*this);  // queries have been copied, too
    }
    leave();
    __syncthreads();
    add_to(part);
    __syncthreads();
  }

 private:
  friend void attend_to_copied<ExactKeys>(ExactKeys&);

  __device__ __forceinline__ ExactElements elements() const { return {block_.call.dtype}; }

  // A warp has rows and keys i, i + 8, i + 16 and so on. Its lane k finds the k-th of them, and half a warp copies it.
  __device__ __forceinline__ int of_warp(int k) const { return block_.warp + k * kWarps; }
  __device__ __forceinline__ int lane_of_half() const { return block_.lane % 16; }

  // Starts to copy a vector, by half a warp; null: zeros.
  __device__ __forceinline__ void copy(uint16_t* to, const uint16_t* from) const {
    const int at = 8 * lane_of_half();
    if (at >= kD) return;
    copy_or_clear(to + at, from ? from + at : block_.call.q, from != nullptr);
  }

  __device__ __forceinline__ void prepare() {
    const Attention& a = block_.call;
    const int row = of_warp(block_.lane % kRowsOfWarp);
    const uint16_t* query = nullptr;
    int first_seen = 0, last_seen = -1, coded_end = 0;
    split_kv::RowPlace place;
    if (row < S::kRows && rows_.find(segment_, row, place)) {
      query = static_cast<const uint16_t*>(a.q) + place.token * a.q_token_stride + place.head * a.q_head_stride;
      const SequenceWork& work = segment_.work;
      first_seen = a.first_visible(place.position), last_seen = place.position;
      coded_end = a.recent(work.tail, place.position, a.new_begin(work.length, work.queries));
    }
    if (block_.lane < kRowsOfWarp) {
      maximum(row) = -INFINITY, total(row) = 0;
      first_of(row) = first_seen, last_of(row) = last_seen, end_of(row) = coded_end;
    }
#pragma unroll
    for (int k = 0; k < kRowsOfWarp; k += 2) {
      const int mine = k + block_.lane / 16;
      copy(queries_ + of_warp(mine) * kStride, told(query, mine));
    }
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) sums_[i] = 0;
  }

  // The first half of a warp copies keys, the other one their values.
  __device__ __forceinline__ void copy_keys() const {
    const Attention& a = block_.call;
    const SequenceWork& work = segment_.work;
    const bool is_value = block_.lane >= 16;
    const int i = of_warp(lane_of_half());
    const uint16_t* from = nullptr;
    if (i < count_) {
      const int position = work.exact_key(first_ + i), new_begin = a.new_begin(work.length, work.queries);
      if (position >= new_begin) {
        const int64_t token = work.first_query + position - new_begin;
        from = static_cast<const uint16_t*>(a.new_row(token, segment_.head, is_value));
      } else {
        const int rows = a.sink_tokens + a.ring, row = format::tail_row(position, a.sink_tokens, a.ring);
        from = static_cast<const uint16_t*>(a.tail) + (is_value ? kD : 0) +
               format::tail_offset<int64_t>(work.tail.slot, a.tail_stride, segment_.head, row, rows, int64_t{kD}, 0);
      }
    }
    uint16_t* to = is_value ? values_ : keys_;
#pragma unroll 2
    for (int k = 0; k < 2 * blocks_; ++k) copy(to + of_warp(k) * kStride, told(from, block_.lane / 16 * 16 + k));
  }
  // Whether a channel of the values that the lane has copied is infinite or NaN.
  __device__ __forceinline__ bool spoiled_values() const {
    if (block_.lane < 16 || 8 * lane_of_half() >= kD) return false;
    const uint32_t exponent = elements().exponent();
    bool spoiled = false;
#pragma unroll 2
    for (int k = 0; k < 2 * blocks_; ++k) {
      const uint16_t* copied = values_ + of_warp(k) * kStride + 8 * lane_of_half();
      look_for_spoiled(*reinterpret_cast<const uint4*>(copied), exponent, spoiled);
    }
    return spoiled;
  }

  // scores_[row][key]: a warp has eight rows and every kEvery-th block of 16 keys.
  __device__ __forceinline__ void multiply_keys() const {
    constexpr int kEvery = kWarps / kTiles, kBlocks = (kExactKeys / 16 + kEvery - 1) / kEvery;
    const int lane = block_.lane, tile = block_.warp % kTiles, block = block_.warp / kTiles;
    const uint16_t* keys = keys_ + (block * 16 + lane % 16) * kStride + lane / 16 * 8;
    const uint16_t* queries = queries_ + (tile * 8 + lane % 8) * kStride + lane / 8 * 8;
    float d[kBlocks][4] = {};
#pragma unroll 1
    for (int s = 0; s < kD / 16; s += 2) {
      const uint4 q = load_tiles(queries + s * 16);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        if (block + b * kEvery >= blocks_) continue;
        const uint16_t* at = keys + b * kEvery * 16 * kStride + s * 16;
        elements().multiply(d[b], load_tiles(at), q.x, q.y);
        elements().multiply(d[b], load_tiles(at + 16), q.z, q.w);
      }
    }
    float* to = scores_ + (tile * 8 + 2 * block_.t) * kScoreStride + block * 16 + block_.g;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b, to += kEvery * 16) {
      if (block + b * kEvery >= kExactKeys / 16) break;
      to[0] = d[b][0], to[kScoreStride] = d[b][1];
      to[8] = d[b][2], to[kScoreStride + 8] = d[b][3];
    }
  }

  // The upper or the lower parts of a row's weights, in place of keys.
  __device__ __forceinline__ uint16_t* weights_of(int row, int part) const {
    return keys_ + (part * kExactRows + row) * kWeightStride;
  }

  // Eight lanes for a row, each of which has every eighth key.
  __device__ __forceinline__ void weigh() const {
    const Attention& a = block_.call;
    const SequenceWork& work = segment_.work;
    const int row = block_.warp * kRowsOfWarp + block_.lane / kLanesOfRow, keys = 16 * blocks_;
    const int first_seen = first_of(row), last_seen = last_of(row), coded_end = end_of(row);
    float* scores = scores_ + row * kScoreStride;
    float top = -INFINITY;
#pragma unroll 2
    for (int i = block_.lane % kLanesOfRow; i < keys; i += kLanesOfRow) {
      const int key = work.exact_key(first_ + i);
      const bool sees = i < count_ && key >= first_seen && key <= last_seen && (key < work.sinks || key >= coded_end);
      float x = scores[i] * a.softmax_scale;
      if (a.soft_cap > 0) x = a.soft_cap * tanh_fast(__fdividef(x, a.soft_cap));
      x = sees ? x * kLog2E : -INFINITY;
      scores[i] = x, top = fmaxf(top, x);
    }
    const float before = maximum(row);
    top = fmaxf(top, before);
#pragma unroll
    for (int bit = 1; bit < kLanesOfRow; bit *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, bit));
    const float base = top == -INFINITY ? 0 : top;
    float sum = 0;
#pragma unroll 2
    for (int i = block_.lane % kLanesOfRow; i < keys; i += kLanesOfRow) {
      const float p = exp2_fast(scores[i] - base);
      const uint16_t upper = elements().element(p);
      sum += p, weights_of(row, 0)[i] = upper, weights_of(row, 1)[i] = elements().element(p - elements().number(upper));
    }
#pragma unroll
    for (int bit = 1; bit < kLanesOfRow; bit *= 2) sum += __shfl_xor_sync(0xffffffff, sum, bit);
    if (block_.lane % kLanesOfRow == 0) {
      const float by = weight_of(before, top);
      // A row of which every key is NaN has a maximum, too, so that its NaN counts.
      maximum(row) = top == -INFINITY && sum != 0 ? 0 : top, total(row) = total(row) * by + sum, factor(row) = by;
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

  __device__ __forceinline__ bool has_channels() const { return 16 * block_.warp < kD; }

  // Each row adds only the keys that it sees.
  __device__ __forceinline__ void sum_seen() {
    if (!has_channels()) return;
#pragma unroll 1
    for (int k = 0; k < count_; ++k) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = 8 * j + 2 * block_.t + i % 2;
          const float p = elements().number(weights_of(row, 0)[k]) + elements().number(weights_of(row, 1)[k]);
          if (p == 0) continue;
          sums_[4 * j + i] = fmaf(p, elements().number(values_[k * kStride + channel(i)]), sums_[4 * j + i]);
        }
      }
    }
  }

  __device__ __forceinline__ void multiply_values() {
    if (!has_channels()) return;
    const int lane = block_.lane;
#pragma unroll 1
    for (int s = 0; s < blocks_; ++s) {
      const uint4 v = load_transposed(values_ + (s * 16 + lane % 8 + lane / 16 * 8) * kStride + block_.warp * 16 +
                                      lane / 8 % 2 * 8);
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          const uint16_t* weights = weights_of(8 * j + block_.g, part) + s * 16 + 2 * block_.t;
          elements().multiply(reinterpret_cast<float (&)[4]>(sums_[4 * j]), v,
                              *reinterpret_cast<const uint32_t*>(weights),
                              *reinterpret_cast<const uint32_t*>(weights + 8));
        }
      }
    }
  }

  // Sums [rows, d], in place of keys and values.
  __device__ __forceinline__ float* sums_of(int row) const { return reinterpret_cast<float*>(keys_) + row * kD; }
  __device__ __forceinline__ void leave() const {
    if (!has_channels()) return;
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
      float* row = part + r * S::kPart;
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

  __device__ __forceinline__ float& maximum(int r) const { return state_[r]; }
  __device__ __forceinline__ float& total(int r) const { return state_[kExactRows + r]; }
  __device__ __forceinline__ float& factor(int r) const { return state_[2 * kExactRows + r]; }
  // The first and the last key that a row may see.
  __device__ __forceinline__ int& first_of(int r) const { return reinterpret_cast<int*>(state_)[3 * kExactRows + r]; }
  __device__ __forceinline__ int& last_of(int r) const { return reinterpret_cast<int*>(state_)[4 * kExactRows + r]; }
  // The end of the keys that it sees from codes, but for sinks.
  __device__ __forceinline__ int& end_of(int r) const { return reinterpret_cast<int*>(state_)[5 * kExactRows + r]; }

  const View block_;
  const Rows rows_;
  const Segment& segment_;
  int first_, count_, blocks_;  // the keys that are attended to, and their blocks of 16
  uint16_t *keys_, *values_;    // [kExactKeys, kStride] each
  uint16_t* queries_;           // [kExactRows, kStride]
  float* scores_;               // [kExactRows, kScoreStride]
  float* state_;                // [6, kExactRows]
  float sums_[4 * kTiles];
};

}  // namespace turboquant::cuda::key_tiles
