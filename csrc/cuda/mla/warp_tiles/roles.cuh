// Latent attention by products of single warps (mma.sync): for devices without products of warpgroups, and for sizes
// that the kernels with those are not compiled for.
//
// A block has 16 rows and takes a tile of the record, 32 keys, at a time. Each warp has 64 channels of everything: it
// loads their codes from memory, a tile ahead, expands them to float16 in shared memory that no other warp reads,
// multiplies them with its channels of the queries, and sums its channels of weighted latents. So warps meet twice in a
// tile: when scores over parts of the channels are there, and when weights are.
//
// Lane (g, t) has of scores rows g and g + 8 by keys 8 j + 2 t and 8 j + 2 t + 1, and of sums the same rows by places
// 2 t and 2 t + 1 of every eight: channels t and t + 4 (attention/row_tiles/expansion.cuh).
#pragma once

#include "cuda/codec/record.cuh"
#include "cuda/common/async_copy.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/mla/warp_tiles/shape.cuh"

namespace turboquant::cuda::mla {

// Scores of rows become weights: a thread has kEach keys of a row, and its share of the row's denominator.
//
// Weights are relative to the largest product of a weight and its key's scale so far, which is 2^kRoom: so products fit
// into float16, and those that are much smaller than the largest are still exact.
template <class S>
class WarpWeights {
  static constexpr int kPerRow = S::kThreads / S::kRows;
  static constexpr float kRoom = 10;

 public:
  static constexpr int kEach = kTileTokens / kPerRow;

  __device__ __forceinline__ WarpWeights(const BlockView& block, const RowTable& rows, int end)
      : block_(block), row_(threadIdx.x / kPerRow), key_(threadIdx.x % kPerRow * kEach), first_(rows.first[row_]),
        end_(min(rows.end[row_], end)), shift_(rows.shift[row_]) {}

  // scales: of the keys of the next tile that is weighed
  __device__ __forceinline__ void load_scales(const uint8_t* scales) {
#pragma unroll
    for (int k = 0; k < kEach; ++k) scale_[k] = reinterpret_cast<const __half*>(scales)[key_ + k];
  }

  // token: the first of the tile
  __device__ __forceinline__ void weigh(int token) {
    const uint8_t* from = block_.shared + S::kScores + row_ * S::kScoreStride + key_ * 4;
    float x[kEach] = {}, scale[kEach], most = -INFINITY;
#pragma unroll
    for (int w = 0; w < S::kWarps; ++w) {
#pragma unroll
      for (int k = 0; k < kEach; k += 2) {
        const float2 part = *reinterpret_cast<const float2*>(from + w * S::kScoreBytes + k * 4);
        x[k] += part.x, x[k + 1] += part.y;
      }
    }
    bool sees[kEach];
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const int at = token + key_ + k;
      sees[k] = at >= first_ && at < end_;
      x[k] *= block_.call.a.softmax_scale * kLog2E, scale[k] = __half2float(scale_[k]);
      most = fmaxf(most, sees[k] ? x[k] + __log2f(fmaxf(scale[k], kLeastScale)) : -INFINITY);
    }
    const float top = fmaxf(top_, max_of_lanes<kPerRow>(most)), factor = top == top_ ? 1 : weight_of(top_, top);
    top_ = top, total_ *= factor;
    __half weight[kEach];
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const float p = sees[k] ? exp2_fast(x[k] - (top - kRoom)) : 0;
      total_ += p;
      weight[k] = __float2half_rn(sees[k] ? p * scale[k] : 0);
    }
    __half2* to = reinterpret_cast<__half2*>(block_.shared + S::kWeights + row_ * S::kWeightStride + key_ * 2);
#pragma unroll
    for (int k = 0; k < kEach; k += 2) to[k / 2] = {weight[k], weight[k + 1]};
    if (key_ == 0) reinterpret_cast<float*>(block_.shared + S::kFactors)[row_] = factor;
  }

  // The head of the row of a partial result [ROWS, kPart].
  __device__ __forceinline__ void leave(float* part) const {
    float total = total_;
#pragma unroll
    for (int bit = 1; bit < kPerRow; bit *= 2) total += __shfl_xor_sync(0xffffffff, total, bit);
    if (key_ != 0) return;
    float* head = part + row_ * S::kPart;
    head[0] = top_ == -INFINITY ? -INFINITY : top_ - kRoom + shift_;
    head[1] = total, head[2] = 0;
  }

 private:
  const BlockView block_;
  const int row_, key_, first_, end_;  // the thread's first key of a tile; the keys that the row sees
  const float shift_;
  float top_ = -INFINITY, total_ = 0;
  __half scale_[kEach];  // of the keys of this tile
};

