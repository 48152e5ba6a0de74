// A warpgroup that multiplies: 64 rows, whose scores, softmax weights and sums of values are in its registers.
//
// Thread (warp, g, t) holds rows 16 warp + g and 8 more, i = 0 and 1, of the warpgroup's 64: of every eight columns of
// scores (keys) or sums (channels) columns 2 t and 2 t + 1, h = 0 and 1. Element (column block n, i, h) is number
// 4 n + 2 i + h of an array.
//
// A row's sum of weights and sums of values are relative to 2^reference: the reference is some earlier maximum, and is
// raised only when a score is 2^8 above it, which is rare. Weights are float16 (or the type of exact values); 2^kLift
// keeps all of them that count among the normal numbers.
#pragma once

#include <bit>

#include "cuda/attention/row_tiles/expansion.cuh"
#include "cuda/attention/row_tiles/producer.cuh"
#include "cuda/attention/softmax_math.cuh"
#include "cuda/codec/transform.cuh"

namespace turboquant::cuda::row_tiles {

constexpr float kLift = 7, kRaise = 8;

// Named barriers (0 is __syncthreads)
constexpr int kConsumersBarrier = 1, kGroupBarrier = 2;
__device__ __forceinline__ void sync_threads(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Counts the arrival of a block; true: it was the last of `count` blocks, and the counter is 0 again.
__device__ __forceinline__ bool arrives_last(uint32_t* counter, int count) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(count - 1) : "memory");
  return before == static_cast<uint32_t>(count - 1);
}

// T: the type of queries, results and exact keys
template <class S, typename T>
class Consumer {
  using Places = SharedLayout<S>;
  static constexpr int kD = S::kDim, kFragments = kD / 16;
  static constexpr format::Split kSplit = format::split_dim(kD);
  static constexpr int kLog = std::countr_zero(static_cast<unsigned>(kSplit.block));
  using Rotation = HadamardTraits<kSplit.blocks, kLog, 4, 2>;  // a thread's part of a row: channels 8 j + 2 t + h

 public:
  __device__ __forceinline__ Consumer(const Attention& a, const Plan& plan, uint8_t* shared)
      : a_(a), plan_(plan), shared_(shared), notes_(*reinterpret_cast<Notes*>(shared + Places::kNotes)),
        group_(threadIdx.x / kWarpgroup - 1), lane_(threadIdx.x % 32), g_(lane_ / 4), t_(lane_ % 4),
        row_(group_ * 64 + threadIdx.x % kWarpgroup / 32 * 16 + g_) {}

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

 private:
  // ---- An item

