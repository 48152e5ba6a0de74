// The warpgroup that computes scores: products of 64 tokens with all rows, the running softmax, and weights as an
// operand for the value warpgroups.
//
// Warp w has tokens 16 w to 16 w + 15 of a unit. Lane (g, t) has of each tile of eight rows (columns of a product) rows
// 2 t and 2 t + 1 of tokens g and g + 8: element 4 j + 2 i + h of an array is row 8 j + 2 t + h of token g + 8 i.
//
// Products with codes are products of bytes (queries are 16-bit integers in two columns), those with raw channels
// are added in float32. A score is query . key until it becomes an exponent: base 2, and less the row's reference.
//
// Weights are relative to references, which rarely move, and those of half of the warps are negated
// (attention/roles.cuh).
#pragma once

#include "cuda/common/wgmma_registers.cuh"
#include "cuda/mla/key_tiles/expansion.cuh"
#include "cuda/mla/key_tiles/ring.cuh"

namespace turboquant::cuda::mla {

template <class S>
class ScoreGroup {
  static constexpr int kTiles = S::kRowTiles, kColumns = 2 * kTiles;  // of a lane
  // With up to 32 rows registers have room for products of codes and of raw channels at the same time.
  static constexpr bool kRoomForBoth = !totals_in_memory(S::kRows);

 public:
  explicit __device__ __forceinline__ ScoreGroup(const BlockView& block)
      : block_(block), latents_(operand_word(shared_address(block.queries()), 2 * kTiles * 128)),
        ropes_(operand_word(shared_address(block.queries() + S::kQueryBytes), kTiles * 128)),
        tile_(shared_address(block.shared) + block.warp / 2 * block.plan.tile_bytes) {}