template <class S>
class WarpRoles {
 public:
  // Products need compute capability 8.0. No call of 256 or 512 channels takes this kernel where there are those of
  // warpgroups.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  static constexpr bool kCompiled = !has_latent_kernel(S::kLatent);
#elif defined(__CUDA_ARCH__)
  static constexpr bool kCompiled = __CUDA_ARCH__ >= 800;
#else
  static constexpr bool kCompiled = false;
#endif
  static constexpr bool kCopiesImage = false;

  explicit __device__ __forceinline__ WarpRoles(const BlockView& block) : block_(block) {}

  // By all threads.
  __device__ __forceinline__ void begin() const {
    const Latents& x = block_.call;
    for (int i = threadIdx.x; i < kLevelCodes; i += S::kThreads) {
      (block_.shared + block_.plan.tables)[i] = table_byte(x.levels, x.record.width(), i);
    }
  }

  // Units [0, units) of a segment, the first of which has `token` as its first. image: of its rows. part: where its
  // results go.
  __device__ __forceinline__ void attend(const Segment& segment, int token, int units, uint8_t* image, float* part) {
    const Attention& a = block_.call.a;
    wait_for_previous_kernel();  // which has prepared the image
    load_queries(image);
    token_ = token;
    end_ = min(a.new_begin(segment.work.length, segment.work.queries), token + units * kUnitTokens);
    table_ = a.block_table + segment.sequence * a.table_stride;
    const int tiles = units * kUnitTiles;
    WarpWeights<S> weights(block_, RowTable(image + block_.plan.query_bytes, S::kRows), end_);
    switch (block_.plan.level_kind) {
      case LevelKind::kThreeBits: attend_as<LevelKind::kThreeBits>(tiles, weights); break;
      case LevelKind::kFourBits: attend_as<LevelKind::kFourBits>(tiles, weights); break;
      case LevelKind::kFiveBits: attend_as<LevelKind::kFiveBits>(tiles, weights); break;
      case LevelKind::kBytes: attend_as<LevelKind::kBytes>(tiles, weights); break;
    }
    weights.leave(part);
    leave_sums<S::kChannels, S::kPart>(sums_, part + block_.g * S::kPart + kPartHead + block_.warp * S::kChannels,
                                       block_.t);
  }

 private:
  static constexpr int kRopeSteps = 4 / S::kRopeWarps;  // of 16 rotary channels, of a warp that has any
  static constexpr int kSteps = S::kChannels / 16, kSums = S::kChannels / 2, kGroups = S::kChannels / 32;

  // What a lane loads ahead: the warp's channels of one key, groups of 32.
  template <LevelKind KIND>
  struct Loaded {
    static constexpr int kWords = KIND == LevelKind::kBytes ? 8 : KIND == LevelKind::kThreeBits ? 3 : 4;
    uint32_t word[kGroups][kWords], fifth[kGroups];
  };

  template <LevelKind KIND>
  __device__ __forceinline__ void attend_as(int tiles, WarpWeights<S>& weights) {
    const LevelPairs<KIND> levels(block_.shared + block_.plan.tables);
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums_[i] = 0;
    next_pages_ = read_pages(0);
    Loaded<KIND> codes;
    const uint8_t* tile = find_tile(0);
    load_codes(tile, codes);
    copy_rest(tile);
#pragma unroll 1
    for (int i = 0; i < tiles; ++i) {
      expand(levels, codes);
      tile = i + 1 < tiles ? find_tile(i + 1) : nullptr;
      load_codes(tile, codes);
      wait_for_copies();
      __syncwarp();
      score();
      weights.load_scales(scales());
      __syncwarp();  // nobody copies the next tile's before others have read these
      copy_rest(tile);
      __syncthreads();  // all scores are there
      weights.weigh(token_ + i * kTileTokens);
      __syncthreads();  // all weights are
      sum();
      __syncwarp();  // nobody expands the next tile before others have read this one
    }
    wait_for_copies();
  }

  // ---- Queries

  // The warp's channels of the queries to shared memory, and 16 rotary ones to registers, if it has any, as a left
  // operand.
  __device__ __forceinline__ void load_queries(const uint8_t* image) {
    const uint4* from = reinterpret_cast<const uint4*>(image + block_.warp * S::kQueryBytes);
    for (int i = block_.lane; i < S::kQueryBytes / 16; i += 32) reinterpret_cast<uint4*>(queries())[i] = from[i];
    __syncwarp();
    has_rope_ = block_.warp < block_.call.record.rope_dim / 16;
    if (has_rope_) {
#pragma unroll
      for (int s = 0; s < kRopeSteps; ++s) {
        const auto word = [&](int row, int byte) {
          return *reinterpret_cast<const uint32_t*>(image + S::kWarps * S::kQueryBytes +
                                                    swizzled(row, rope_step(s) * 32 + block_.t * 4 + byte));
        };
        rope_queries_[s] =
            make_uint4(word(block_.g, 0), word(block_.g + 8, 0), word(block_.g, 16), word(block_.g + 8, 16));
      }
    }
    const RowTable rows(const_cast<uint8_t*>(image) + block_.plan.query_bytes, S::kRows);
#pragma unroll
    for (int i = 0; i < 2; ++i) factor_[i] = rows.scale[block_.g + 8 * i];
  }