  __device__ __forceinline__ void attend() {
#pragma unroll
    for (int i = 0; i < S::kSums; ++i) sums_[i] = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) reference_[i] = -INFINITY, total_[i] = 0;
    exponent_ = -64;
    const int coded_end = min(item_->end, item_->coded_tiles), begin = item_->begin;
    if (begin < coded_end) {
      prepare_rotated();
      pass<false>(begin, coded_end);
      leave_rotation();
    }
    exponent_ = 0;
    const int exact = max(begin, item_->coded_tiles);
    if (exact < item_->end) {
      prepare_exact();
      pass<true>(exact, item_->end);
    }
  }

  // ---- Rows

  __device__ __forceinline__ int position(int i) const {  // of row i of this thread; rows that do not exist: the last one
    const int row = min(row_ + 8 * i, item_->rows - 1) + item_->block * S::kRows;
    return item_->length - item_->queries + static_cast<int>(static_cast<unsigned>(row) / a_.group);
  }
  __device__ __forceinline__ int row_of_head(int i) const { return item_->block * S::kRows + row_ + 8 * i; }
  __device__ __forceinline__ bool exists(int i) const { return row_ + 8 * i < item_->rows; }
  // Token and head of row i.
  __device__ __forceinline__ void find_row(int i, int64_t& token, int& head) const {
    const int row = row_of_head(i), query = static_cast<int>(static_cast<unsigned>(row) / a_.group);
    token = item_->first_query + query, head = item_->head * a_.group + row - query * a_.group;
  }

  // ---- Queries

  // Leaves queries as operands: fragments in registers, or in shared memory. word(i, j): channels of octet j of row i.
  template <typename F>
  __device__ __forceinline__ void lay_out(F&& word) {
    if constexpr (S::kQueriesInRegisters) {
#pragma unroll
      for (int j = 0; j < kD / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) query_[2 * j + i] = word(i, j);
      }
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
  __device__ __forceinline__ uint8_t* queries() const { return shared_ + Places::kQueries + group_ * 64 * kD * 2; }

  // Rotated queries as float16, each row divided by a power of two.
  __device__ __forceinline__ void prepare_rotated() {
    const bool pairs = plan_.key_kind == kPairs;
    uint32_t words[2][kD / 8];
    const Sight sight(a_, item_->sequence, item_->length, item_->queries);
    const format::Channels channels = a_.channels.of_head(item_->head, kD);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float y[kD / 4], shift = 0, most = 1e-30f;
      int64_t token;
      int head;
      find_row(i, token, head);
      const T* q = static_cast<const T*>(a_.q) + token * a_.q_token_stride + head * a_.q_head_stride;
      const bool real = exists(i);
#pragma unroll
      for (int j = 0; j < kD / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int c = channel_at(pairs, j, t_, e);
          y[2 * j + e] = real ? static_cast<float>(q[c]) : 0.0f;
        }
      }
      if (channels.center) {
#pragma unroll
        for (int j = 0; j < kD / 4; ++j) shift = fmaf(y[j], channels.center[channel_at(pairs, j / 2, t_, j % 2)], shift);
        shift += __shfl_xor_sync(0xffffffff, shift, 1), shift += __shfl_xor_sync(0xffffffff, shift, 2);
      }
#pragma unroll
      for (int j = 0; j < kD / 4; ++j) {
        const int c = channel_at(pairs, j / 2, t_, j % 2);
        y[j] *= a_.key_signs[c] * (channels.inverse ? channels.inverse[c] : 1.0f);
      }
      transform<Rotation>(y, t_);
#pragma unroll
      for (int j = 0; j < kD / 4; ++j) most = max_or_nan(most, fabsf(y[j]));
#pragma unroll
      for (int bit = 1; bit < 4; bit *= 2) most = max_or_nan(most, __shfl_xor_sync(0xffffffff, most, bit));
      // A power of two that is larger than half of the largest element; NaN and infinity stay what they are.
      const int exponent = min(max((__float_as_int(most) >> 23) - 126, -100), 126);
      const float down = __int_as_float((127 - exponent) << 23) * (a_.softmax_scale < 0 ? -1.0f : 1.0f);
#pragma unroll
      for (int j = 0; j < kD / 8; ++j) words[i][j] = word_of_floats<__half>(y[2 * j] * down, y[2 * j + 1] * down);
      const float scale = fmaxf(fabsf(a_.softmax_scale) * kLog2E, 1e-30f);
      factor_[i] = scale * format::kLevelUnit * __int_as_float((127 + exponent) << 23);
      shift_[i] = shift * a_.softmax_scale * kLog2E;
      first_[i] = sight.first(position(i)), end_[i] = sight.recent(position(i));
    }
    lay_out([&](int i, int j) { return words[i][j]; });
  }

  // Queries as they are.
  __device__ __forceinline__ void prepare_exact() {
    const Sight sight(a_, item_->sequence, item_->length, item_->queries);
    const T* q[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int64_t token;
      int head;
      find_row(i, token, head);
      q[i] = exists(i) ? static_cast<const T*>(a_.q) + token * a_.q_token_stride + head * a_.q_head_stride : nullptr;
      factor_[i] = fmaxf(fabsf(a_.softmax_scale) * kLog2E, 1e-30f), shift_[i] = 0;
      // Exact keys that are seen: below first_ if they are sinks, and from end_ on.
      first_[i] = a_.first_visible(position(i)), end_[i] = max(sight.recent(position(i)), first_[i]);
    }
    const uint32_t sign = a_.softmax_scale < 0 ? 0x80008000 : 0;
    lay_out([&](int i, int j) {
      return q[i] ? *reinterpret_cast<const uint32_t*>(q[i] + 8 * j + 2 * t_) ^ sign : 0u;
    });
  }

  // ---- The loop over tiles

  __device__ __forceinline__ int stage(uint32_t n) const { return n % kTileStages; }
  template <bool EXACT>
  __device__ __forceinline__ void wait(uint64_t (&barriers)[kTileStages], uint32_t n) const {
    wait_barrier(&barriers[stage(n)], n / kTileStages % 2);
    if constexpr (EXACT) publish_operands();  // exact keys were copied by instructions that tensor cores do not see otherwise
  }
  __device__ __forceinline__ void release(uint64_t (&barriers)[kTileStages], uint32_t n) const {
    __syncwarp();
    if (lane_ == 0) arrive(&barriers[stage(n)]);
  }

  // EXACT: tiles of exact keys; else of codes. While softmax weights of a tile are computed, tensor cores multiply the
  // values of the tile before it.
  template <bool EXACT>
  __device__ __forceinline__ void pass(int tile, int end) {
    float scores[S::kScores];
    uint32_t weights[S::kScores / 2];
    float by[2];
    wait<EXACT>(notes_.key_full, tiles_);
    begin_products();
    multiply_keys<EXACT>(scores, tiles_);
    commit_products();
    wait_for_products<0>();
    receive<S::kScores>(scores);
    if (weigh<EXACT>(tile, scores, by)) rescale(by);
    pack<EXACT>(scores, weights);
#pragma unroll 1
    while (++tile < end) {
      wait<EXACT>(notes_.key_full, tiles_ + 1);
      begin_products();
      multiply_keys<EXACT>(scores, tiles_ + 1);
      commit_products();
      wait<EXACT>(notes_.value_full, tiles_);
      multiply_values<EXACT>(weights, tiles_);
      commit_products();
      wait_for_products<1>();
      receive<S::kScores>(scores);
      ++tiles_;
      const bool raised = weigh<EXACT>(tile, scores, by);
      wait_for_products<0>();
      receive<S::kSums>(sums_);
      release(notes_.value_empty, tiles_ - 1);
      if (raised) rescale(by);
      pack<EXACT>(scores, weights);
    }
    wait<EXACT>(notes_.value_full, tiles_);
    begin_products();
    multiply_values<EXACT>(weights, tiles_);
    commit_products();
    wait_for_products<0>();
    receive<S::kSums>(sums_);
    release(notes_.value_empty, tiles_);
    ++tiles_;
  }

  template <bool EXACT>
  __device__ __forceinline__ void multiply_keys(float (&scores)[S::kScores], uint32_t n) const {
    using Type = std::conditional_t<EXACT, T, __half>;
    const uint8_t* keys = shared_ + Places::kKeys + stage(n) * S::kTileBytes;
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
  __device__ __forceinline__ void multiply_values(const uint32_t (&weights)[S::kScores / 2], uint32_t n) {
    using Type = std::conditional_t<EXACT, T, __half>;
    const uint8_t* values = shared_ + Places::kValues + stage(n) * S::kTileBytes;
#pragma unroll
    for (int k = 0; k < S::kKeys / 16; ++k) {
#pragma unroll
      for (int c = 0; c < kD; c += kD - c >= 128 ? 128 : 64) {
        const auto multiply = [&](auto columns) {
          uint64_t b;
          if constexpr (EXACT) {
            b = swizzled_columns(values, S::kKeys * kSwizzleRow) + (c / 64 * S::kKeys * kSwizzleRow + k * 2 * kSwizzleGroup) / 16;
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

  // ---- Softmax

  // From scores to weights; releases the tile of keys. by: what all earlier sums are to be multiplied by, if true.
  template <bool EXACT>
  __device__ __forceinline__ bool weigh(int tile, float (&scores)[S::kScores], float (&by)[2]) {
    const TileInfo& info = notes_.info[stage(tiles_)];
    float factor[2] = {factor_[0], factor_[1]};
    int exponent = 0;
    bool poisoned = false, absent = false;
    if constexpr (!EXACT) {
      factor[0] *= info.key_factor, factor[1] *= info.key_factor, exponent = info.value_exponent;
#pragma unroll
      for (int i = 0; i < S::kKeys / 32; ++i) poisoned |= info.poison[i] != 0, absent |= info.absent[i] != 0;
    }
    const int first = EXACT ? (tile - item_->coded_tiles) * S::kKeys : item_->first + tile * S::kKeys;
    bool all = true;
    if constexpr (EXACT) {
      const int low = item_->exact_key(first), high = item_->exact_key(first + S::kKeys - 1);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        all &= first >= item_->sinks && low >= end_[i] && high <= position(i);
      }
      all &= first + S::kKeys <= item_->exact;
    } else {
      all = !poisoned && !absent;
#pragma unroll
      for (int i = 0; i < 2; ++i) all &= first >= first_[i] && first + S::kKeys <= end_[i];
    }
    if (a_.soft_cap > 0) cap(scores, factor);
    if (!__all_sync(0xffffffff, all)) mask<EXACT>(first, info, scores);
    release(notes_.key_empty, tiles_);

    float top[2];
    bool raise = exponent > exponent_;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float most = fmaxf(scores[2 * i], scores[2 * i + 1]);
#pragma unroll
      for (int n = 1; n < S::kKeys / 8; ++n) most = fmaxf(most, fmaxf(scores[4 * n + 2 * i], scores[4 * n + 2 * i + 1]));
#pragma unroll
      for (int bit = 1; bit < 4; bit *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, bit));
      top[i] = fmaf(most, factor[i], shift_of(i));
      raise |= top[i] > reference_[i] + kRaise;
    }
    raise = __any_sync(0xffffffff, raise);
    if (raise) {
      const int higher = max(exponent, exponent_);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float old = reference_[i], now = fmaxf(old, top[i]);
        const float less = now == -INFINITY ? 1.0f : exp2_fast(old - now);
        reference_[i] = now, total_[i] *= less;
        by[i] = less * exp2_fast(static_cast<float>(exponent_ - higher));
      }
      exponent_ = higher;
    }
    const float down = static_cast<float>(exponent - exponent_), up = exp2_fast(-down);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float add = shift_of(i) - (reference_[i] == -INFINITY ? 0.0f : reference_[i]) + kLift + down;
      float sum[2] = {0, 0};
#pragma unroll
      for (int n = 0; n < S::kKeys / 8; ++n) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float& x = scores[4 * n + 2 * i + h];
          x = exp2_fast(fmaf(x, factor[i], add));
          sum[h] += x;
        }
      }
      total_[i] = EXACT ? total_[i] + (sum[0] + sum[1]) : fmaf(sum[0] + sum[1], up, total_[i]);
    }
    return raise;
  }
  // Capped scores already are powers of two.
  __device__ __forceinline__ float shift_of(int i) const { return a_.soft_cap > 0 ? 0.0f : shift_[i]; }

  __device__ __forceinline__ void cap(float (&scores)[S::kScores], float (&factor)[2]) const {
    const float limit = a_.soft_cap * kLog2E, inverse = __fdividef(1.0f, limit);
#pragma unroll
    for (int n = 0; n < S::kKeys / 8; ++n) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        float& x = scores[4 * n + k];
        x = limit * tanh_fast(fmaf(x, factor[k / 2], shift_[k / 2]) * inverse);
      }
    }
    factor[0] = factor[1] = 1;
  }

  // Excludes the keys that a row does not see. A row that sees a key whose scale is not a number becomes NaN.
  template <bool EXACT>
  __device__ __forceinline__ void mask(int first, const TileInfo& info, float (&scores)[S::kScores]) const {
    int last[2] = {position(0), position(1)};
#pragma unroll
    for (int n = 0; n < S::kKeys / 8; ++n) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int i = k / 2, h = k % 2;
        float& x = scores[4 * n + k];
        if constexpr (EXACT) {
          const int number = first + 8 * n + 2 * t_ + h, key = item_->exact_key(number);
          const bool seen = number < item_->exact && key <= last[i] && key >= first_[i] && (number < item_->sinks || key >= end_[i]);
          x = seen ? x : -INFINITY;
        } else {
          const int place = 8 * n + 2 * t_ + h, key = first + n / 4 * 32 + token_at(8 * (n % 4) + 2 * t_ + h);
          const bool seen = key >= first_[i] && key < end_[i] && !(info.absent[n / 4] >> (place % 32) & 1);
          if (info.poison[n / 4] >> (place % 32) & 1) x = NAN;
          x = seen ? x : -INFINITY;
        }
      }
    }
  }

  __device__ __forceinline__ void rescale(const float (&by)[2]) {
#pragma unroll
    for (int i = 0; i < S::kSums; ++i) sums_[i] *= by[i / 2 % 2];
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
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float y[kD / 4];
#pragma unroll
      for (int j = 0; j < kD / 4; ++j) y[j] = sums_[j / 2 * 4 + 2 * i + j % 2];
      transform<Rotation>(y, t_);
#pragma unroll
      for (int j = 0; j < kD / 4; ++j) {
        sums_[j / 2 * 4 + 2 * i + j % 2] = y[j] * (a_.value_signs[8 * (j / 2) + 2 * t_ + j % 2] * scale);
      }
    }
  }

  // ---- The end of an item

  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int bit = 1; bit < 4; bit *= 2) total_[i] += __shfl_xor_sync(0xffffffff, total_[i], bit);
    }
    if (item_->parts > 1 && !join_parts()) return;
    write_results();
  }

  __device__ __forceinline__ float* part(int p) const {
    return plan_.parts + int64_t{item_->slot + p} * S::kPartFloats + (threadIdx.x - kWarpgroup);
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
    if (threadIdx.x == kWarpgroup) notes_.last = arrives_last(plan_.counters + item_->slot, item_->parts);
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
        old[i] = reference_[i] == -INFINITY ? 0.0f : exp2_fast(reference_[i] - now);
        add[i] = other == -INFINITY ? 0.0f : exp2_fast(other - now);
        total_[i] = total_[i] * old[i] + __ldcg(from + (2 + i) * kNext) * add[i], reference_[i] = now;
      }
