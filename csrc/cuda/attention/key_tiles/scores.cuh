// The warpgroup that computes scores: products of 64 tokens with all rows, the running softmax, and weights as an
// operand for the warpgroup of values.
//
// Warp w has tokens 16 w to 16 w + 15 of a unit. Lane (g, t) has of each tile of eight rows (columns of a product) rows
// 2 t and 2 t + 1 of tokens g and g + 8: element 4 j + 2 i + h of an array is row 8 j + 2 t + h of token g + 8 i.
//
// Products with codes are products of bytes (queries are 16-bit integers in two columns). An exponent is the score in
// base 2 less the row's reference.
//
// Weights are relative to references, which rarely move, and those of half of the warps are negated
// (attention/roles.cuh).
#pragma once

#include "cuda/attention/key_tiles/expansion.cuh"
#include "cuda/attention/key_tiles/ring.cuh"
#include "cuda/attention/softmax_math.cuh"
#include "cuda/common/wgmma_registers.cuh"

namespace turboquant::cuda::key_tiles {

template <class S, class KEYS>
class ScoreGroup {
  using Keys = KEYS;
  static constexpr int kTiles = S::kRowTiles, kColumns = 2 * kTiles;  // of a lane

 public:
  explicit __device__ __forceinline__ ScoreGroup(const View& block)
      : block_(block), table_(block.table(S::kRows)),
        queries_(operand_word(shared_address(block.queries()), 2 * kTiles * 128)),
        scales_(block.offset_of_block(block.warp, block.layout.next_scales) + 2 * block.g),
        weights_(shared_address(block.weights()) +
                 ((2 * block.warp + block.lane / 8 % 2) * kTiles + block.lane / 16) * 128 + block.lane % 8 * 16) {}

