// Latent attention by products of single warps (mma.sync): for devices without products of warpgroups, for sizes that
// the kernels with those are not compiled for, and for few rows over tables of levels, which would leave most of a
// product of 64 rows unused.
//
// A block has 16 rows and takes a tile of the record, 32 keys, at a time. Each warp has 64 or 128 channels of
// everything. It loads the codes of its channels from memory, a tile ahead, and expands them to levels in float16. From
// registers it multiplies the levels with its channels of the queries; it keeps a copy in shared memory and multiplies
// that with the weights. So warps meet twice in a tile: when scores over parts of the channels are there, and when
// weights are.
//
// Lane (g, t) has two rows, g and g + 8. Of scores it has those of keys 8 j + 2 t and 8 j + 2 t + 1, and of sums places
// 2 t and 2 t + 1 of every eight, which are channels t and t + 4 (attention/row_tiles/expansion.cuh).
#pragma once

#include "cuda/codec/record.cuh"
#include "cuda/common/async_copy.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/mla/warp_tiles/shape.cuh"

namespace turboquant::cuda::mla {

// Scores of rows become weights: a thread has kEach keys of a row, and its share of the row's denominator.
//
// Weights are relative to the largest product of a weight and its key's scale so far. That one becomes kRoom, so that
// products fit into float16, and keep 11 bits down to 2^-24 of it.
template <class S>
class WarpWeights {
  static constexpr int kPerRow = S::kThreads / S::kRows;

 public:
  static constexpr int kEach = kTileTokens / kPerRow;
  static constexpr float kRoom = 1024;  // what sums are too large by

  __device__ __forceinline__ WarpWeights(const BlockView& block, const RowTable& rows)
      : block_(block), row_(threadIdx.x / kPerRow), key_(threadIdx.x % kPerRow * kEach), first_(rows.first[row_]),
        end_(rows.end[row_]) {}

  // scales: of the keys of the next tile that is weighed
  __device__ __forceinline__ void load_scales(const uint8_t* scales) {
#pragma unroll
    for (int k = 0; k < kEach; ++k) scale_[k] = reinterpret_cast<const __half*>(scales)[key_ + k];
  }

  // token: the first of the tile
  __device__ __forceinline__ void weigh(int token) {
    const uint8_t* from = block_.shared + S::kScores + row_ * S::kScoreStride + key_ * 4;
    float x[kEach] = {}, scale[kEach], most = -INFINITY;
    float2 part[S::kWarps][kEach / 2];  // all loads are on their way before one is waited for
#pragma unroll
    for (int w = 0; w < S::kWarps; ++w) {
#pragma unroll
      for (int k = 0; k < kEach / 2; ++k) {
        part[w][k] = load_pair(shared_address(from) + w * S::kScoreBytes + k * 8);
      }
    }
#pragma unroll
    for (int w = 0; w < S::kWarps; ++w) {
#pragma unroll
      for (int k = 0; k < kEach / 2; ++k) x[2 * k] += part[w][k].x, x[2 * k + 1] += part[w][k].y;
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
    const float reference = top == -INFINITY ? 0 : top;  // all scores so far may be -inf
    __half weight[kEach];
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const float p = sees[k] ? exp2_fast(x[k] - reference) : 0;
      total_ += p;
      weight[k] = __float2half_rn(sees[k] ? p * (scale[k] * kRoom) : 0);
    }
    __half2* to = reinterpret_cast<__half2*>(block_.shared + S::kWeights + row_ * S::kWeightStride + key_ * 2);
#pragma unroll
    for (int k = 0; k < kEach; k += 2) to[k / 2] = {weight[k], weight[k + 1]};
    if (key_ == 0) reinterpret_cast<float*>(block_.shared + S::kFactors)[row_] = factor;
  }