#pragma unroll
      for (int i = 0; i < S::kSums; ++i) {
        sums_[i] = sums_[i] * old[i / 2 % 2] + __ldcg(from + (4 + i) * kNext) * add[i / 2 % 2];
      }
    }
    return true;
  }

  __device__ __forceinline__ void write_results() const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!exists(i)) continue;
      int64_t token;
      int head;
      find_row(i, token, head);
      const float unlift = exp2_fast(-kLift);
      float by = unlift, m = reference_[i], total = total_[i] * unlift;
      bool only_sink = false;
      if (a_.sink_logits) {  // one more score, without a value
        const float sink = a_.sink_logits[head] * kLog2E, top = fmaxf(m, sink);
        if (top > -INFINITY) {
          const float less = m == -INFINITY ? 0.0f : exp2_fast(m - top);
          total = total * less + exp2_fast(sink - top), m = top, by *= less, only_sink = less == 0;
        }
      }
      const int64_t to = token * a_.q_heads + head;
      const float inverse = total == 0 ? 0 : by / total;
      T* out = static_cast<T*>(a_.out) + to * kD + 2 * t_;
#pragma unroll
      for (int j = 0; j < kD / 8; ++j) {
        *reinterpret_cast<uint32_t*>(out + 8 * j) =
            word_of_floats<T>(sums_[4 * j + 2 * i] * inverse, sums_[4 * j + 2 * i + 1] * inverse);
      }
      if (t_ == 0 && a_.lse) {
        a_.lse[to] = total == 0 ? -INFINITY : only_sink ? a_.sink_logits[head] : (m + log2f(total)) * kLn2;
      }
    }
  }

  static __device__ __forceinline__ float max_or_nan(float x, float y) {
    float out;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(x), "f"(y));
    return out;
  }

  const Attention& a_;
  const Plan& plan_;
  uint8_t* const shared_;
  Notes& notes_;
  const int group_, lane_, g_, t_;
  const int row_;  // the thread's first row of the block's tile of rows

  const Item* item_;
  uint32_t tiles_ = 0;  // tiles multiplied so far
  float sums_[S::kSums];
  float reference_[2], total_[2];     // of rows i = 0, 1; `total_` is of the thread's own keys
  float factor_[2], shift_[2];        // score * log2(e) = factor * product + shift
  int first_[2], end_[2];             // the row sees keys [first_, end_) of codes; see prepare_exact for the others
  int exponent_;                      // sums over codes are divided by 2^exponent_
  uint32_t query_[S::kQueriesInRegisters ? kD / 4 : 1];
};

}  // namespace turboquant::cuda::row_tiles