  // Units [0, units) of a segment, the first of which has `token` as its first.
  __device__ __forceinline__ void attend(int token, int units, Turn& turn) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) totals_[c] = 0;
    if (threadIdx.x < S::kRows) {
      // The scores of a row that does not exist may be anything. They must not move the references of others.
      const int row = threadIdx.x;
      const bool exists = table_.exists(row);
      set_reference(row, exists ? 0 : kNobody), top(row) = exists ? kNothing : kNobody;
    }
    sync();
    find_seen_by_all();
    attend_units(token, units, turn);
  }

  // The maxima and denominators of a partial result [ROWS, kPart].
  __device__ __forceinline__ void leave(float* part) const {
    float* sums = block_.exchange();  // [4][ROWS], free after the last unit
    sync();
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      float total = totals_[c];
#pragma unroll
      for (int bit = 4; bit < 32; bit *= 2) total += __shfl_xor_sync(0xffffffff, total, bit);
      if (block_.g == 0) sums[block_.warp * S::kRows + row_of(c / 2) + c % 2] = total;
    }
    sync();
    if (threadIdx.x < S::kRows) {
      const int row = threadIdx.x;
      float total = 0;
#pragma unroll
      for (int w = 0; w < 4; ++w) total += sums[w * S::kRows + row];
      float* head = part + row * S::kPart;
      head[0] = total == 0 ? -INFINITY : reference(row) + (block_.call.soft_cap > 0 ? 0 : table_.shift[row]);
      head[1] = total;
    }
  }

 private:
  // The first of the lane's two rows of row tile j.
  __device__ __forceinline__ int row_of(int j) const { return 8 * j + 2 * block_.t; }
  // x of the lane's two rows of row tile j.
  __device__ __forceinline__ float2 of_rows(const float* x, int j) const {
    return *reinterpret_cast<const float2*>(x + row_of(j));
  }
  __device__ __forceinline__ void find_seen_by_all() {
    first_all_ = INT32_MIN;
    int before_end = INT32_MIN;  // of ~end
    for (int r = block_.lane; r < S::kRows; r += 32) {
      first_all_ = max(first_all_, table_.first[r]), before_end = max(before_end, ~table_.end[r]);
    }
    first_all_ = max_of_lanes(first_all_), end_all_ = ~max_of_lanes(before_end);
  }
  __device__ __forceinline__ void sync() const { sync_threads(kScoresBarrier, kWarpgroup); }
  // Products of the next unit are under way while the weights of a unit are computed. Behind the last unit they are of
  // bytes that may be anything, and nobody reads them.
  __device__ __forceinline__ void attend_units(int token, int units, Turn& turn) {
    if (units == 0) return;
    wait_barrier(block_.arrived(turn.stage), turn.phase);
    Operands keys;
    expand(keys, turn.stage * block_.own.unit_bytes);
    multiply(keys);
#pragma unroll 1
    for (int i = 0; i < units; ++i, token += kUnitTokens) {
      const int unit = turn.stage * block_.own.unit_bytes, buffer = turn.buffer();
      const uint32_t present = block_.present(turn.stage), count = turn.count, phase = turn.buffer_phase();
      float key_scale[2], scale[2], exponent[4 * kTiles];
      load_scales(unit + block_.layout.key_scales, key_scale), load_scales(unit + block_.layout.value_scales, scale);
      turn.next(block_.own.stages);
      const bool last = i + 1 == units, arrived = last || has_ended(block_.arrived(turn.stage), turn.phase);
      wait_for_products<0>();
      receive<8 * kTiles>(sum_);
      to_exponents(sum_, key_scale, exponent);
      if (block_.call.soft_cap > 0) cap(exponent);
      if (token < first_all_ || token + kUnitTokens > end_all_ || present != (1u << block_.own.copies) - 1) {
        mask(token, present, exponent, scale);
      }
      // The warps vote whether references move. Meanwhile keys of the next unit become operands.
      const bool any = __any_sync(0xffffffff, exceeds(exponent, scale));
      if (block_.lane == 0) {
        if (any) block_.vote(count) = count;
        arrive(block_.voted());
      }
      const bool was_read = has_ended(block_.weights_read(buffer), phase ^ 1);
      if (!arrived) wait_barrier(block_.arrived(turn.stage), turn.phase);
      expand(keys, turn.stage * block_.own.unit_bytes);
      wait_barrier(block_.voted(), count & 1);
      // a row may see its first keys; references may be lowered
      const bool moves = block_.vote(count) == count || token <= first_all_ || i % kLowerUnits == 0;
      if (!was_read) wait_barrier(block_.weights_read(buffer), phase ^ 1);
      float* factors = block_.factors() + buffer * Plan::factors_of(S::kRows);
      if (moves) move_references(exponent, scale, factors);
      if (block_.warp == 0 && block_.lane == 0) factors[S::kRows] = moves ? 1.0f : 0.0f;
      multiply(keys);
      store_weights(exponent, scale, buffer);
      publish_operands();
      arrive(block_.weighed(buffer));
    }
    wait_for_products<0>();
    receive<8 * kTiles>(sum_);
  }

  // The scales of the lane's tokens g and g + 8. at: where those of the unit begin
  __device__ __forceinline__ void load_scales(int at, float (&scale)[2]) const {
    const __half* x = reinterpret_cast<const __half*>(block_.shared + at + scales_);
    scale[0] = __half2float(x[0]), scale[1] = __half2float(x[8]);
  }

  // ---- Products

  // The operands of a unit's keys.
  struct Operands {
    uint32_t a[Keys::kProducts][4];
  };
  __device__ __forceinline__ void expand(Operands& to, int unit) const {
    constexpr format::Record kRecord{S::kDim, 32, Keys::kBits, 4};
    constexpr int kRow = kRecord.key_row_bytes(), kPlane = kRecord.key_plane_bytes();
    const StageLayout& layout = block_.layout;
    const uint8_t* row = block_.block_of(unit, block_.warp, layout.next_keys) + block_.g * kRow;
    const uint8_t* plane = block_.block_of(unit, block_.warp, layout.next_planes) + layout.planes + block_.g * kPlane;
    const typename Keys::Table table(Keys::kUniform ? nullptr : block_.key_levels<S>());
    typename Keys::Words x, y;
    typename Keys::Prepared p, q;
    Keys::load(row, plane, 0, block_.t, x);
    Keys::load(row + 8 * kRow, plane + 8 * kPlane, 0, block_.t, y);
    Keys::prepare(x, block_.t, p);
    Keys::prepare(y, block_.t, q);
    for_each<Keys::kProducts>([&](auto i) { Keys::template expand<i>(p, q, table, to.a[i]); });
  }

  // Begins to sum products with both bytes of the queries.
  __device__ __forceinline__ void multiply(Operands& keys) {
    // For the compiler, operands become what they are only here. Behind a branch it would serialise their products.
#pragma unroll
    for (int i = 0; i < Keys::kProducts; ++i) {
#pragma unroll
      for (int k = 0; k < 4; ++k) asm volatile("" : "+r"(keys.a[i][k]));
    }
    begin_products();
#pragma unroll
    for (int i = 0; i < Keys::kProducts; ++i) {
      const uint32_t (&a)[4] = keys.a[i];
      add_byte_product<2 * S::kRows>(sum_, a[0], a[1], a[2], a[3], queries_ + i * (S::kStepBytes / 16), i > 0);
    }
    commit_products();
  }

  // Scores less the references; where scores are capped, without the references.
  __device__ __forceinline__ void to_exponents(const int (&sum)[8 * kTiles], const float (&scale)[2],
                                               float (&exponent)[4 * kTiles]) const {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const float2 factor = of_rows(table_.factor, j), start = of_rows(table_.start, j), less = of_rows(added(), j);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {  // tokens g and g + 8
          const int k = 8 * j + 4 * h + 2 * n;
          const float dot = static_cast<float>(256 * sum[k] + sum[k + 1]);
          const float level = fmaf(dot, h ? factor.y : factor.x, h ? start.y : start.x);
          exponent[4 * j + 2 * n + h] = fmaf(level, scale[n], h ? less.y : less.x);
        }
      }
    }
  }
  __device__ __forceinline__ void cap(float (&exponent)[4 * kTiles]) const {
    const float limit = block_.call.soft_cap * kLog2E, inverse = __fdividef(1.0f, limit);
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const float2 shift = of_rows(table_.shift, j), at = of_rows(block_.references(S::kRows), j);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        float& x = exponent[4 * j + k];
        x = fmaf(limit, tanh_fast((x + (k % 2 ? shift.y : shift.x)) * inverse), k % 2 ? -at.y : -at.x);
      }
    }
  }

  // -inf where a row does not see a token. There, its scales may be anything. A value scale that is not finite spoils
  // the rows that see the token, by their exponents.
  __device__ __forceinline__ void mask(int token, uint32_t present, float (&exponent)[4 * kTiles],
                                       float (&scale)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int place = 16 * block_.warp + block_.g + 8 * i, at = token + place;
      const bool there = present >> (place >> block_.layout.copy_shift) & 1;
      const bool finite = fabsf(scale[i]) <= format::kMaxHalf;
      if (!finite) scale[i] = 0;
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = row_of(j) + h;
          float& x = exponent[4 * j + 2 * i + h];
          if (!there || at < table_.first[row] || at >= table_.end[row]) {
            x = -INFINITY;
          } else if (!finite) {
            x = NAN;
          }
        }
      }
    }
  }

  // ---- Softmax

  // Whether some product of a weight and a scale is too large for the reference. Exponents above 0 are ordered like
  // integers, with NaN above all, and others are negative integers.
  __device__ __forceinline__ bool exceeds(const float (&exponent)[4 * kTiles], const float (&scale)[2]) const {
    const float2 log = log_of(scale);
    int most[2] = {INT32_MIN, INT32_MIN};
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) most[i / 2 % 2] = max(most[i / 2 % 2], __float_as_int(exponent[i]));
    return most[0] > __float_as_int(fmaxf(kRaise - log.x, 0)) || most[1] > __float_as_int(fmaxf(kRaise - log.y, 0));
  }
  static __device__ __forceinline__ float2 log_of(const float (&scale)[2]) {
    return {log2_fast(fmaxf(scale[0], kLeastScale)), log2_fast(fmaxf(scale[1], kLeastScale))};
  }
  static __device__ __forceinline__ float log2_fast(float x) {
    float out;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
  }
  __device__ __forceinline__ float reference(int row) const { return block_.references(S::kRows)[row]; }
  // What scores begin with: less the reference, or 0 where they are capped first.
  __device__ __forceinline__ float* added() const { return block_.references(S::kRows) + 2 * S::kRows; }
  __device__ __forceinline__ void set_reference(int row, float x) const {
    block_.references(S::kRows)[row] = x, added()[row] = block_.call.soft_cap > 0 ? 0 : -x;
  }
  __device__ __forceinline__ float& top(int row) const { return block_.references(S::kRows)[S::kRows + row]; }

  // Rare: finds the largest product of a weight and a scale of each row and lets the references, exponents and all sums
  // follow.
  __device__ __forceinline__ void move_references(float (&exponent)[4 * kTiles], const float (&scale)[2],
                                                  float* factors) {
    float* most_of = block_.exchange();     // [4][ROWS]
    float* moved = most_of + 4 * S::kRows;  // [ROWS]: by how much
    const float2 log = log_of(scale);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      float most = fmaxf(exponent[c / 2 * 4 + c % 2] + log.x, exponent[c / 2 * 4 + 2 + c % 2] + log.y);
#pragma unroll
      for (int bit = 4; bit < 32; bit *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, bit));
      if (block_.g == 0) most_of[block_.warp * S::kRows + row_of(c / 2) + c % 2] = most;
    }
    sync();
    if (threadIdx.x < S::kRows) {
      const int row = threadIdx.x;
      float most = -INFINITY;
#pragma unroll
      for (int w = 0; w < 4; ++w) most = fmaxf(most, most_of[w * S::kRows + row]);
      const auto set = [&](float x) { set_reference(row, x); };
      move_reference(most, reference(row), top(row), set, factors[row], moved[row]);
    }
    sync();
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const float2 by = of_rows(factors, j), more = of_rows(moved, j);
#pragma unroll
      for (int k = 0; k < 4; ++k) exponent[4 * j + k] += k % 2 ? more.y : more.x;
      totals_[2 * j] *= by.x, totals_[2 * j + 1] *= by.y;
    }
  }

  // Weights to their buffer, negated where the warp's tokens count negatively.
  __device__ __forceinline__ void store_weights(const float (&exponent)[4 * kTiles], const float (&scale)[2],
                                                int buffer) {
    const float sign = counts_negatively(block_.warp) ? -1 : 1, by[2] = {sign * scale[0], sign * scale[1]};
    uint32_t word[kTiles][2];  // of tokens g and g + 8
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float p[2] = {exp2_fast(exponent[4 * j + 2 * i]), exp2_fast(exponent[4 * j + 2 * i + 1])};
        totals_[2 * j] += p[0], totals_[2 * j + 1] += p[1];
        word[j][i] = word_of_floats<__half>(p[0] * by[i], p[1] * by[i]);
      }
      const uint32_t to = weights_ + buffer * S::kWeightBytes + j / 2 * 256;
      if (j % 2 == 1) {
        store_transposed(to, word[j - 1][0], word[j - 1][1], word[j][0], word[j][1]);
      } else if (j + 1 == kTiles) {
        store_transposed(to, word[j][0], word[j][1]);
      }
    }
  }

  const View block_;
  const RowTable table_;
  const uint32_t queries_;   // an operand
  const int scales_;         // where the lane's scales stand among those of a unit
  const uint32_t weights_;   // where the lane stores weights
  int first_all_, end_all_;  // keys from codes that all rows see
  int sum_[8 * kTiles];      // products that are under way
  float totals_[kColumns];   // of the lane's rows: denominators, over its own tokens
};

}  // namespace turboquant::cuda::key_tiles