  // ---- From memory

  // The pages of 32 tiles, one for each lane; -1: the tile has no tokens. They are read long before their use.
  __device__ __forceinline__ int read_pages(int first) const {
    const int token = token_ + (first + block_.lane) * kTileTokens;
    return token < end_ ? block_.call.page_of(table_, token) : -1;
  }
  // Tile i of the segment, which a warp asks for one after the other; null: there is none, and all of it counts as 0.
  __device__ __forceinline__ const uint8_t* find_tile(int i) {
    if (i % 32 == 0) pages_ = next_pages_, next_pages_ = read_pages(i + 32);
    const int page = __shfl_sync(0xffffffff, pages_, i % 32);
    return block_.call.exists(page) ? block_.call.tile_of(page, token_ + i * kTileTokens) : nullptr;
  }

  // The lane's key of a tile. Codes are read once.
  template <LevelKind KIND>
  __device__ __forceinline__ void load_codes(const uint8_t* tile, Loaded<KIND>& to) const {
    constexpr int kWords = Loaded<KIND>::kWords, kRow = S::kLatent / 32 * kWords * 4;
    to = {};
    if (!tile) return;
    const int token = block_.lane, group = kGroups * block_.warp;
    const uint8_t* row = tile + token * kRow;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      if constexpr (KIND == LevelKind::kThreeBits) {
#pragma unroll
        for (int n = 0; n < kWords; ++n) {
          const int byte = format::swapped_byte(kRow, token, (group + i) * kWords * 4 + 4 * n);
          to.word[i][n] = *reinterpret_cast<const uint32_t*>(row + byte);
        }
      } else {
#pragma unroll
        for (int n = 0; n < kWords; n += 4) {
          const int word =
              format::swapped_word(kRow / format::kLatentWord, token, ((group + i) * kWords + n) / 4);
          const uint4 x = __ldcs(reinterpret_cast<const uint4*>(row) + word);
          to.word[i][n] = x.x, to.word[i][n + 1] = x.y, to.word[i][n + 2] = x.z, to.word[i][n + 3] = x.w;
        }
      }
      if constexpr (KIND == LevelKind::kFiveBits) {
        const uint8_t* plane = tile + block_.plan.planes + token * (S::kLatent / 8);
        to.fifth[i] = reinterpret_cast<const uint32_t*>(plane)[group + i];
      }
    }
  }

  // Starts to copy the scales of a tile and the warp's rotary channels, in the order that products read them in.
  __device__ __forceinline__ void copy_rest(const uint8_t* tile) const {
    const Plan& plan = block_.plan;
    const int lane = block_.lane;
    const uint8_t* anything = block_.call.a.pages;
    if (lane < S::kScaleBytes / 16) {
      copy_or_clear(scales() + lane * 16, tile ? tile + plan.scales + lane * 16 : anything, tile != nullptr);
    }
    if (!has_rope_) return;
    const int bytes = block_.call.record.rope_bytes();
#pragma unroll
    for (int s = 0; s < kRopeSteps; ++s) {
      const bool there = tile && rope_step(s) * 32 < bytes;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int word = format::swapped_word(bytes / format::kLatentWord, lane, 2 * rope_step(s) + h);
        const uint8_t* from = tile + plan.ropes + lane * bytes + word * format::kLatentWord;
        copy_or_clear(ropes(s) + rope_place(lane, h), there ? from : anything, there);
      }
    }
  }
  // 16 rotary channels that the warp has.
  __device__ __forceinline__ int rope_step(int s) const { return block_.warp + s * S::kRopeWarps; }
  // Where eight rotary channels of a key stand: those of eight keys are in different banks.
  static __device__ __forceinline__ int rope_place(int key, int half) { return key * 32 + (half ^ key / 4 % 2) * 16; }

  // ---- In shared memory

  __device__ __forceinline__ uint8_t* queries() const {
    return block_.shared + S::kQueries + block_.warp * S::kQueryBytes;
  }
  __device__ __forceinline__ uint8_t* levels() const {
    return block_.shared + S::kLevels + block_.warp * S::kLevelBytes;
  }
  __device__ __forceinline__ uint8_t* scales() const {
    return block_.shared + S::kScales + block_.warp * S::kScaleBytes;
  }
  __device__ __forceinline__ uint8_t* ropes(int s) const {
    return block_.shared + S::kRopes + rope_step(s) * S::kRopeBytes;
  }

  // Codes become levels, [keys][64 channels].
  template <LevelKind KIND>
  __device__ __forceinline__ void expand(const LevelPairs<KIND>& pairs, const Loaded<KIND>& x) const {
    uint4* to = reinterpret_cast<uint4*>(levels() + block_.lane * S::kLevelStride);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
#pragma unroll
      for (int o = 0; o < 4; ++o) {  // octets
        const auto& w = x.word[i];
        __half2 y[4];
        if constexpr (KIND == LevelKind::kBytes) {
          cuda::row_tiles::expand_bytes(w[2 * o], w[2 * o + 1], y);
        } else if constexpr (KIND == LevelKind::kThreeBits) {
          pairs.expand(o < 3 ? w[o] : fourth_spread_word(w[0], w[1], w[2]), 0, y);
        } else {
          pairs.expand(w[o], x.fifth[i] >> (2 * o), y);
        }
        using cuda::row_tiles::as_word;
        to[4 * i + o] = make_uint4(as_word(y[0]), as_word(y[1]), as_word(y[2]), as_word(y[3]));
      }
    }
  }

  // Scores of all keys and rows over the warp's channels.
  __device__ __forceinline__ void score() const {
    const int lane = block_.lane, g = block_.g, t = block_.t, key = lane % 8 + lane / 16 * 8, half = lane / 8 % 2;
    const uint32_t rows = shared_address(queries()) + swizzled(lane % 16, lane / 16 * 16);
    const uint8_t* keys = levels() + key * S::kLevelStride + half * 16;
    float x[4][4] = {};  // of eights of keys
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const uint4 row = load_matrices(rows ^ (s * 32));
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        const uint4 b = load_tiles(keys + j * 8 * S::kLevelStride + s * 32);
        mma_halves(x[j], row, b.x, b.y);
        mma_halves(x[j + 1], row, b.z, b.w);
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 scale = __half22float2(reinterpret_cast<const __half2*>(scales())[4 * j + t]);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[j][i] *= factor_[i / 2] * (i % 2 ? scale.y : scale.x);
    }
    if (has_rope_) {
#pragma unroll
      for (int s = 0; s < kRopeSteps; ++s) {
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
          const uint4 b = load_tiles(ropes(s) + rope_place(8 * j + key, half));
          if (block_.call.rope_dtype == Dtype::kBFloat16) {
            mma_floats<__nv_bfloat16>(x[j], rope_queries_[s], b.x, b.y);
            mma_floats<__nv_bfloat16>(x[j + 1], rope_queries_[s], b.z, b.w);
          } else {
            mma_floats<__half>(x[j], rope_queries_[s], b.x, b.y);
            mma_floats<__half>(x[j + 1], rope_queries_[s], b.z, b.w);
          }
        }
      }
    }
    uint8_t* to = block_.shared + S::kScores + block_.warp * S::kScoreBytes + g * S::kScoreStride + t * 8;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        *reinterpret_cast<float2*>(to + 8 * i * S::kScoreStride + j * 32) = {x[j][2 * i], x[j][2 * i + 1]};
      }
    }
  }

  // Weighted latents of a tile, the warp's channels.
  __device__ __forceinline__ void sum() {
    const int lane = block_.lane, half = lane / 8 % 2 * 8 + lane % 8;
    const float* factors = reinterpret_cast<const float*>(block_.shared + S::kFactors);
    const float by[2] = {factors[block_.g], factors[block_.g + 8]};
    if (__any_sync(0xffffffff, by[0] != 1 || by[1] != 1)) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums_[i] *= by[i / 2 % 2];
    }
    const uint8_t* weights = block_.shared + S::kWeights + half * S::kWeightStride + lane / 16 * 16;
    const uint8_t* keys = levels() + half * S::kLevelStride + lane / 16 * 16;
#pragma unroll
    for (int k = 0; k < 2; ++k) {  // 16 keys
      const uint4 weight = load_tiles(weights + k * 32);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const uint4 b = load_transposed(keys + k * 16 * S::kLevelStride + s * 32);
        mma_halves(sums_ + 8 * s, weight, b.x, b.y);
        mma_halves(sums_ + 8 * s + 4, weight, b.z, b.w);
      }
    }
  }

  const BlockView block_;

  // Of the segment: its first token here, the end of its codes here, its row of the block table, pages of tiles.
  int token_, end_;
  const int32_t* table_;
  int pages_, next_pages_;

  bool has_rope_;
  uint4 rope_queries_[kRopeSteps]{};
  float factor_[2];    // of a sum of products with codes and the key's scale, of rows g and g + 8
  float sums_[kSums];  // element 4 j + 2 i + h: row g + 8 i, place 2 t + h of octet j
};

}  // namespace turboquant::cuda::mla
