// A warpgroup that multiplies: 64 rows, whose scores, softmax weights and sums of values are in its registers.
//
// Thread (warp, g, t) holds rows 16 warp + g and 8 more, i = 0 and 1, of the warpgroup's 64: of every eight columns of
// scores (keys) or sums (channels) columns 2 t and 2 t + 1, h = 0 and 1. Element (column block n, i, h) is number
// 4 n + 2 i + h of an array.
//
// A row's sum of weights and sums of values are relative to 2^reference: the reference is some earlier maximum of
// scores * log2(e), and is raised only when a score is kRaise above it, which is rare. Weights are float16 (or the type
// of exact values); 2^kLift keeps all of them that count among the normal numbers.
#pragma once

#include "cuda/attention/counters.cuh"
#include "cuda/attention/row_tiles/expansion.cuh"
#include "cuda/attention/row_tiles/masks.cuh"
#include "cuda/attention/row_tiles/producer.cuh"
#include "cuda/attention/row_tiles/queries.cuh"
#include "cuda/attention/row_tiles/rotation.cuh"
#include "cuda/attention/softmax_math.cuh"
#include "cuda/codec/transform.cuh"

namespace turboquant::cuda::row_tiles {

constexpr float kLift = 7, kRaise = 8;

// Named barriers (0 is __syncthreads)
constexpr int kConsumersBarrier = 1, kGroupBarrier = 2;

// T: the type of queries, results and exact keys
template <class S, typename T>
class Consumer {
 protected:
  static constexpr int kD = S::kDim, kFragments = kD / 16;
  // Whether weights, and not only maxima, stand before the wait for the values of the tile before. Where codes are
  // expanded, there are no registers for that. (ptxas moves the weights behind the wait; forcing it took as long.)
  static constexpr bool kWeightsFirst = S::kCopies;

 public:
  __device__ __forceinline__ Consumer(const Attention& a, const Plan& plan, uint8_t* shared)
      : a_(a), plan_(plan), shared_(shared), notes_(*reinterpret_cast<Notes*>(shared + plan.notes)),
        group_((threadIdx.x - S::kProducers) / kWarpgroup), lane_(threadIdx.x % 32), g_(lane_ / 4), t_(lane_ % 4),
        row_(group_ * 64 + threadIdx.x % kWarpgroup / 32 * 16 + g_), masks_{t_} {}

  __device__ __forceinline__ void run() {
    for (uint32_t n = 0;; ++n) {
      const int slot = n % kItems;
      wait_barrier(&notes_.item_full[slot], n / kItems % 2);
      item_ = &notes_.items[slot];
      if (item_->sequence < 0) return;
      attend();
      finish();
      __syncwarp();
      if (lane_ == 0) arrive(&notes_.item_empty[slot]);
    }
  }

 protected:
  // ---- An item

  __device__ __forceinline__ void begin_rows() {
#pragma unroll
    for (int i = 0; i < S::kSums; ++i) sums_[i] = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) reference_[i] = -INFINITY, total_[i] = 0;
    exponent_ = -64;
  }
  __device__ __forceinline__ void find_positions() {
#pragma unroll
    for (int i = 0; i < 2; ++i) masks_.position[i] = position_of(min(row_ + 8 * i, item_->rows - 1));
  }
  __device__ __forceinline__ void attend() {
    find_positions();
    const int begin = item_->begin, coded_end = min(item_->end, item_->coded_tiles);
    if (!S::kPrompts && begin < coded_end) {
      prepare_rotated();
      begin_rows();  // not before, because sums would take registers meanwhile
      pass<false>(begin, coded_end);
      leave_rotation();
    } else {
      begin_rows();
    }
    exponent_ = 0;
    const int exact = max(begin, item_->coded_tiles);
    if (exact < item_->end) {
      prepare_exact();
      pass<true>(exact, item_->end);
    }
  }

  // ---- Rows

