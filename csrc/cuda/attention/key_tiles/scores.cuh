// The warpgroup that computes scores: products of 64 tokens with all rows, the running softmax, and weights as an
// operand for the warpgroup of values.
//
// Warp w has tokens 16 w to 16 w + 15 of a unit. Lane (g, t) has of each tile of eight rows (columns of a product) rows
// 2 t and 2 t + 1 of tokens g and g + 8: element 4 j + 2 i + h of an array is row 8 j + 2 t + h of token g + 8 i.
//
// Products with codes are products of bytes (queries are 16-bit integers in two columns). An exponent is the score in
// base 2 less the row's reference.
//
// A weight is 2^exponent times the token's value scale, rounded to float16. A row's reference follows the largest such
// product of a unit: it is raised as soon as one is 2^12 above it, and lowered, every eight units, when all are 2^4
// below it, so that weights keep their digits behind a token that had nearly all weight. Sums are float32 and follow
// the reference; it is never lowered to less than 2^-40 of what it once was, where nothing counts any more. In most
// units no reference moves: then nobody needs to know the largest product.
#pragma once

#include "cuda/attention/key_tiles/expansion.cuh"
#include "cuda/attention/key_tiles/ring.cuh"
#include "cuda/attention/softmax_math.cuh"
#include "cuda/common/wgmma_registers.cuh"

namespace turboquant::cuda::key_tiles {

constexpr float kRaise = 12, kLower = 4, kDeepest = 40;
constexpr int kLowerUnits = 8;                   // how often references are lowered
constexpr float kNothing = -1e30f;               // a row's largest product before the first key
constexpr float kNobody = 1e30f;                 // and that of a row that does not exist: no reference moves
constexpr float kLeastScale = 1.0f / (1 << 24);  // of a token in its reference: that of a zero vector is 0

template <class S>
class ScoreGroup {
  static constexpr int kTiles = S::kRowTiles, kColumns = 2 * kTiles;  // of a lane

 public:
  explicit __device__ __forceinline__ ScoreGroup(const View& block)
      : block_(block), table_(block.table(S::kRows)),
        queries_(operand_word(shared_address(block.queries()), 2 * kTiles * 128)) {}