  // The head of the row of a partial result [ROWS, kPart].
  __device__ __forceinline__ void leave(const RowTable& rows, float* part) const {
    float total = total_;
#pragma unroll
    for (int bit = 1; bit < kPerRow; bit *= 2) total += __shfl_xor_sync(0xffffffff, total, bit);
    if (key_ != 0) return;
    float* head = part + row_ * S::kPart;
    head[0] = top_ == -INFINITY ? -INFINITY : top_ + rows.shift[row_];
    head[1] = total, head[2] = 0;
  }

 private:
  static __device__ __forceinline__ float2 load_pair(uint32_t from) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from) : "memory");
    return x;
  }

  const BlockView block_;
  const int row_, key_, first_, end_;  // the thread's first key of a tile; the keys that the row sees
  float top_ = -INFINITY, total_ = 0;
  __half scale_[kEach];  // of the keys of this tile
};

template <class S>
class WarpRoles {
 public:
#if defined(__CUDA_ARCH__)
  static constexpr bool kCompiled = __CUDA_ARCH__ >= 800;  // which its products need
#else
  static constexpr bool kCompiled = false;
#endif
  static constexpr bool kCopiesImage = false, kJoinsApart = false;

  explicit __device__ __forceinline__ WarpRoles(const BlockView& block) : block_(block) {}

  // By all threads.
  __device__ __forceinline__ void begin() const {
    const Latents& x = block_.call;
    for (int i = threadIdx.x; i < kLevelCodes; i += S::kThreads) {
      (block_.shared + block_.plan.tables)[i] = level_table_byte(x.levels, x.record.width(), i);
    }
  }

  // Units [0, units) of a segment, the first of which has `token` as its first. image: of its rows. part: where its
  // results go.
  __device__ __forceinline__ void attend(const Segment& segment, int token, int units, uint8_t* image, float* part) {
    const Attention& a = block_.call.a;
    wait_for_previous_kernel();  // which has prepared the image
    const RowTable rows(image + block_.plan.query_bytes, S::kRows);
    load_queries(image, rows);
    token_ = token;
    tiles_ = units * kUnitTiles;
    end_ = a.new_begin(segment.work.length, segment.work.queries);
    table_ = a.block_table + segment.sequence * a.table_stride;
    WarpWeights<S> weights(block_, rows);
    switch (block_.plan.level_kind) {
      case LevelKind::kThreeBits: attend_as<LevelKind::kThreeBits>(weights); break;
      case LevelKind::kFourBits: attend_as<LevelKind::kFourBits>(weights); break;
      case LevelKind::kFiveBits: attend_as<LevelKind::kFiveBits>(weights); break;
      case LevelKind::kUniformFour: attend_as<LevelKind::kUniformFour>(weights); break;
      case LevelKind::kUniformFive: attend_as<LevelKind::kUniformFive>(weights); break;
      case LevelKind::kBytes: attend_as<LevelKind::kBytes>(weights); break;
    }
    weights.leave(rows, part);
    leave_sums<S::kChannels, S::kPart>(sums_, part + block_.g * S::kPart + kPartHead + block_.warp * S::kChannels,
                                       block_.t,
                                       level_step(block_.plan.level_kind) * format::kLevelUnit / WarpWeights<S>::kRoom);
  }

 private:
  static constexpr int kRopeSteps = S::kRopeSixteens / S::kRopeWarps;  // of 16 raw channels, of a warp that has any
  static constexpr int kSteps = S::kChannels / 16, kSums = S::kChannels / 2, kPanels = S::kChannels / 64;

  // What a lane loads ahead, of keys g, g + 8, g + 16 and g + 24: of each panel of 64 channels those from 16 t to
  // 16 t + 15.
  template <LevelKind KIND>
  struct Loaded {
    static constexpr int kGroupBytes = KIND == LevelKind::kBytes ? 32 : KIND == LevelKind::kThreeBits ? 12 : 16;
    static constexpr int kWords = KIND == LevelKind::kBytes ? 4 : KIND == LevelKind::kThreeBits ? 3 : 2;
    uint32_t word[kPanels][4][kWords], fifth[kPanels][4];
  };

