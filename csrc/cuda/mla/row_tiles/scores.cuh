// The warpgroup that computes scores of 48 keys for 64 rows, and weights from them.
//
// Warp w has rows 16 w to 16 w + 15. Lane (g, t) has of every eight keys keys 2 t and 2 t + 1 of rows g and g + 8:
// element 4 j + 2 i + h of an array is key 8 j + 2 t + h of row g + 8 i. So a row is four lanes' and no other warp's,
// and what the lane holds of a tile's weights is what a lane of the same number holds of the left operand of the
// products that sum (mla/row_tiles/sums.cuh).
//
// Weights are relative to references, which rarely move (attention/roles.cuh).
#pragma once

#include "cuda/mla/row_tiles/shape.cuh"

namespace turboquant::cuda::mla {

template <class S>
class RowScores {
  static_assert(kTileKeys == 48);  // columns of a product
  static constexpr int kBlocks = kTileKeys / 8, kScores = 4 * kBlocks;

 public:
  __device__ __forceinline__ RowScores(const BlockView& block, RowBarriers<S>& barriers)
      : block_(block), barriers_(barriers) {}

  // Units [0, units) of a segment, the first of which has `token` as its first.
  __device__ __forceinline__ void attend(int token, int units, const TileTurn<S>& first) {
    const RowTable rows = block_.rows<S>();
    const int end = token + units * kUnitTokens;  // keys behind it are others'
    int before_end = ~end;                        // of ~end
    first_all_ = INT32_MIN;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = row_of(i);
      const bool exists = rows.exists(row);
      factor_[i] = rows.scale[row] * by(), total_[i] = 0;
      // A row that does not exist sees nothing where some row does not see a key. Where all others see it, its scores
      // may be anything: they must not move the references of others.
      first_[i] = exists ? rows.first[row] : INT32_MAX, end_[i] = exists ? min(rows.end[row], end) : INT32_MIN;
      if (exists) first_all_ = max(first_all_, first_[i]), before_end = max(before_end, ~end_[i]);
      reference_[i] = exists ? 0 : kNobody, top_[i] = exists ? kNothing : kNobody;
    }
    first_all_ = max_of_lanes(first_all_), end_all_ = ~max_of_lanes(before_end);
    if (block_.call.rope_dtype == Dtype::kBFloat16) {
      attend_tiles<__nv_bfloat16>(token, num_tiles(units), first);
    } else {
      attend_tiles<__half>(token, num_tiles(units), first);
    }
  }