  // The position of the query that row `row` of the tile stands for.
  __device__ __forceinline__ int position_of(int row) const {
    return item_->length - item_->queries + quotient(item_->block * S::kRows + row, plan_.group);
  }
  __device__ __forceinline__ bool exists(int i) const { return row_ + 8 * i < item_->rows; }
  // Token and head of row i, which exists.
  __device__ __forceinline__ void find_row(int i, int64_t& token, int& head) const {
    const int query = masks_.position[i] - (item_->length - item_->queries);
    token = item_->first_query + query;
    head = (item_->head - query) * plan_.group + item_->block * S::kRows + row_ + 8 * i;
  }

  // Its channels; null: it does not exist.
  __device__ __forceinline__ const T* query_row(int i) const {
    if (!exists(i)) return nullptr;
    int64_t token;
    int head;
    find_row(i, token, head);
    return static_cast<const T*>(a_.q) + token * a_.q_token_stride + head * a_.q_head_stride;
  }

  // ---- Channels

  // Whether octet j of a row has channels, and is not padding.
  __device__ __forceinline__ bool is_real(int j) const { return 8 * j < a_.record.head_dim; }
  // Channel c, or the last one instead of padding: so loads need no branch, and none waits for another.
  __device__ __forceinline__ int readable(int c) const { return min(c, a_.record.head_dim - 1); }

  // Those of values lie behind them.
  __device__ __forceinline__ const uint16_t* key_signs() const {
    return reinterpret_cast<const uint16_t*>(shared_ + plan_.signs);
  }
  __device__ __forceinline__ Rotation<kD> rotation() const { return {plan_.split, plan_.norm, lane_}; }

  // ---- Queries

  // Leaves queries as operands: fragments in registers, or in shared memory. word(i, j): the thread's two channels of
  // octet j of row i.
  template <typename F>
  __device__ __forceinline__ void lay_out(F&& word) {
    if constexpr (S::kQueriesInRegisters) {
#pragma unroll
      for (int j = 0; j < kD / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) query_[2 * j + i] = word(i, j);
      }
      receive<kD / 4>(query_);  // else the compiler would move them between products, which then wait for each other
    } else {
      uint8_t* to = queries();
#pragma unroll
      for (int j = 0; j < kD / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int row = row_ % 64 + 8 * i;
          *reinterpret_cast<uint32_t*>(to + j / 8 * 64 * kSwizzleRow + swizzled(row, j % 8 * 16 + 4 * t_)) = word(i, j);
        }
      }
      publish_operands();
      sync_threads(kGroupBarrier + group_, kWarpgroup);
    }
  }
  __device__ __forceinline__ void release_queries() {
    __syncwarp();
    if (lane_ == 0) arrive(&notes_.query_empty);
    queries_.advance(1);
  }
  __device__ __forceinline__ uint8_t* queries() const { return shared_ + plan_.queries + group_ * 64 * kD * 2; }

  // Rotated queries as float16, each row divided by a power of two.
  using QueryWords = uint32_t[2][kD / 8];
  __device__ __forceinline__ void prepare_rotated() {
    QueryWords words;
    rotate_queries(words);
    see_codes();
    lay_out([&](int i, int j) { return words[i][j]; });
  }
  __device__ __forceinline__ void rotate_queries(QueryWords& words) {
    const bool pairs = plan_.key_kind == ExpansionKind::kPairs;
    const int d = a_.record.head_dim;
    const format::Channels channels = a_.channels.of_head(item_->head, d);
    const Octets<kD> rows[2] = {{query_row(0), t_, d}, {query_row(1), t_, d}};
    shift_[0] = shift_[1] = 0;
    if (channels.center) {
      with_16_bit_type(a_.dtype, [&](auto type) {
        using Type = typename decltype(type)::type;
#pragma unroll
        for (int i = 0; i < 2; ++i) shift_[i] = rows[i].template times<Type>(channels.center, t_, d);
      });
#pragma unroll
      for (int i = 0; i < 2; ++i) shift_[i] = sum_of_lanes<4>(shift_[i]) * a_.softmax_scale * kLog2E;
    }
    rows[0].places(pairs, t_, words[0]), rows[1].places(pairs, t_, words[1]);
#pragma unroll
    for (int j = 0; j < kD / 8; ++j) {
      const uint32_t signs = signs_of(key_signs(), j, t_);
      words[0][j] ^= signs, words[1][j] ^= signs;
    }
    float y[kD / 2];
    if (channels.inverse) {
      with_16_bit_type(a_.dtype, [&](auto type) {
#pragma unroll
        for (int j = 0; j < kD / 8; ++j) {
          floats_of_words<typename decltype(type)::type>({words[0][j], words[1][j]}, y + 4 * j);
        }
      });
#pragma unroll
      for (int j = 0; j < kD / 8; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float by = channels.inverse[readable(channel_at(pairs, j, t_, h))];
          y[4 * j + h] *= by, y[4 * j + 2 + h] *= by;
        }
      }
      rotation().begin_floats(y);
    } else {
      with_16_bit_type(a_.dtype,
                       [&](auto type) { rotation().template begin_words<typename decltype(type)::type>(words, y); });
    }
    rotation().finish(y);
    const float scale = fabsf(a_.softmax_scale) * kLog2E * format::kLevelUnit;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float most = 1e-30f;