  // Units [0, units) of a segment, the first of which has `token` as its first.
  __device__ __forceinline__ void attend(int token, int units, Turn& turn) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) set_totals(j, {});
    if (threadIdx.x < S::kRows) {
      // The scores of a row that does not exist may be anything. They must not move the references of others.
      const int row = threadIdx.x;
      const bool exists = table_.exists(row);
      reference(row) = exists ? 0 : kNobody, top(row) = exists ? kNothing : kNobody;
    }
    sync();
    find_seen_by_all();
#pragma unroll 1
    for (int i = 0; i < units; ++i) {
      attend_unit(token + i * kUnitTokens, turn, i % kLowerUnits == 0);
      turn.next(block_.own.stages);
    }
  }

  // The heads of a partial result [ROWS, kPart]: maximum, denominator, and what sums are too large by.
  __device__ __forceinline__ void leave(float* part) const {
    float* sums = block_.exchange();  // [2][4][ROWS], free after the last unit
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
    if (threadIdx.x < S::kRows) {
      const int row = threadIdx.x;
      float total = 0, weights = 0;
#pragma unroll
      for (int w = 0; w < 4; ++w) total += sums[w * S::kRows + row], weights += sums[(4 + w) * S::kRows + row];
      float* head = part + row * S::kPart;
      head[0] = total == 0 ? -INFINITY : reference(row) + (block_.call.soft_cap > 0 ? 0 : table_.shift[row]);
      head[1] = total, head[2] = weights * block_.own.value_offset * format::kLevelUnit;
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
  // Of the lane's two rows of row tile j: the denominators and the sums of rounded weights, over its own tokens.
  __device__ __forceinline__ float4 totals(int j) const {
    if constexpr (S::kTotalsInMemory) {
      return block_.totals()[j * kWarpgroup + threadIdx.x];
    } else {
      return totals_[j];
    }
  }
  __device__ __forceinline__ void set_totals(int j, const float4& x) {
    if constexpr (S::kTotalsInMemory) {
      block_.totals()[j * kWarpgroup + threadIdx.x] = x;
    } else {
      totals_[j] = x;
    }
  }
  __device__ __forceinline__ void sync() const { sync_threads(kScoresBarrier, kWarpgroup); }
  // moves: whether references may be lowered
  __device__ __forceinline__ void attend_unit(int token, const Turn& turn, bool moves) {
    wait_barrier(block_.arrived(turn.stage), turn.phase);
    const int unit = turn.stage * block_.own.unit_bytes;
    const uint32_t present = block_.present(turn.stage);
    const bool masked = token < first_all_ || token + kUnitTokens > end_all_ || present != (1u << block_.own.copies) - 1;
    const StageLayout& layout = block_.layout;
    const auto scales_of = [&](int section, float (&scale)[2]) {
      const __half* x = reinterpret_cast<const __half*>(block_.block_of(unit, block_.warp, layout.next_scales) + section);
      scale[0] = __half2float(x[block_.g]), scale[1] = __half2float(x[block_.g + 8]);
    };
    float key_scale[2], scale[2], exponent[4 * kTiles];
    scales_of(layout.key_scales, key_scale), scales_of(layout.value_scales, scale);
    split_kv::for_each<kTiles / kPieceTiles>([&](auto piece) {
      int sum[8 * kPieceTiles];
      with_key_codes<S::kDim>(block_.own.keys, [&](auto keys) { multiply<decltype(keys)>(unit, piece, sum); });
      to_exponents<piece>(sum, key_scale, exponent);
    });
    if (block_.call.soft_cap > 0) cap(exponent);
    if (masked) mask(token, present, exponent, scale);
    weigh(exponent, scale, token, turn, moves);
  }

  // ---- Products

  // Rows are multiplied 32 at a time, since more sums would not fit into registers beside the exponents.
  static constexpr int kPieceTiles = 4;

  // Sums of products of the codes of a unit with both bytes of the queries of 32 rows.
  template <class Keys>
  __device__ __forceinline__ void multiply(int unit, int piece, int (&sum)[8 * kPieceTiles]) const {
    const uint32_t queries = queries_ + piece * (kPieceTiles * 256 / 16);
    constexpr format::Record kRecord{S::kDim, 32, Keys::kBits, 4};
    constexpr int kRow = kRecord.key_row_bytes(), kPlane = kRecord.key_plane_bytes();
    const StageLayout& layout = block_.layout;
    const uint8_t* row = block_.block_of(unit, block_.warp, layout.next_keys) + block_.g * kRow;
    const uint8_t* plane = block_.block_of(unit, block_.warp, layout.next_planes) + layout.planes + block_.g * kPlane;
    const LevelTable<Keys::kTwoTables> table(Keys::kUniform ? nullptr : block_.levels<S>());
    typename Keys::Words x, y;
    typename Keys::Prepared p, q;
    Keys::load(row, plane, 0, block_.t, x);
    Keys::load(row + 8 * kRow, plane + 8 * kPlane, 0, block_.t, y);
    Keys::prepare(x, block_.t, p);
    Keys::prepare(y, block_.t, q);
    uint32_t a[Keys::kProducts][4], minus[Keys::kProducts][4];
    split_kv::for_each<Keys::kProducts>([&](auto i) { Keys::template expand<i>(p, q, table, a[i], minus[i]); });
    begin_products();
#pragma unroll
    for (int i = 0; i < Keys::kProducts; ++i) {
      add_byte_product<16 * kPieceTiles>(sum, a[i][0], a[i][1], a[i][2], a[i][3], queries + i * (S::kStepBytes / 16),
                                     i > 0);
      if constexpr (Keys::kTwoTables) {
        add_byte_product<16 * kPieceTiles>(sum, minus[i][0], minus[i][1], minus[i][2], minus[i][3],
                                       queries + i * (S::kStepBytes / 16), true);
      }
    }
    commit_products();
    wait_for_products<0>();
    receive<8 * kPieceTiles>(sum);
  }

  // Scores less the references; where scores are capped, without the references.
  template <int PIECE>
  __device__ __forceinline__ void to_exponents(const int (&sum)[8 * kPieceTiles], const float (&scale)[2],
                                               float (&exponent)[4 * kTiles]) const {
    const bool capped = block_.call.soft_cap > 0;
#pragma unroll
    for (int i = 0; i < kPieceTiles; ++i) {
      const int j = PIECE * kPieceTiles + i;
      const float2 factor = of_rows(table_.factor, j), start = of_rows(table_.start, j), at = references_of(j);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float less = capped ? 0 : h ? -at.y : -at.x;
#pragma unroll
        for (int n = 0; n < 2; ++n) {  // tokens g and g + 8
          const int k = 8 * i + 4 * h + 2 * n;
          const float dot = static_cast<float>(256 * sum[k] + sum[k + 1]);
          const float level = fmaf(dot, h ? factor.y : factor.x, h ? start.y : start.x);
          exponent[4 * j + 2 * n + h] = fmaf(level, scale[n], less);
        }
      }
    }
  }
  __device__ __forceinline__ void cap(float (&exponent)[4 * kTiles]) const {
    const float limit = block_.call.soft_cap * kLog2E, inverse = __fdividef(1.0f, limit);
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const float2 shift = of_rows(table_.shift, j), at = references_of(j);
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
      const bool finite = fabsf(scale[i]) <= 65504.0f;
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

  // Weights of a unit. moves: whether references may be lowered.
  __device__ __forceinline__ void weigh(float (&exponent)[4 * kTiles], const float (&scale)[2], int token,
                                        const Turn& turn, bool moves) {
    const int buffer = turn.buffer();
    moves |= token <= first_all_;  // a row may see its first keys
    moves = sync_any(kScoresBarrier, kWarpgroup, exceeds(exponent, scale)) || moves;
    wait_barrier(block_.summed(buffer), turn.buffer_phase() ^ 1);
    float* factors = block_.factors() + buffer * Plan::factors_of(S::kRows);
    if (moves) move_references(exponent, scale, factors);
    if (threadIdx.x == 0) factors[S::kRows] = moves ? 1.0f : 0.0f;
    store_weights(exponent, scale, buffer);
    publish_operands();
    arrive(block_.weighed(buffer));
  }

  // Whether some product of a weight and a scale is too large for the reference.
  __device__ __forceinline__ bool exceeds(const float (&exponent)[4 * kTiles], const float (&scale)[2]) const {
    const float2 log = log_of(scale);
    bool any = false;
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
      const float old = reference(row);
      most += old;
      const bool first = top(row) == kNothing;
      const float highest = fmaxf(top(row), most), wanted = fmaxf(most, highest - kDeepest);
      const bool moves = most > -INFINITY && (first || most > old + kRaise || wanted < old - kLower);
      if (most > -INFINITY) top(row) = highest;
      if (moves) reference(row) = wanted;
      factors[row] = moves && !first ? exp2_fast(old - wanted) : 1;
      moved[row] = moves ? old - wanted : 0;
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

  // Weights to their buffer.
  __device__ __forceinline__ void store_weights(const float (&exponent)[4 * kTiles], const float (&scale)[2],
                                                int buffer) {
    const int lane = block_.lane;
    uint8_t* to = block_.weights() + buffer * S::kWeightBytes +
                  ((2 * block_.warp + lane / 8 % 2) * kTiles + lane / 16) * 128 + lane % 8 * 16;
#pragma unroll
    for (int j = 0; j < kTiles; j += 2) {
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
          to_store = word_of_floats<__half>(p[0] * scale[i], p[1] * scale[i]);
          const float2 rounded = __half22float2(reinterpret_cast<const __half2&>(to_store));
          sums.z += rounded.x, sums.w += rounded.y;
        }
        set_totals(j + tile, sums);
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

  const View block_;
  const RowTable table_;
  const uint32_t queries_;    // an operand
  int first_all_, end_all_;   // keys from codes that all rows see
  float4 totals_[S::kTotalsInMemory ? 1 : kTiles];
};

}  // namespace turboquant::cuda::key_tiles