  template <LevelKind KIND>
  __device__ __forceinline__ void attend_as(WarpWeights<S>& weights) {
    const LevelPairs<KIND> levels(block_.shared + block_.plan.tables);
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums_[i] = 0;
    next_pages_ = read_pages(0);
    Loaded<KIND> codes;
    load_tile(0, codes);
#pragma unroll 1
    for (int i = 0; i < tiles_; ++i) {
      float x[4][4];
      multiply(levels, codes, x);
      load_tile(i + 1, codes);
      wait_for_committed_copies<1>();  // this tile's
      __syncwarp();
      leave_scores(x, i % 2);
      weights.load_scales(scales(i % 2));
      __syncthreads();  // all scores are there
      weights.weigh(token_ + i * kTileTokens);
      __syncthreads();  // all weights are
      sum();
      __syncwarp();  // nobody expands the next tile before others have read this one
    }
    wait_for_copies();
  }

  // ---- Queries

  // The warp's channels of the queries, and up to 32 raw ones, as left operands, and the factors of scores.
  __device__ __forceinline__ void load_queries(const uint8_t* image, const RowTable& rows) {
    // Word `word` of a row of 64 channels: two channels that are neighbours in the image.
    const auto word = [&](int of_panel, int row, int i) {
      return *reinterpret_cast<const uint32_t*>(image + of_panel * (S::kRows * kSwizzleRow) + swizzled(row, i * 4));
    };
    const auto operand = [&](int of_panel, int first, int second) {
      return make_uint4(word(of_panel, block_.g, first), word(of_panel, block_.g + 8, first),
                        word(of_panel, block_.g, second), word(of_panel, block_.g + 8, second));
    };
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int first = 8 * block_.t + s % 4 * 2;
      queries_[s] = operand(panel(s / 4), first, first + 1);
    }
    has_rope_ = block_.warp < block_.call.record.rope_dim / 16;
    if (has_rope_) {
#pragma unroll
      for (int s = 0; s < kRopeSteps; ++s) {
        rope_queries_[s] = operand(S::kLatent / 64, 8 * rope_step(s) + block_.t, 8 * rope_step(s) + 4 + block_.t);
        const int bytes = block_.call.record.rope_bytes(), key = block_.lane / 2;
        const int word = format::swapped_word(bytes / format::kLatentWord, key, 2 * rope_step(s) + block_.lane % 2);
        rope_from_[s] = key * bytes + word * format::kLatentWord;
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) factor_[i] = rows.scale[block_.g + 8 * i] * level_step(block_.plan.level_kind);
  }

  // The panel of 64 channels of the latent that is the warp's p-th.
  __device__ __forceinline__ int panel(int p) const { return block_.warp * kPanels + p; }

  // ---- From memory

  // The pages of 32 tiles, one for each lane; -1: the tile has no tokens. They are read long before their use.
  __device__ __forceinline__ int read_pages(int first) const {
    const int tile = first + block_.lane, token = token_ + tile * kTileTokens;
    return tile < tiles_ && token < end_ ? block_.call.page_of(table_, token) : -1;
  }
  // Starts to load tile i of the segment, one after the other. Where there is none, all of it is 0.
  template <LevelKind KIND>
  __device__ __forceinline__ void load_tile(int i, Loaded<KIND>& codes) {
    if (i % 32 == 0) pages_ = next_pages_, next_pages_ = read_pages(i + 32);
    const int page = __shfl_sync(0xffffffff, pages_, i % 32);
    const Latents& x = block_.call;
    const unsigned in_page = (token_ / kTileTokens + i) & (x.record.page_size / kTileTokens - 1);
    const uint8_t* tile =
        x.exists(page) ? x.a.pages + int64_t{page} * x.a.page_stride + in_page * block_.plan.tile_bytes : nullptr;
    load_codes(tile, codes);
    copy_rest(tile, i % 2);
    commit_copies();
  }