  // The heads of a partial result [ROWS, kPart].
  __device__ __forceinline__ void leave(float* part) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float total = sum_of_lanes<4>(total_[i]);
      if (block_.t != 0) continue;
      float* head = part + row_of(i) * S::kPart;
      head[0] = top_[i] == kNothing ? -INFINITY : reference_[i] + block_.rows<S>().shift[row_of(i)];
      head[1] = total, head[2] = 0;
    }
  }

 private:
  __device__ __forceinline__ int row_of(int i) const { return 16 * block_.warp + block_.g + 8 * i; }
  __device__ __forceinline__ float by() const { return block_.call.a.softmax_scale * kLog2E; }

  // ROPE: the type of raw channels.
  template <typename ROPE>
  __device__ __forceinline__ void attend_tiles(int token, int tiles, TileTurn<S> turn) {
    for (int i = 0; i < tiles; ++i, token += kTileKeys, ++turn.count) {
      float score[kScores], rope[kScores];
      wait_barrier(&barriers_.expanded[turn.tile()], turn.phase());
      multiply<ROPE>(turn.tile(), score, rope);
      const bool masked = token < first_all_ || token + kTileKeys > end_all_;
      float2 scale[kBlocks];
      load_scales(turn.tile(), scale);
#pragma unroll
      for (int k = 0; k < kScores; ++k) {  // scores become exponents
        const int row = k / 2 % 2;
        score[k] = fmaf(score[k] * scale_of(scale, k), factor_[row], fmaf(rope[k], by(), -reference_[row]));
      }
      if (masked) mask(score, scale, token + 2 * block_.t);
      weigh(score, scale, turn, i % kLowerUnits == 0 || token <= first_all_);  // a row may see its first keys
    }
  }

  // Products with expanded codes, and with raw channels.
  template <typename ROPE>
  __device__ __forceinline__ void multiply(int tile, float (&score)[kScores], float (&rope)[kScores]) const {
    const uint32_t queries = swizzled_word(block_.queries());
    const uint32_t keys = swizzled_word(block_.shared + tile * (kTileKeys * kSwizzleRow));
    const auto add = [&](auto type, float (&to)[kScores], int k, bool more) {  // 16 channels, from panel k / 4
      multiply_words<typename decltype(type)::type>(to, queries + (k / 4 * S::kQueryPanel + k % 4 * 32) / 16,
                                                    keys + (k / 4 * S::kPanelBytes + k % 4 * 32) / 16, more);
    };
    begin_products();
#pragma unroll
    for (int k = 0; k < 4; ++k) add(Tag<ROPE>{}, rope, S::kLatent / 16 + k, k > 0);
#pragma unroll
    for (int k = 0; k < S::kLatent / 16; ++k) add(Tag<__half>{}, score, k, k > 0);
    commit_products();
    wait_for_products<0>();
    receive<kScores>(score), receive<kScores>(rope);
  }

  // The scales of the lane's keys.
  __device__ __forceinline__ void load_scales(int tile, float2 (&scale)[kBlocks]) const {
    const __half2* from =
        reinterpret_cast<const __half2*>(block_.shared + block_.plan.token_scales) + tile * (kTileKeys / 2) + block_.t;
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) scale[j] = __half22float2(from[4 * j]);
  }

  // The largest exponent of the lane, with the largest scale: no product of a weight and a scale is above it. A scale
  // counts only if a row of the lane sees its key, because others may be anything.
  __device__ __forceinline__ float bound(const float (&exponent)[kScores], const float2 (&scale)[kBlocks]) const {
    float most = -INFINITY, largest = kLeastScale;
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      const float* x = exponent + 4 * j;
      const float of_keys[2] = {fmaxf(x[0], x[2]), fmaxf(x[1], x[3])};
      largest = fmaxf(largest, of_keys[0] == -INFINITY ? 0 : scale[j].x);
      largest = fmaxf(largest, of_keys[1] == -INFINITY ? 0 : scale[j].y);
      most = fmaxf(most, fmaxf(of_keys[0], of_keys[1]));
    }
    return most + __log2f(largest);
  }

  // moves: whether references may be lowered
  __device__ __forceinline__ void weigh(float (&exponent)[kScores], const float2 (&scale)[kBlocks],
                                        const TileTurn<S>& turn, bool moves) {
    const bool lacks_top = top_[0] == kNothing || top_[1] == kNothing;  // all scores so far may be -inf
    moves |= __any_sync(0xffffffff, lacks_top || bound(exponent, scale) > kRaise);
    const int buffer = turn.buffer();
    wait_barrier(&barriers_.weights_read[buffer], turn.buffer_phase() ^ 1);
    Factors& factors = reinterpret_cast<Factors*>(block_.shared + block_.plan.factors)[buffer];
    if (moves) move_references(exponent, scale, factors);
    if (block_.lane == 0) factors.moved[block_.warp] = moves;
    store_weights(exponent, scale, buffer);
  }
  static __device__ __forceinline__ float scale_of(const float2 (&scale)[kBlocks], int k) {
    return k % 2 ? scale[k / 4].y : scale[k / 4].x;
  }

  // -inf where a row does not see a key, which nobody may have stored. A scale that is not finite has spoilt the
  // exponents of the rows that see it, and leaves the others alone. first: the lane's key
  __device__ __forceinline__ void mask(float (&exponent)[kScores], float2 (&scale)[kBlocks], int first) const {
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) scale[j] = {finite_or_0(scale[j].x), finite_or_0(scale[j].y)};
#pragma unroll
    for (int k = 0; k < kScores; ++k) {
      const int i = k / 2 % 2, at = first + k / 4 * 8 + k % 2;
      if (at < first_[i] || at >= end_[i]) exponent[k] = -INFINITY;
    }
  }

  // Rare: finds the largest product of a weight and a scale of each row and lets the references, exponents and all sums
  // follow.
  __device__ __forceinline__ void move_references(float (&exponent)[kScores], const float2 (&scale)[kBlocks],
                                                  Factors& factors) {
    float most[2] = {-INFINITY, -INFINITY}, less[2];
#pragma unroll
    for (int k = 0; k < kScores; ++k) {
      float& of_row = most[k / 2 % 2];
      of_row = fmaxf(of_row, exponent[k] + __log2f(fmaxf(scale_of(scale, k), kLeastScale)));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float factor;
      move_reference(
          max_of_lanes<4>(most[i]), reference_[i], top_[i], [&](float x) { reference_[i] = x; }, factor, less[i]);
      total_[i] *= factor;
      if (block_.t == 0) factors.of_row[row_of(i)] = factor;
    }
#pragma unroll
    for (int k = 0; k < kScores; ++k) exponent[k] += less[k / 2 % 2];
  }

  // Weights to their buffer, as the operand that they are: [steps of 16 keys][lanes]. Each step is published at once.
  __device__ __forceinline__ void store_weights(const float (&exponent)[kScores], const float2 (&scale)[kBlocks],
                                                int buffer) {
    uint4* to = reinterpret_cast<uint4*>(block_.weights() + buffer * S::kWeightBytes) + threadIdx.x;
#pragma unroll
    for (int s = 0; s < kTilePieces; ++s) {
      uint32_t word[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {  // row g, row g + 8, and both for the next eight keys
        const int k = 8 * s + 2 * n;
        const float p[2] = {exp2_fast(exponent[k]), exp2_fast(exponent[k + 1])};
        total_[n % 2] += p[0] + p[1];
        word[n] = word_of_floats<__half>(p[0] * scale_of(scale, k), p[1] * scale_of(scale, k + 1));
      }
      to[s * kWarpgroup] = make_uint4(word[0], word[1], word[2], word[3]);
      __syncwarp();
      if (block_.lane == 0) arrive(&barriers_.weighed[buffer][s]);
    }
  }

  const BlockView block_;
  RowBarriers<S>& barriers_;
  int first_all_, end_all_;  // keys from codes that all rows of the warp see, if they exist, and the block attends to

  // Of the lane's two rows.
  float factor_[2];        // of a sum of products with codes and the key's scale, to the exponent
  int first_[2], end_[2];  // the keys that it sees
  float reference_[2], top_[2];
  float total_[2];  // the denominator, over the lane's keys
};

}  // namespace turboquant::cuda::mla
