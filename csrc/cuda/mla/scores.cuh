// The warpgroup that computes scores: products of 64 tokens with all rows, the running softmax, and weights as an
// operand for the value warpgroups.
//
// Warp w has tokens 16 w to 16 w + 15 of a unit. Lane (g, t) has of each tile of eight rows (columns of a product) rows
// 2 t and 2 t + 1 of tokens g and g + 8: element 4 j + 2 i + h of an array is row 8 j + 2 t + h of token g + 8 i.
//
// Products with codes are products of bytes (queries are 16-bit integers in two columns), those with rotary channels
// are added in float32.
//
// A weight is 2^(score - reference) times the token's scale, rounded to float16. A row's reference follows the largest
// such product of a unit: it is raised as soon as one is 2^12 above it, and lowered, every eight units, when all are
// 2^4 below it, so that weights keep their digits behind a token that had nearly all weight. Sums are float32 and
// follow the reference; it is never lowered to less than 2^-40 of what it once was, where nothing counts any more. In
// most units no reference moves: then nobody needs to know the largest product.
#pragma once

#include "cuda/common/wgmma_registers.cuh"
#include "cuda/mla/ring.cuh"

namespace turboquant::cuda::mla {

constexpr float kRaise = 12, kLower = 4, kDeepest = 40;
constexpr int kLowerUnits = 8;                   // how often references are lowered
constexpr float kNothing = -1e30f;               // a reference before the first key
constexpr float kNobody = 1e30f;                 // and that of a row that does not exist, which never moves
constexpr float kLeastScale = 1.0f / (1 << 24);  // of a token in its reference: that of a zero vector is 0

template <class S>
class ScoreGroup {
  static constexpr int kTiles = S::kRowTiles, kColumns = 2 * kTiles;  // of a lane
  static constexpr bool kRoomForBoth = S::kRows < 64;  // registers for products of both kinds, and words ahead

 public:
  explicit __device__ __forceinline__ ScoreGroup(const BlockView& block)
      : block_(block), latents_(operand_word(shared_address(block.queries()), 2 * kTiles * 128)),
        ropes_(operand_word(shared_address(block.queries() + S::kQueryBytes), kTiles * 128)),
        tile_(shared_address(block.shared) + block.warp / 2 * block.plan.tile_bytes) {}