  // Codes of a tile, which a block reads once.
  template <LevelKind KIND>
  __device__ __forceinline__ void load_codes(const uint8_t* tile, Loaded<KIND>& to) const {
    constexpr int kRow = Loaded<KIND>::kGroupBytes * (S::kLatent / 32);
    to = {};
    if (!tile) return;
    const int g = block_.g, odd = block_.t % 2;
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
      const int group = 2 * panel(p) + block_.t / 2;  // of 32 channels
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint8_t* row = tile + (g + 8 * j) * kRow;
        const auto place = [&](int byte) { return format::swapped_byte(kRow, g + 8 * j, byte); };
        auto& w = to.word[p][j];
        if constexpr (KIND == LevelKind::kThreeBits) {  // all of the group: its spare bits are the fourth octet
#pragma unroll
          for (int n = 0; n < 3; ++n) w[n] = *reinterpret_cast<const uint32_t*>(row + place(group * 12 + 4 * n));
        } else if constexpr (KIND == LevelKind::kBytes) {
          const uint4 x = __ldcs(reinterpret_cast<const uint4*>(row + place(group * 32 + odd * 16)));
          w[0] = x.x, w[1] = x.y, w[2] = x.z, w[3] = x.w;
        } else {
          const uint2 x = __ldcs(reinterpret_cast<const uint2*>(row + place(group * 16 + odd * 8)));
          w[0] = x.x, w[1] = x.y;
        }
        if constexpr (has_plane(KIND)) {
          const uint8_t* plane = tile + block_.plan.planes + (g + 8 * j) * (S::kLatent / 8);
          to.fifth[p][j] = reinterpret_cast<const uint32_t*>(plane)[group];
        }
      }
    }
  }

  // Starts to copy the scales of a tile and the warp's raw channels, in the order that products read them in.
  __device__ __forceinline__ void copy_rest(const uint8_t* tile, int buffer) const {
    const Plan& plan = block_.plan;
    const int lane = block_.lane;
    const void* anything = block_.call.a.q;  // an address that exists
    if (lane < S::kScaleBytes / 16) {
      const uint8_t* from = tile + plan.scales + lane * 16;
      copy_or_clear(scales(buffer) + lane * 16, tile ? from : anything, tile != nullptr);
    }
    if (!has_rope_) return;
    const int bytes = block_.call.record.rope_bytes();
#pragma unroll
    for (int s = 0; s < kRopeSteps; ++s) {
      const uint8_t* from = tile && rope_step(s) * 32 < bytes ? tile + plan.ropes + rope_from_[s] : nullptr;
      uint8_t* to = ropes(s, buffer) + rope_place(lane / 2, lane % 2);
      copy_or_clear(to, from ? from : anything, from != nullptr);
      copy_or_clear(to + rope_place(16, 0), from ? from + 16 * bytes : anything, from != nullptr);  // the same order
    }
  }
  // 16 raw channels that the warp has.
  __device__ __forceinline__ int rope_step(int s) const { return block_.warp + s * S::kRopeWarps; }
  // Where eight raw channels of a key stand: those of eight keys are in different banks.
  static __device__ __forceinline__ int rope_place(int key, int half) { return key * 32 + (half ^ key / 4 % 2) * 16; }

  // ---- In shared memory

  __device__ __forceinline__ uint8_t* levels() const {
    return block_.shared + S::kLevels + block_.warp * S::kLevelBytes;
  }
  __device__ __forceinline__ uint8_t* scales(int buffer) const {
    return block_.shared + S::kScales + (buffer * S::kWarps + block_.warp) * S::kScaleBytes;
  }
  __device__ __forceinline__ uint8_t* ropes(int s, int buffer) const {
    return block_.shared + S::kRopes + (buffer * S::kRopeSixteens + rope_step(s)) * S::kRopeBytes;
  }

  // The levels, divided by level_step, of 16 channels of a key: pairs i and i + 4 of two octets.
  template <LevelKind KIND>
  __device__ __forceinline__ void expand(const LevelPairs<KIND>& pairs, const uint32_t (&w)[Loaded<KIND>::kWords],
                                         uint32_t fifth, __half2 (&y)[2][4]) const {
    const bool odd = block_.t % 2;
    if constexpr (KIND == LevelKind::kBytes) {
      cuda::row_tiles::expand_bytes(w[0], w[1], y[0]);
      cuda::row_tiles::expand_bytes(w[2], w[3], y[1]);
    } else if constexpr (KIND == LevelKind::kThreeBits) {
      pairs.expand(odd ? w[2] : w[0], 0, y[0]);
      pairs.expand(odd ? fourth_spread_word(w[0], w[1], w[2]) : w[1], 0, y[1]);
    } else {
      fifth >>= odd * 4;
      pairs.expand(w[0], fifth, y[0]);
      pairs.expand(w[1], fifth >> 2, y[1]);
    }
  }

  // Codes become levels, in registers for scores and in shared memory, [keys][channels], for sums. Products of all
  // keys and rows over the warp's channels.
  template <LevelKind KIND>
  __device__ __forceinline__ void multiply(const LevelPairs<KIND>& pairs, const Loaded<KIND>& codes,
                                           float (&x)[4][4]) const {
    using cuda::row_tiles::as_word;
    uint8_t* to = levels() + block_.g * S::kLevelStride + block_.t * 32;
#pragma unroll
    for (int j = 0; j < 4; ++j) {  // eights of keys
#pragma unroll
      for (int i = 0; i < 4; ++i) x[j][i] = 0;
    }
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        __half2 y[2][4];
        expand(pairs, codes.word[p][j], codes.fifth[p][j], y);
#pragma unroll
        for (int o = 0; o < 2; ++o) {
          *reinterpret_cast<uint4*>(to + 8 * j * S::kLevelStride + p * 128 + o * 16) =
              make_uint4(as_word(y[o][0]), as_word(y[o][1]), as_word(y[o][2]), as_word(y[o][3]));
        }
#pragma unroll
        for (int s = 0; s < 4; ++s) {
          const __half2* z = y[s / 2] + s % 2 * 2;
          mma_halves(x[j], queries_[4 * p + s], as_word(z[0]), as_word(z[1]));
        }
      }
    }
  }

  // Products of levels become scores, with those of raw channels, for all warps to see.
  __device__ __forceinline__ void leave_scores(float (&x)[4][4], int buffer) const {
    const int lane = block_.lane, g = block_.g, t = block_.t, key = lane % 8 + lane / 16 * 8, half = lane / 8 % 2;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 scale = __half22float2(reinterpret_cast<const __half2*>(scales(buffer))[4 * j + t]);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[j][i] *= factor_[i / 2] * (i % 2 ? scale.y : scale.x);
    }
    if (has_rope_) {
#pragma unroll
      for (int s = 0; s < kRopeSteps; ++s) {
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
          const uint4 b = load_tiles(ropes(s, buffer) + rope_place(8 * j + key, half));
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

  // Of the segment: its first token and its tiles here, the end of its codes, its row of the block table, and pages of
  // tiles.
  int token_, tiles_, end_;
  const int32_t* table_;
  int pages_, next_pages_;

  bool has_rope_;
  uint4 queries_[kSteps], rope_queries_[kRopeSteps]{};
  int rope_from_[kRopeSteps];  // where the lane's raw channels of its first key are in a tile
  float factor_[2];            // of a sum of products with codes and the key's scale, of rows g and g + 8
  float sums_[kSums];          // element 4 j + 2 i + h: row g + 8 i, place 2 t + h of octet j
};

}  // namespace turboquant::cuda::mla