  // Units [0, units) of a segment, the first of which has `token` as its first.
  __device__ __forceinline__ void attend(int token, int units, Turn turn) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) set_totals(j, {});
    if (thread() < S::kRows) {
      // The scores of a row that does not exist may be anything. They must not move the references of others.
      const int row = thread();
      const bool exists = block_.rows<S>().exists(row);
      reference(row) = exists ? 0 : kNobody, top(row) = exists ? kNothing : kNobody;
    }
    lacks_top_ = thread() < S::kRows;
    sync();
    find_seen_by_all();
    const format::LatentRecord& record = block_.call.record;
    if (kRoomForBoth && record.rope_dim == 64 && block_.call.rope_dtype == Dtype::kBFloat16) {
      attend_units<kRoomForBoth>(token, units, turn);
    } else {
      attend_units<false>(token, units, turn);
    }
  }

  // The heads of a partial result [ROWS, kPart].
  __device__ __forceinline__ void leave(float* part) const {
    float* sums = block_.exchange();  // [2][4][S::kRows], free after the last unit
    sync();
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const float4 x = totals(c / 2);
      float total = c % 2 ? x.y : x.x, weights = c % 2 ? x.w : x.z;
#pragma unroll
      for (int bit = 4; bit < 32; bit *= 2) {
        total += __shfl_xor_sync(0xffffffff, total, bit), weights += __shfl_xor_sync(0xffffffff, weights, bit);
      }
      const int row = row_of(c / 2) + c % 2;
      if (block_.g == 0) sums[block_.warp * S::kRows + row] = total, sums[(4 + block_.warp) * S::kRows + row] = weights;
    }
    sync();
    if (thread() < S::kRows) {
      const auto sum = [&](int kind) {
        float x = 0;
#pragma unroll
        for (int w = 0; w < 4; ++w) x += sums[(4 * kind + w) * S::kRows + thread()];
        return x;
      };
      const int row = thread();
      float* head = part + row * S::kPart;
      head[0] = top(row) == kNothing ? -INFINITY : reference(row) + block_.rows<S>().shift[row];
      head[1] = sum(0), head[2] = sum(1) * level_offset(block_.plan.kind) * format::kLevelUnit;
    }
  }

 private:
  __device__ __forceinline__ int thread() const { return block_.thread(); }
  // The first of the lane's two rows of row tile j.
  __device__ __forceinline__ int row_of(int j) const { return 8 * j + 2 * block_.t; }
  // x of the lane's two rows of row tile j.
  __device__ __forceinline__ float2 of_rows(const float* x, int j) const {
    return *reinterpret_cast<const float2*>(x + row_of(j));
  }
  __device__ __forceinline__ void find_seen_by_all() {
    const RowTable rows = block_.rows<S>();
    first_all_ = INT32_MIN;
    int before_end = INT32_MIN;  // of ~end
    for (int r = block_.lane; r < S::kRows; r += 32) {
      first_all_ = max(first_all_, rows.first[r]), before_end = max(before_end, ~rows.end[r]);
    }
    first_all_ = max_of_lanes(first_all_), end_all_ = ~max_of_lanes(before_end);
  }
  // Of the lane's two rows of row tile j: the denominators and the sums of rounded weights, over its own tokens.
  __device__ __forceinline__ float4 totals(int j) const {
    if constexpr (!kRoomForBoth) {
      return block_.totals()[j * kWarpgroup + thread()];
    } else {
      return totals_[j];
    }
  }
  __device__ __forceinline__ void set_totals(int j, const float4& x) {
    if constexpr (!kRoomForBoth) {
      block_.totals()[j * kWarpgroup + thread()] = x;
    } else {
      totals_[j] = x;
    }
  }
  __device__ __forceinline__ void sync() const { sync_threads(kScoresBarrier, kWarpgroup); }

  // USUAL: 64 raw channels of bfloat16. Their products and those of codes are under way at the same time, which no
  // branch may come between.
  template <bool USUAL>
  __device__ __forceinline__ void attend_units(int token, int units, Turn turn) {
    for (int i = 0; i < units; ++i) {
      attend_unit<USUAL>(token + i * kUnitTokens, turn, i % kLowerUnits == 0);
      turn.next(block_.plan.stages);
    }
  }

  // moves: whether references may be lowered
  template <bool USUAL>
  __device__ __forceinline__ void attend_unit(int token, const Turn& turn, bool moves) {
    wait_barrier(block_.arrived(turn.stage), turn.phase);
    const int stage = turn.stage * block_.plan.unit_bytes;
    Scales scale = scales_of(stage);
    float score[4 * kTiles];
    int sum[8 * kTiles];
    clear(sum);
    if constexpr (USUAL) {
      clear(score);
      multiply_ropes<64, __nv_bfloat16>(stage, score);
    }
    with_codes<S::kLatent>(block_.plan.kind,
                           [&](auto codes) { CodeProducts<decltype(codes)>(*this, stage).multiply(sum); });
    if constexpr (USUAL) receive<4 * kTiles>(score);
    add_codes<USUAL>(sum, scale, score);
    if constexpr (!USUAL) multiply_other_ropes(stage, score);
    weigh(score, scale, token, turn, moves);
  }

  // The scales of the lane's tokens g and g + 8.
  struct Scales {
    float of[2];
  };
  __device__ __forceinline__ Scales scales_of(int stage) const {
    const uint8_t* tile = block_.shared + stage + block_.warp / 2 * block_.plan.tile_bytes;
    const __half* scales = reinterpret_cast<const __half*>(tile + block_.plan.scales) + block_.warp % 2 * 16 + block_.g;
    return {__half2float(scales[0]), __half2float(scales[8])};
  }
  __device__ __forceinline__ bool is_masked(int token) const {
    return token < first_all_ || token + kUnitTokens > end_all_;
  }

  // Weights of a unit from its scores. moves: whether references may be lowered.
  __device__ __forceinline__ void weigh(float (&score)[4 * kTiles], Scales& scale, int token, const Turn& turn,
                                        bool moves) {
    const int buffer = turn.buffer();
    for_each<kTiles / kPieceTiles>([&](auto piece) { to_exponents<piece>(score); });
    if (is_masked(token)) mask(score, scale, token);
    moves |= token <= first_all_;  // a row may see its first keys
    moves = sync_any(kScoresBarrier, kWarpgroup, exceeds(score, scale.of)) || moves;
    wait_barrier(block_.weights_read(buffer), turn.buffer_phase() ^ 1);
    float* factors = block_.factors() + buffer * Plan::factors_of(S::kRows);
    if (moves) move_references(score, scale.of, factors);
    if (thread() == 0) factors[S::kRows] = moves ? 1.0f : 0.0f;
    for_each<kTiles / kPieceTiles>([&](auto piece) { store_weights<piece>(score, scale.of, buffer); });
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

  // Products of the codes of a unit with both bytes of the queries.
  template <class C>
  class CodeProducts {
   public:
    // stage: bytes from the start of the ring
    __device__ __forceinline__ CodeProducts(const ScoreGroup& scores, int stage) : scores_(&scores) {
      // Word c of a token's row: its place differs from that of word 0 in bits that the row's begin does not have.
      const BlockView& block = scores.block_;
      const int row = block.warp % 2 * 16, token = row + block.lane % 16;  // of the tile
      words_ = scores.tile_ + stage + token * C::kRowBytes + code_word(token, block.lane / 16);
      plane_ = block.shared + stage + block.warp / 2 * block.plan.tile_bytes + block.plan.planes +
               (row + block.g) * C::kPlaneBytes;
      next_ = load(0);
    }

    __device__ __forceinline__ void multiply(int (&sum)[8 * kTiles]) {
      constexpr int kWords = kBytesOfWord<C::kKind>;
      const uint32_t latents = scores_->latents_;
      const int t = scores_->block_.t;
#pragma unroll
      for (int c = 0; c < C::kChunks; c += 2) {  // two words of 16 bytes of tokens g and g + 8
        const uint4 x = next_;
        if (c + 2 < C::kChunks) next_ = load(c + 2);  // while products of others are under way
        uint4 fifth{};                                // of the words of x
        if constexpr (C::kKind == OperandKind::kPlanes) {
          const uint2 low = *reinterpret_cast<const uint2*>(plane_ + 4 * c);
          const uint2 high = *reinterpret_cast<const uint2*>(plane_ + 8 * C::kPlaneBytes + 4 * c);
          fifth = {align_fifth(low.x, t), align_fifth(high.x, t), align_fifth(low.y, t), align_fifth(high.y, t)};
        }
        uint32_t bytes[4][kWords];
        expand_bytes<C::kKind>(x.x, fifth.x, bytes[0]), expand_bytes<C::kKind>(x.y, fifth.y, bytes[1]);
        expand_bytes<C::kKind>(x.z, fifth.z, bytes[2]), expand_bytes<C::kKind>(x.w, fifth.w, bytes[3]);
        begin_products();
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
          const int step = c / 2 * kWords + i;
          add_byte_product<2 * S::kRows>(sum, bytes[0][i], bytes[1][i], bytes[2][i], bytes[3][i],
                                         latents + step * (S::kByteStep / 16), true);
        }
        commit_products();
        wait_for_products<1>();
      }
      wait_for_products<0>();
      receive<8 * kTiles>(sum);
    }

   private:
    __device__ __forceinline__ uint4 load(int c) const { return load_matrices((words_ ^ (c % 8 * 16)) + c / 8 * 128); }

    const ScoreGroup* scores_;
    uint32_t words_;
    const uint8_t* plane_;
    uint4 next_;
  };

  // score = scale * (query . level), plus what it is if ADD
  template <bool ADD>
  __device__ __forceinline__ void add_codes(const int (&sum)[8 * kTiles], const Scales& scale,
                                            float (&score)[4 * kTiles]) const {
    const RowTable rows = block_.rows<S>();
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const float2 factor = of_rows(rows.scale, j), start = of_rows(rows.start, j);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {  // tokens g and g + 8
          const int k = 8 * j + 4 * h + 2 * i;
          const float dot = static_cast<float>(256 * sum[k] + sum[k + 1]);
          const float level = fmaf(dot, h ? factor.y : factor.x, h ? start.y : start.x);
          float& x = score[4 * j + 2 * i + h];
          x = fmaf(level, scale.of[i], ADD ? x : 0);
        }
      }
    }
  }

  // Begins to add the products of raw channels.
  template <int DIM, typename T>
  __device__ __forceinline__ void multiply_ropes(int stage, float (&score)[4 * kTiles]) const {
    const int lane = block_.lane, token = block_.warp % 2 * 16 + lane % 16;  // of the tile
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
  __device__ __forceinline__ void multiply_other_ropes(int stage, float (&score)[4 * kTiles]) const {
    const int rope_dim = block_.call.record.rope_dim;
    const auto multiply = [&](auto type) {
      using T = typename decltype(type)::type;
      if (rope_dim == 64) {
        multiply_ropes<64, T>(stage, score);
        wait_for_products<0>();
        receive<4 * kTiles>(score);
      } else if (rope_dim == 32) {
        multiply_ropes<32, T>(stage, score);
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

  static constexpr int kPieceTiles = 2;  // row tiles of a piece of the softmax: what one instruction stores

  // Scores become exponents, piece by piece.
  template <int PIECE>
  __device__ __forceinline__ void to_exponents(float (&score)[4 * kTiles]) const {
    const float by = block_.call.a.softmax_scale * kLog2E;
#pragma unroll
    for (int j = PIECE * kPieceTiles; j < (PIECE + 1) * kPieceTiles; ++j) {
      const float2 at = references_of(j);
#pragma unroll
      for (int k = 0; k < 4; ++k) score[4 * j + k] = fmaf(score[4 * j + k], by, k % 2 ? -at.y : -at.x);
    }
  }
  // -inf where a row does not see a token, which nobody may have stored. A scale that is not finite has spoilt the
  // exponents of the rows that see it, and leaves the others alone.
  __device__ __forceinline__ void mask(float (&exponent)[4 * kTiles], Scales& scale, int token) const {
    const RowTable rows = block_.rows<S>();
#pragma unroll
    for (int i = 0; i < 2; ++i) scale.of[i] = finite_or_0(scale.of[i]);
    const int first = token + 16 * block_.warp + block_.g;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int row = row_of(j) + k % 2, at = first + k / 2 * 8;
        if (at < rows.first[row] || at >= rows.end[row]) exponent[4 * j + k] = -INFINITY;
      }
    }
  }

  // Whether some product of a weight and a scale is too large for the reference, or the row of the thread has none yet.
  __device__ __forceinline__ bool exceeds(const float (&exponent)[4 * kTiles], const float (&scale)[2]) const {
    const float2 log = log_of(scale);
    bool any = lacks_top_;
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) any |= exponent[i] > kRaise - (i / 2 % 2 ? log.y : log.x);
    return any;
  }
  static __device__ __forceinline__ float2 log_of(const float (&scale)[2]) {
    return {__log2f(fmaxf(scale[0], kLeastScale)), __log2f(fmaxf(scale[1], kLeastScale))};
  }
  __device__ __forceinline__ float& reference(int row) const { return block_.references(S::kRows)[row]; }
  __device__ __forceinline__ float& top(int row) const { return block_.references(S::kRows)[S::kRows + row]; }
  __device__ __forceinline__ float2 references_of(int j) const { return of_rows(block_.references(S::kRows), j); }

  // Rare: finds the largest product of a weight and a scale of each row and lets the references, exponents and all sums
  // follow.
  __device__ __forceinline__ void move_references(float (&exponent)[4 * kTiles], const float (&scale)[2],
                                                  float* factors) {
    float* most_of = block_.exchange();     // [4][S::kRows]
    float* moved = most_of + 4 * S::kRows;  // [S::kRows]: by how much
    const float2 log = log_of(scale);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      float most = fmaxf(exponent[c / 2 * 4 + c % 2] + log.x, exponent[c / 2 * 4 + 2 + c % 2] + log.y);
#pragma unroll
      for (int bit = 4; bit < 32; bit *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, bit));
      if (block_.g == 0) most_of[block_.warp * S::kRows + row_of(c / 2) + c % 2] = most;
    }
    sync();
    if (thread() < S::kRows) {
      const int row = thread();
      float most = -INFINITY;
#pragma unroll
      for (int w = 0; w < 4; ++w) most = fmaxf(most, most_of[w * S::kRows + thread()]);
      // As roles::move_reference does, whose form costs this kernel other registers.
      const float old = reference(row);
      most += old;
      const bool first = top(row) == kNothing;
      const float highest = fmaxf(top(row), most), wanted = fmaxf(most, highest - kDeepest);
      const bool moves = most > -INFINITY && (first || most > old + kRaise || wanted < old - kLower);
      if (most > -INFINITY) top(row) = highest;
      lacks_top_ = first && most == -INFINITY;  // all scores so far may be -inf
      if (moves) reference(row) = wanted;
      factors[row] = moves && !first ? exp2_fast(old - wanted) : 1;
      moved[thread()] = moves ? old - wanted : 0;
    }
    sync();
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const float2 by = of_rows(factors, j), more = of_rows(moved, j);
#pragma unroll
      for (int k = 0; k < 4; ++k) exponent[4 * j + k] += k % 2 ? more.y : more.x;
      const float4 x = totals(j);
      set_totals(j, {x.x * by.x, x.y * by.y, x.z * by.x, x.w * by.y});
    }
  }

  // Weights to their buffer, negated where the warp's tokens count negatively, piece by piece.
  template <int PIECE>
  __device__ __forceinline__ void store_weights(const float (&exponent)[4 * kTiles], const float (&scale)[2],
                                                int buffer) {
    const int lane = block_.lane;
    const float sign = counts_negatively(block_.warp) ? -1 : 1, by[2] = {sign * scale[0], sign * scale[1]};
    uint8_t* to = block_.weights() + buffer * S::kWeightBytes +
                  ((2 * block_.warp + lane / 8 % 2) * kTiles + lane / 16) * 128 + lane % 8 * 16;
#pragma unroll
    for (int j = PIECE * kPieceTiles; j < (PIECE + 1) * kPieceTiles; j += 2) {
      uint32_t word[4];  // tokens g and g + 8 of row tile j, then of j + 1
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        float4 sums = totals(j + tile);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float* x = exponent + 4 * (j + tile) + 2 * i;
          const float p[2] = {exp2_fast(x[0]), exp2_fast(x[1])};
          sums.x += p[0], sums.y += p[1];
          uint32_t& to_store = word[2 * tile + i];
          to_store = word_of_floats<__half>(p[0] * by[i], p[1] * by[i]);
          const float2 rounded = __half22float2(reinterpret_cast<const __half2&>(to_store));
          sums.z += rounded.x, sums.w += rounded.y;
        }
        set_totals(j + tile, sums);
      }
      store_transposed(shared_address(to + j * 128), word[0], word[1], word[2], word[3]);
    }
  }

  const BlockView block_;
  const uint32_t latents_, ropes_;  // operands
  const uint32_t tile_;             // the warp's tile of the first stage, in shared memory
  int first_all_, end_all_;         // keys from codes that all rows see
  bool lacks_top_;                  // whether the thread's row has no top yet

  float4 totals_[kRoomForBoth ? kTiles : 1];
};

}  // namespace turboquant::cuda::mla