  // Units [0, units) of a segment, the first of which has `token` as its first.
  __device__ __forceinline__ void attend(int token, int units, Turn& turn) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) total_[c] = weights_[c] = 0;
    if (threadIdx.x < S::kRows) {
      // The scores of a row that does not exist may be anything. They must not move the references of others.
      reference(threadIdx.x) = top(threadIdx.x) = block_.rows()[threadIdx.x].exists() ? kNothing : kNobody;
    }
    sync_threads(kScoresBarrier, kWarpgroup);
    const format::LatentRecord& record = block_.call.record;
    if (kRoomForBoth && record.rope_dim == 64 && block_.call.rope_dtype == Dtype::kBFloat16) {
      attend_units<kRoomForBoth>(token, units, turn);
    } else {
      attend_units<false>(token, units, turn);
    }
  }

  // The heads of a partial result [ROWS, kPart].
  __device__ __forceinline__ void leave(float* part) const {
    float* sums = block_.exchange();  // [2][4][ROWS], free after the last unit
    sync_threads(kScoresBarrier, kWarpgroup);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      float total = total_[c], weights = weights_[c];
#pragma unroll
      for (int bit = 4; bit < 32; bit *= 2) {
        total += __shfl_xor_sync(0xffffffff, total, bit), weights += __shfl_xor_sync(0xffffffff, weights, bit);
      }
      const int row = row_of(c);
      if (block_.g == 0) {
        sums[block_.warp * S::kRows + row] = total, sums[(4 + block_.warp) * S::kRows + row] = weights;
      }
    }
    sync_threads(kScoresBarrier, kWarpgroup);
    if (threadIdx.x < S::kRows) {
      const auto sum = [&](int kind) {
        float x = 0;
#pragma unroll
        for (int w = 0; w < 4; ++w) x += sums[(4 * kind + w) * S::kRows + threadIdx.x];
        return x;
      };
      float* head = part + threadIdx.x * S::kPart;
      head[0] = reference(threadIdx.x) == kNothing ? -INFINITY : reference(threadIdx.x);
      head[1] = sum(0), head[2] = sum(1) * level_offset(block_.plan.kind) * format::kLevelUnit;
    }
  }

 private:
  __device__ __forceinline__ int row_of(int c) const { return c / 2 * 8 + 2 * block_.t + c % 2; }

  // USUAL: 64 rotary channels of bfloat16. Their products and those of codes are under way at the same time, which no
  // branch may come between.
  template <bool USUAL>
  __device__ __forceinline__ void attend_units(int token, int units, Turn& turn) {
    for (int i = 0; i < units; ++i) {
      attend_unit<USUAL>(token + i * kUnitTokens, turn, i % kLowerUnits == 0);
      turn.next(block_.plan.stages);
    }
  }

  // moves: whether references may be lowered
  template <bool USUAL>
  __device__ __forceinline__ void attend_unit(int token, const Turn& turn, bool moves) {
    const int buffer = turn.buffer();
    wait_barrier(block_.arrived(turn.stage), turn.phase);
    const int stage = turn.stage * block_.plan.unit_bytes;
    const uint8_t* tile = block_.shared + stage + block_.warp / 2 * block_.plan.tile_bytes;
    const int row = block_.warp % 2 * 16;  // of the tile, the warp's first token
    const __half* scales = reinterpret_cast<const __half*>(tile + block_.plan.scales) + row + block_.g;
    const float scale[2] = {__half2float(scales[0]), __half2float(scales[8])};

    float score[4 * kTiles];
    with_codes<S::kLatent>(block_.plan.kind, [&](auto codes) {
      int sum[8 * kTiles];
      clear(sum);
      if constexpr (USUAL) {
        clear(score);
        multiply_ropes<64, __nv_bfloat16>(stage, row, score);
      }
      multiply_codes<decltype(codes)>(tile, stage, row, sum);
      if constexpr (USUAL) receive<4 * kTiles>(score);
      add_codes<USUAL>(sum, scale, score);
    });
    if constexpr (!USUAL) multiply_other_ropes(stage, row, score);

    const bool masked = token < block_.notes().first_all || token + kUnitTokens > block_.notes().end_all;
    to_base_2(score, token, masked);
    moves = sync_any(kScoresBarrier, kWarpgroup, exceeds(score, scale)) || moves;
    wait_barrier(block_.summed(buffer), turn.buffer_phase() ^ 1);
    if (moves) move_references(score, scale, buffer);
    if (threadIdx.x == 0) block_.factors()[buffer * (S::kRows + 1) + S::kRows] = moves ? 1.0f : 0.0f;
    if (masked) {
      weigh<true>(score, scale, buffer);
    } else {
      weigh<false>(score, scale, buffer);
    }
    publish_operands();
    arrive(block_.weighed(buffer));
  }

  // ---- Products

  // Registers of sums must not change while products are under way, whichever these are.
  template <typename T, int COUNT>
  static __device__ __forceinline__ void clear(T (&sum)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) sum[i] = 0;
    receive<COUNT>(sum);
  }

  // sum = query . code, of both bytes of the queries: all products have ended
  template <class C>
  __device__ __forceinline__ void multiply_codes(const uint8_t* tile, int stage, int row,
                                                 int (&sum)[8 * kTiles]) const {
    // Word c of a token's row: its place differs from that of word 0 in bits that the row's begin does not have.
    const int lane = block_.lane, token = row + lane % 16;
    const uint32_t words = tile_ + stage + token * C::kRowBytes + code_word(token, lane / 16);
    const uint8_t* plane = tile + block_.plan.planes + (row + block_.g) * C::kPlaneBytes;
    constexpr int kWords = kBytesOfWord<C::kKind>;
    const auto load = [&](int c) { return load_matrices((words ^ (c % 8 * 16)) + c / 8 * 128); };
    uint4 next = load(0);
#pragma unroll
    for (int c = 0; c < C::kChunks; c += 2) {  // two words of 16 bytes of tokens g and g + 8
      const uint4 x = kRoomForBoth || c == 0 ? next : load(c);
      if (kRoomForBoth && c + 2 < C::kChunks) next = load(c + 2);  // while products of others are under way
      uint4 fifth{};                                               // of the words of x
      if constexpr (C::kKind == kPlanes) {
        const uint2 low = *reinterpret_cast<const uint2*>(plane + 4 * c);
        const uint2 high = *reinterpret_cast<const uint2*>(plane + 8 * C::kPlaneBytes + 4 * c);
        fifth = {align_fifth(low.x, block_.t), align_fifth(high.x, block_.t), align_fifth(low.y, block_.t),
                 align_fifth(high.y, block_.t)};
      }
      uint32_t bytes[4][kWords];
      expand_bytes<C::kKind>(x.x, fifth.x, bytes[0]), expand_bytes<C::kKind>(x.y, fifth.y, bytes[1]);
      expand_bytes<C::kKind>(x.z, fifth.z, bytes[2]), expand_bytes<C::kKind>(x.w, fifth.w, bytes[3]);
      begin_products();
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const int step = c / 2 * kWords + i;
        add_byte_product<2 * S::kRows>(sum, bytes[0][i], bytes[1][i], bytes[2][i], bytes[3][i],
                                       latents_ + step * (S::kByteStep / 16), true);
      }
      commit_products();
      wait_for_products<1>();
    }
    wait_for_products<0>();
    receive<8 * kTiles>(sum);
  }

  // score = scale * (query . level), plus what it is if ADD
  template <bool ADD>
  __device__ __forceinline__ void add_codes(const int (&sum)[8 * kTiles], const float (&scale)[2],
                                            float (&score)[4 * kTiles]) const {
    const RowConstants* rows = block_.rows();
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const float factor = rows[row_of(c)].scale, start = rows[row_of(c)].start;
#pragma unroll
      for (int i = 0; i < 2; ++i) {  // tokens g and g + 8
        const float dot = static_cast<float>(256 * sum[4 * c + 2 * i] + sum[4 * c + 2 * i + 1]);
        float& x = score[c / 2 * 4 + 2 * i + c % 2];
        x = fmaf(dot + start, factor * scale[i], ADD ? x : 0);
      }
    }
  }

  // Begins to add the products of rotary channels.
  template <int DIM, typename T>
  __device__ __forceinline__ void multiply_ropes(int stage, int row, float (&score)[4 * kTiles]) const {
    const int lane = block_.lane, token = row + lane % 16;
    const uint32_t words = tile_ + stage + block_.plan.ropes + token * DIM * 2;
    uint4 x[DIM / 16];
#pragma unroll
    for (int s = 0; s < DIM / 16; ++s) x[s] = load_matrices(words + rope_word(token, 2 * s + lane / 16, DIM / 8));
    begin_products();
#pragma unroll
    for (int s = 0; s < DIM / 16; ++s) {
      add_product<S::kRows, T>(score, x[s].x, x[s].y, x[s].z, x[s].w, ropes_ + s * (S::kStepBytes / 16));
    }
    commit_products();
  }
  // Adds them, whichever they are.
  __device__ __forceinline__ void multiply_other_ropes(int stage, int row, float (&score)[4 * kTiles]) const {
    const int rope_dim = block_.call.record.rope_dim;
    const auto multiply = [&](auto type) {
      using T = typename decltype(type)::type;
      if (rope_dim == 64) {
        multiply_ropes<64, T>(stage, row, score);
        wait_for_products<0>();
        receive<4 * kTiles>(score);
      } else if (rope_dim == 32) {
        multiply_ropes<32, T>(stage, row, score);
        wait_for_products<0>();
        receive<4 * kTiles>(score);
      }
    };
    if (block_.call.rope_dtype == Dtype::kBFloat16) {
      multiply(Tag<__nv_bfloat16>{});
    } else {
      multiply(Tag<__half>{});
    }
  }

  // ---- Softmax

  // Scores as powers of two, with the center's; -inf where a row does not see a token.
  __device__ __forceinline__ void to_base_2(float (&score)[4 * kTiles], int token, bool masked) const {
    const RowConstants* rows = block_.rows();
    const float by = block_.call.a.softmax_scale * kLog2E;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const float shift = rows[row_of(c)].shift;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& x = score[c / 2 * 4 + 2 * i + c % 2];
        x = fmaf(x, by, shift);
      }
    }
    if (!masked) return;
    const int first = token + 16 * block_.warp + block_.g;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const RowConstants& row = rows[row_of(c)];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (first + 8 * i < row.first || first + 8 * i >= row.end) score[c / 2 * 4 + 2 * i + c % 2] = -INFINITY;
      }
    }
  }

  // Whether some product of a weight and a scale is too large for the reference.
  __device__ __forceinline__ bool exceeds(const float (&score)[4 * kTiles], const float (&scale)[2]) const {
    const float2 log = log_of(scale);
    bool any = false;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const float2 at = references_of(j);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float most = (h ? at.y : at.x) + kRaise;
        any |= score[4 * j + h] + log.x > most || score[4 * j + 2 + h] + log.y > most;
      }
    }
    return any;
  }
  static __device__ __forceinline__ float2 log_of(const float (&scale)[2]) {
    return {__log2f(fmaxf(scale[0], kLeastScale)), __log2f(fmaxf(scale[1], kLeastScale))};
  }
  __device__ __forceinline__ float& reference(int row) const { return block_.references(S::kRows)[row]; }
  __device__ __forceinline__ float& top(int row) const { return block_.references(S::kRows)[S::kRows + row]; }
  __device__ __forceinline__ float2 references_of(int j) const {
    return *reinterpret_cast<const float2*>(&reference(row_of(2 * j)));
  }

  // Rare: finds the largest product of a weight and a scale of each row and lets the references and all sums follow.
  __device__ __forceinline__ void move_references(const float (&score)[4 * kTiles], const float (&scale)[2],
                                                  int buffer) {
    float* factors = block_.factors() + buffer * (S::kRows + 1);
    float* exchange = block_.exchange();  // [4][ROWS]
    const float2 log = log_of(scale);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      float most = fmaxf(score[c / 2 * 4 + c % 2] + log.x, score[c / 2 * 4 + 2 + c % 2] + log.y);
#pragma unroll
      for (int bit = 4; bit < 32; bit *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, bit));
      if (block_.g == 0) exchange[block_.warp * S::kRows + row_of(c)] = most;
    }
    sync_threads(kScoresBarrier, kWarpgroup);
    if (threadIdx.x < S::kRows) {
      const int row = threadIdx.x;
      float most = -INFINITY;
#pragma unroll
      for (int w = 0; w < 4; ++w) most = fmaxf(most, exchange[w * S::kRows + row]);
      const float old = reference(row), highest = fmaxf(top(row), most), wanted = fmaxf(most, highest - kDeepest);
      const bool moves = most > old + kRaise || (wanted < old - kLower && most > -INFINITY);
      top(row) = highest;
      if (moves) reference(row) = wanted;
      factors[row] = moves ? exp2_fast(old - wanted) : 1;
    }
    sync_threads(kScoresBarrier, kWarpgroup);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const float by = factors[row_of(c)];
      total_[c] *= by, weights_[c] *= by;
    }
  }

  // Weights to their buffer.
  template <bool MASKED>
  __device__ __forceinline__ void weigh(const float (&score)[4 * kTiles], const float (&scale)[2], int buffer) {
    const int lane = block_.lane;
    uint8_t* to = block_.weights() + buffer * S::kWeightBytes +
                  ((2 * block_.warp + lane / 8 % 2) * kTiles + lane / 16) * 128 + lane % 8 * 16;
#pragma unroll
    for (int j = 0; j < kTiles; j += 2) {
      uint32_t word[4];  // tokens g and g + 8 of row tile j, then of j + 1
      const float2 at[2] = {references_of(j), references_of(j + 1)};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int tile = j + k / 2, i = k % 2;
        float w[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int c = 2 * tile + h;
          const float x = score[4 * tile + 2 * i + h], p = exp2_fast(x - (h ? at[k / 2].y : at[k / 2].x));
          total_[c] += p;
          w[h] = MASKED && x == -INFINITY ? 0 : p * scale[i];
        }
        word[k] = word_of_floats<__half>(w[0], w[1]);
        const float2 rounded = __half22float2(reinterpret_cast<const __half2&>(word[k]));
        weights_[2 * tile] += rounded.x, weights_[2 * tile + 1] += rounded.y;
      }
      store_transposed(to + j * 128, word);
    }
  }

  // Four 8 x 8 matrices of 16-bit elements, transposed: lane i gives the address of row i % 8 of matrix i / 8.
  static __device__ __forceinline__ void store_transposed(void* row, const uint32_t (&word)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
                 "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
                 : "memory");
#endif
  }

  const BlockView block_;
  const uint32_t latents_, ropes_;  // operands
  const uint32_t tile_;             // the warp's tile of the first stage, in shared memory

  // Of the lane's rows: the denominator and the sum of rounded weights, over the lane's own tokens.
  float total_[kColumns], weights_[kColumns];
};

}  // namespace turboquant::cuda::mla