#pragma unroll
      for (int j = 0; j < kD / 8; ++j) {
        most = max_or_nan(most, max_or_nan(fabsf(y[4 * j + 2 * i]), fabsf(y[4 * j + 2 * i + 1])));
      }
#pragma unroll
      for (int bit = 1; bit < 4; bit *= 2) most = max_or_nan(most, __shfl_xor_sync(0xffffffff, most, bit));
      // The power of two above the largest element; NaN and infinity stay what they are.
      const int exponent = min(max((__float_as_int(most) >> 23) - 126, -100), 126);
      const float down = __int_as_float((127 - exponent) << 23) * (a_.softmax_scale < 0 ? -1.0f : 1.0f);
#pragma unroll
      for (int j = 0; j < kD / 8; ++j) {
        words[i][j] = word_of_floats<__half>(y[4 * j + 2 * i] * down, y[4 * j + 2 * i + 1] * down);
      }
      factor_[i] = fmaxf(scale * __int_as_float((127 + exponent) << 23), 1e-36f);  // times -inf is -inf
    }
  }
  // Which codes rows see.
  __device__ __forceinline__ void see_codes() {
    const Sight sight(a_, item_->sequence, item_->length, item_->queries);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      masks_.first[i] = sight.first(masks_.position[i]);
      masks_.end[i] = sight.recent(masks_.position[i]);
    }
    // All rows of the warp see all keys of these tiles.
    clear_begin_ = ceil_div(max(max_of_lanes(max(masks_.first[0], masks_.first[1])) - item_->first, 0), S::kKeys);
    clear_end_ = (-max_of_lanes(max(-masks_.end[0], -masks_.end[1])) - item_->first) / S::kKeys;
  }

  // Queries as they are.
  __device__ __forceinline__ void prepare_exact() {
    const Sight sight = [&] {
      if constexpr (S::kGathered) return Sight{a_, item_->older.tail, item_->new_begin};
      return Sight(a_, item_->sequence, item_->length, item_->queries);
    }();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      factor_[i] = fmaxf(fabsf(a_.softmax_scale) * kLog2E, 1e-30f), shift_[i] = 0;
      masks_.first[i] = a_.first_visible(masks_.position[i]);
      masks_.end[i] = max(sight.recent(masks_.position[i]), masks_.first[i]);
    }
    if constexpr (S::kCopies) {
      clear_begin_ = item_->common_begin, clear_end_ = item_->common_end;
    } else {
      const int sinks = item_->sinks, last = -max_of_lanes(max(-masks_.position[0], -masks_.position[1]));
      const int begin = max(sinks, sinks + max_of_lanes(max(masks_.end[0], masks_.end[1])) - item_->recent);
      clear_begin_ = item_->coded_tiles + ceil_div(begin, S::kKeys);
      clear_end_ = item_->coded_tiles + min(sinks + last + 1 - item_->recent, item_->exact) / S::kKeys;
    }
    lay_out_exact(a_.softmax_scale < 0 ? 0x80008000 : 0);
  }
  __device__ __forceinline__ void lay_out_exact(uint32_t sign) {
    if constexpr (S::kPrompts) {
      wait_barrier(&notes_.query_full, queries_.phase);
      uint8_t* const from = queries();
      const auto word = [&](int i, int j) -> uint32_t& {
        const int at = j / 8 * 64 * kSwizzleRow + swizzled(row_ % 64 + 8 * i, j % 8 * 16 + 4 * t_);
        return *reinterpret_cast<uint32_t*>(from + at);
      };
      if (S::kGathered && item_->older.tiles > 0 && a_.channels.center) shift_by_center(word);
      if constexpr (S::kQueriesInRegisters) {
        lay_out([&](int i, int j) { return word(i, j) ^ sign; });
        release_queries();
      } else {
        if (sign) {
          for (int j = 0; j < kD / 8; ++j) word(0, j) ^= sign, word(1, j) ^= sign;
        }
        publish_operands();
        if (sign) sync_threads(kGroupBarrier + group_, kWarpgroup);
      }
    } else {
      QueryWords words;
#pragma unroll
      for (int i = 0; i < 2; ++i) Octets<kD>(query_row(i), t_, a_.record.head_dim).channels(t_, words[i]);
      lay_out([&](int i, int j) { return words[i][j] ^ sign; });
    }
  }

  // Gathered tokens are decoded without the center: what it adds to the scores of each row.
  template <typename F>
  __device__ __forceinline__ void shift_by_center(const F& word) {
    const float* const center = a_.channels.of_head(item_->head, a_.record.head_dim).center + 2 * t_;
    float shift[2] = {};
#pragma unroll 16  // loads that wait together
    for (int j = 0; j < kD / 8; ++j) {
      const float2 c = *reinterpret_cast<const float2*>(center + 8 * j);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float q[2];
        floats_of_words<T>({word(i, j)}, q);
        shift[i] = fmaf(q[0], c.x, fmaf(q[1], c.y, shift[i]));
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) shift_[i] = sum_of_lanes<4>(shift[i]) * a_.softmax_scale * kLog2E;
  }

  // ---- The loop over tiles

  template <bool EXACT>
  __device__ __forceinline__ void wait(uint64_t (&barriers)[kMaxTileStages], const RingPlace& stage) const {
    wait_barrier(&barriers[stage.slot], stage.phase);
    // Tensor cores would not see what cp.async has copied; what the tensor memory accelerator has, they do.
    if constexpr (EXACT && !S::kPrompts) publish_operands();
  }
  __device__ __forceinline__ void release(uint64_t (&barriers)[kMaxTileStages], RingPlace& stage, int stages) const {
    __syncwarp();
    if (lane_ == 0) arrive(&barriers[stage.slot]);
    stage.advance(stages);
  }

  // EXACT: tiles of exact keys; else of codes. While softmax weights of a tile are computed, tensor cores multiply the
  // values of the tile before it.
  template <bool EXACT>
  __device__ __forceinline__ void pass(int tile, int end) {
    float scores[S::kScores];
    uint32_t weights[S::kScores / 2];
    wait<EXACT>(notes_.key_full, keys_);
    begin_products();
    multiply_keys<EXACT>(scores);
    commit_products();
    wait_for_products<0>();
    receive<S::kScores>(scores);
    weigh<EXACT>(tile, scores, false);
    pack<EXACT>(scores, weights);
#pragma unroll 1
    while (++tile < end) {
      wait<EXACT>(notes_.key_full, keys_);
      // Not between products, which must be issued without branches, and not before that wait: ptxas then says that it
      // serializes all products of the kernel of prompts (C7520).
      if constexpr (EXACT) guard_values(tile - 1);
      begin_products();
      multiply_keys<EXACT>(scores);
      commit_products();
      wait<EXACT>(notes_.value_full, values_);
      receive<S::kSums>(sums_);
      begin_products();  // once more, because sums may have moved to other registers
      multiply_values<EXACT>(weights);
      commit_products();
      wait_for_products<1>();
      receive<S::kScores>(scores);
      weigh<EXACT>(tile, scores, true);
      pack<EXACT>(scores, weights);
    }
    if constexpr (S::kPrompts && !S::kQueriesInRegisters) release_queries();
    if constexpr (EXACT) guard_values(end - 1);
    wait<EXACT>(notes_.value_full, values_);
    receive<S::kSums>(sums_);
    begin_products();
    multiply_values<EXACT>(weights);
    commit_products();
    wait_for_products<0>();
    receive<S::kSums>(sums_);
    release(notes_.value_empty, values_, plan_.value_stages);
  }

  template <bool EXACT>
  __device__ __forceinline__ void multiply_keys(float (&scores)[S::kScores]) const {
    using Type = std::conditional_t<EXACT, T, __half>;
    const uint8_t* keys = shared_ + keys_.slot * S::kTileBytes;
    const uint64_t b = swizzled_operand(keys), a = swizzled_operand(queries());
#pragma unroll
    for (int k = 0; k < kFragments; ++k) {
      const uint64_t from = b + (k / 4 * S::kKeys * kSwizzleRow + k % 4 * 32) / 16;
      if constexpr (S::kQueriesInRegisters) {
        multiply_registers<S::kKeys, Type, false>(scores, query_ + 4 * k, from, k > 0);
      } else {
        multiply_operands<S::kKeys, Type>(scores, a + (k / 4 * 64 * kSwizzleRow + k % 4 * 32) / 16, from, k > 0);
      }
    }
  }

  template <bool EXACT>
  __device__ __forceinline__ void multiply_values(const uint32_t (&weights)[S::kScores / 2]) {
    using Type = std::conditional_t<EXACT, T, __half>;
    const uint8_t* values = shared_ + (plan_.key_stages + values_.slot) * S::kTileBytes;
#pragma unroll
    for (int k = 0; k < S::kKeys / 16; ++k) {
#pragma unroll
      for (int c = 0; c < kD; c += kD - c >= 128 ? 128 : 64) {
        const auto multiply = [&](auto columns) {
          uint64_t b;
          if constexpr (EXACT) {
            b = swizzled_columns(values, S::kKeys * kSwizzleRow) +
                (c / 64 * S::kKeys * kSwizzleRow + k * 2 * kSwizzleGroup) / 16;
          } else {
            b = swizzled_operand(values) + (k / 4 * kD * kSwizzleRow + c * kSwizzleRow + k % 4 * 32) / 16;
          }
          multiply_registers<columns, Type, EXACT>(sums_ + c / 2, weights + 4 * k, b, true);
        };
        if (kD - c >= 128) {
          multiply(std::integral_constant<int, 128>{});
        } else {
          multiply(std::integral_constant<int, 64>{});
        }
      }
    }
  }

  // A weight of 0 times a value that is not finite is NaN, which would reach rows that do not see the value's key. So
  // in tiles of which some row of the block does not see all keys, such values are cleared, and the rows that do see
  // them become NaN as a whole. All warps that multiply call this for the same tiles.
  __device__ __forceinline__ void guard_values(int tile) {
    if (tile >= item_->common_begin && tile < item_->common_end) return;
    if (S::kGathered && tile >= item_->older.common_begin && tile < item_->older.common_end) return;
    wait<true>(notes_.value_full, values_);
    constexpr int kConsumers = kWarpgroup * S::kGroups, kRowWords = kSwizzleRow / 16;
    uint4* const words = reinterpret_cast<uint4*>(shared_ + (plan_.key_stages + values_.slot) * S::kTileBytes);
    const int first = threadIdx.x - S::kProducers;
    Pair sum = Pair{};
#pragma unroll
    for (int i = 0; i < S::kTileBytes / 16; i += kConsumers) add_zeros(words[first + i], sum);
    const bool broken = !is_zero(sum);
    if (broken) {
      for (int i = first; i < S::kTileBytes / 16; i += kConsumers) {
        Pair own = Pair{};
        add_zeros(words[i], own);
        if (is_zero(own)) continue;
        const int key = i / kRowWords % S::kKeys;
        atomicOr(&notes_.broken[key / 32], 1u << key % 32);
        words[i] = uint4{};
      }
      publish_operands();
    }
    if (!sync_any(kConsumersBarrier, kConsumers, broken)) return;
    for (int k = 0; k < S::kKeys; ++k) {
      if (!(notes_.broken[k / 32] >> (k % 32) & 1)) continue;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (masks_.sees_exact(*item_, i, (tile - item_->coded_tiles) * S::kKeys + k)) total_[i] = NAN;
      }
    }
    sync_threads(kConsumersBarrier, kConsumers);
    if (threadIdx.x < S::kProducers + 4) notes_.broken[threadIdx.x - S::kProducers] = 0;
    sync_threads(kConsumersBarrier, kConsumers);
  }
  // Adds 0 times each element, which is NaN where one of them is infinite or NaN.
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  static __device__ __forceinline__ void add_zeros(const uint4& w, Pair& sum) {
    for (const uint32_t word : {w.x, w.y, w.z, w.w}) {
      sum = __hfma2(reinterpret_cast<const Pair&>(word), Pair{}, sum);
    }
  }
  static __device__ __forceinline__ bool is_zero(const Pair& x) {
    return (reinterpret_cast<const uint32_t&>(x) & 0x7FFF7FFF) == 0;
  }

  // ---- Softmax

  // From scores to weights; releases the tile of keys. multiplying: the products with the values of the tile before are
  // still under way; they end here, and that tile of values is released.
  template <bool EXACT>
  __device__ __forceinline__ void weigh(int tile, float (&scores)[S::kScores], bool multiplying) {
    const TileInfo& info = notes_.info[keys_.slot];
    float factor[2] = {factor_[0], factor_[1]};
    int exponent = 0;
    bool all = tile >= clear_begin_ && tile < clear_end_;
    if constexpr (!EXACT) {
      factor[0] *= info.key_factor, factor[1] *= info.key_factor, exponent = info.value_exponent;
      all = all && !info.special;
    }
    if constexpr (S::kGathered) {
      all |= tile >= item_->older.common_begin && tile < item_->older.common_end && !info.special;
    }
    if (a_.soft_cap > 0) cap(tile, scores, factor);
    const int first = EXACT ? (tile - item_->coded_tiles) * S::kKeys : item_->first + tile * S::kKeys;
    if (!all) masks_.template apply<EXACT>(*item_, first, info, scores);
    release(notes_.key_empty, keys_, plan_.key_stages);

    float top[2];
    bool raise = exponent > exponent_;
    float most[2][2];
#pragma unroll
    for (int n = 0; n < S::kKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float pair = fmaxf(scores[4 * n + 2 * i], scores[4 * n + 2 * i + 1]);
        most[i][n % 2] = n < 2 ? pair : fmaxf(most[i][n % 2], pair);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float both = fmaxf(most[i][0], most[i][1]);
#pragma unroll
      for (int bit = 1; bit < 4; bit *= 2) both = fmaxf(both, __shfl_xor_sync(0xffffffff, both, bit));
      top[i] = fmaf(both, factor[i], shift_of(tile, i));
      raise |= top[i] > reference_[i] + kRaise;
    }
    if (!kWeightsFirst && multiplying) {
      receive<2>(top);  // keeps the compiler from computing the maxima after the products have ended
      end_products();
    }
    const bool raised = __any_sync(0xffffffff, raise);
    float by[2];
    if (raised) {
      const int higher = max(exponent, exponent_);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float old = reference_[i], now = fmaxf(old, top[i]);
        const float less = now == -INFINITY ? 1.0f : exp2_fast(old - now);
        reference_[i] = now, total_[i] *= less;
        by[i] = less * exp2_fast(static_cast<float>(exponent_ - higher));
        if constexpr (!kWeightsFirst) rescale(i, by[i]);
      }
      exponent_ = higher;
    }
    const float down = static_cast<float>(exponent - exponent_), up = exp2_fast(-down);
    float add[2], sum[2][2] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      add[i] = shift_of(tile, i) - (reference_[i] == -INFINITY ? 0.0f : reference_[i]) + kLift + down;
    }
#pragma unroll
    for (int n = 0; n < S::kKeys / 8; ++n) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        float& x = scores[4 * n + k];
        x = exp2_fast(fmaf(x, factor[k / 2], add[k / 2]));
        sum[k / 2][k % 2] += x;
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) total_[i] = fmaf(sum[i][0] + sum[i][1], up, total_[i]);
    if constexpr (kWeightsFirst) {
      if (multiplying) {
        receive<S::kScores>(scores);  // in the PTX the weights are computed by now
        end_products();
      }
      if (raised) rescale(0, by[0]), rescale(1, by[1]);
    }
  }
  // Ends the products with the values of a tile, and releases it.
  __device__ __forceinline__ void end_products() {
    wait_for_products<0>();
    receive<S::kSums>(sums_);
    release(notes_.value_empty, values_, plan_.value_stages);
  }
  __device__ __forceinline__ void rescale(int i, float by) {
#pragma unroll
    for (int k = 0; k < kD / 8; ++k) sums_[4 * k + 2 * i] *= by, sums_[4 * k + 2 * i + 1] *= by;
  }
  // Capped scores have the shift in them already.
  __device__ __forceinline__ float shift_of(int tile, int i) const {
    return a_.soft_cap > 0 ? 0.0f : shift_before_cap(tile, i);
  }
  __device__ __forceinline__ float shift_before_cap(int tile, int i) const {
    return S::kGathered && tile >= item_->older.tiles ? 0.0f : shift_[i];
  }

  __device__ __forceinline__ void cap(int tile, float (&scores)[S::kScores], float (&factor)[2]) const {
    const float limit = a_.soft_cap * kLog2E, inverse = __fdividef(1.0f, limit);
#pragma unroll
    for (int n = 0; n < S::kKeys / 8; ++n) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        float& x = scores[4 * n + k];
        x = limit * tanh_fast(fmaf(x, factor[k / 2], shift_before_cap(tile, k / 2)) * inverse);
      }
    }
    factor[0] = factor[1] = 1;
  }

  template <bool EXACT>
  __device__ __forceinline__ void pack(const float (&scores)[S::kScores], uint32_t (&weights)[S::kScores / 2]) const {
    using Type = std::conditional_t<EXACT, T, __half>;
#pragma unroll
    for (int i = 0; i < S::kScores / 2; ++i) weights[i] = word_of_floats<Type>(scores[2 * i], scores[2 * i + 1]);
  }

  // Sums over codes become sums of values: rotated back, and without the exponent of their tiles.
  __device__ __forceinline__ void leave_rotation() {
    const float scale = format::kLevelUnit * exp2_fast(static_cast<float>(exponent_));
    rotation().begin_floats(sums_), rotation().finish(sums_);
#pragma unroll
    for (int j = 0; j < kD / 8; ++j) {
      const uint32_t signs = signs_of(key_signs() + kD, j, t_);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = sums_[4 * j + i];
        x = change_sign(x * scale, i % 2 == 0 ? signs << 16 : signs & 0x80000000);
      }
    }
  }

  // ---- The end of an item

  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int i = 0; i < 2; ++i) total_[i] = sum_of_lanes<4>(total_[i]);
    if constexpr (!S::kCopies) {
      if (item_->parts > 1 && !join_parts()) return;
    }
    write_results();
  }

  __device__ __forceinline__ float* part(int p) const {
    return plan_.parts + int64_t{item_->slot + p} * S::kPartFloats + (threadIdx.x - S::kProducers);
  }
  // Leaves this part's result; the last block to do so joins all of them, in the order of the parts.
  __device__ __forceinline__ bool join_parts() {
    constexpr int kNext = kWarpgroup * S::kGroups;
    float* mine = part(item_->part);
#pragma unroll
    for (int i = 0; i < 2; ++i) __stcg(mine + i * kNext, reference_[i]), __stcg(mine + (2 + i) * kNext, total_[i]);
#pragma unroll
    for (int i = 0; i < S::kSums; ++i) __stcg(mine + (4 + i) * kNext, sums_[i]);
    __threadfence();
    sync_threads(kConsumersBarrier, kNext);
    if (threadIdx.x == S::kProducers) notes_.last = count_arrival(plan_.counters + item_->slot, item_->parts);
    sync_threads(kConsumersBarrier, kNext);
    if (!notes_.last) return false;
    reference_[0] = reference_[1] = -INFINITY, total_[0] = total_[1] = 0;
#pragma unroll
    for (int i = 0; i < S::kSums; ++i) sums_[i] = 0;
#pragma unroll 1
    for (int p = 0; p < item_->parts; ++p) {
      const float* from = part(p);
      float old[2], add[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float other = __ldcg(from + i * kNext), now = fmaxf(reference_[i], other);
        old[i] = weight_of(reference_[i], now), add[i] = weight_of(other, now);
        total_[i] = total_[i] * old[i] + __ldcg(from + (2 + i) * kNext) * add[i], reference_[i] = now;
      }
#pragma unroll
      for (int i = 0; i < S::kSums; ++i) {
        sums_[i] = sums_[i] * old[i / 2 % 2] + __ldcg(from + (4 + i) * kNext) * add[i / 2 % 2];
      }
    }
    return true;
  }

  // Without branches but around stores: this is a chain of short steps, for which all warps wait.
  __device__ __forceinline__ void write_results() const {
    const bool wide = reinterpret_cast<uintptr_t>(a_.out) % 16 == 0;
    T* out[2];
    float inverse[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int64_t token = 0;
      int head = 0;
      if (exists(i)) find_row(i, token, head);
      const float unlift = exp2_fast(-kLift);
      float m = reference_[i], total = total_[i] * unlift;
      const float by = a_.sink_logits ? add_sink(a_.sink_logits[head], m, total) : 1;
      const int64_t to = token * a_.q_heads + head;
      out[i] = static_cast<T*>(a_.out) + to * a_.record.head_dim;
      inverse[i] = total == 0 ? 0 : __fdividef(by * unlift, total);
      if (t_ == 0 && exists(i)) {
        a_.lse[to] = total == 0 ? -INFINITY : by == 0 ? a_.sink_logits[head] : (m + __log2f(total)) * kLn2;
      }
    }
#pragma unroll
    for (int j = 0; j < kD / 8; j += 4) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t w[4];  // of four octets
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const float* const x = sums_ + 4 * (j + k) + 2 * i;
          w[k] = word_of_floats<T>(x[0] * inverse[i], x[1] * inverse[i]);
        }
        transpose_quad(w, t_);
        T* const to = out[i] + 8 * (j + t_);
        if (exists(i) && is_real(j + t_)) {
          if (wide) {
            *reinterpret_cast<uint4*>(to) = make_uint4(w[0], w[1], w[2], w[3]);
          } else {
#pragma unroll
            for (int k = 0; k < 4; ++k) reinterpret_cast<uint32_t*>(to)[k] = w[k];
          }
        }
      }
    }
  }

  const Attention& a_;
  const Plan& plan_;
  uint8_t* const shared_;
  Notes& notes_;
  const int group_, lane_, g_, t_;
  const int row_;  // the thread's first row of the block's tile of rows

  const Item* item_;
  RingPlace keys_, values_;  // the tiles that are multiplied next
  RingPlace queries_;        // of prompts, a ring of one
  float sums_[S::kSums];
  float reference_[2], total_[2];  // of rows i = 0, 1; `total_` is of the thread's own keys
  float factor_[2], shift_[2];     // score * log2(e) = factor * product + shift
  RowMasks<S> masks_;              // what rows i = 0, 1 see
  int clear_begin_, clear_end_;    // all rows of the warp see all keys of these tiles
  int exponent_;                   // sums over codes are divided by 2^exponent_
  uint32_t query_[S::kQueriesInRegisters ? kD / 4 : 1];
};

}  // namespace turboquant::cuda::row_tiles
