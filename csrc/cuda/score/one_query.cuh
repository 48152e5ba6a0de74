// The kernel of scores for one query of 128 channels, which knows most sizes when it is compiled (choices/score.h).
#pragma once

#include "cuda/score/queries.cuh"

namespace turboquant::cuda::scores {

// A lane's part of 32 keys: parts of keys g, g + 8, g + 16 and g + 24, and the constants of key g + 8 t, whose score
// it writes.
template <int BITS, bool SKETCH>
struct OneQueryPart {
  uint32_t code[4][BITS ? BITS : 1], bit[4];
  __half scale;
  float norm;
};

// Their addresses.
template <int BITS, bool SKETCH>
struct OneQueryKeys {
  static constexpr int kRow = BITS * kOneQueryDim / 8, kSketchRow = kOneQueryDim / 8;  // bytes
  const uint8_t *codes, *bits;
  const __half* scale;
  const float* norm;

  __device__ __forceinline__ OneQueryKeys(const ScoreArguments& a, int64_t row, int g, int t)
      : codes(a.packed + (row + g) * kRow + t * (4 * BITS)), bits(a.sign_bits + (row + g) * kSketchRow + t * 4),
        scale(a.scale + row + 8 * t + g), norm(a.norm + row + 8 * t + g) {}

  __device__ __forceinline__ void advance(int keys) {
    codes += int64_t{keys} * kRow, bits += int64_t{keys} * kSketchRow, scale += keys, norm += keys;
  }
  __device__ __forceinline__ void load(OneQueryPart<BITS, SKETCH>& part) const {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      if constexpr (BITS > 0) load_aligned_words<BITS>(codes, 8 * r * kRow, part.code[r]);
      if constexpr (SKETCH) load_aligned_words<1>(bits, 8 * r * kSketchRow, part.bit + r);
    }
    if constexpr (BITS > 0) part.scale = __ldg(scale);
    if constexpr (SKETCH) part.norm = __ldg(norm);
  }
};

// Keeps the compiler from computing x again in every iteration.
template <typename T>
__device__ __forceinline__ void keep(T& x) {
  if constexpr (std::is_same_v<T, float>) {
    asm volatile("" : "+f"(x));
  } else {
    asm volatile("" : "+r"(x));
  }
}

// The sum of key g + 8 t of 32. Lanes with even t hold the lower two bytes of a coordinate, odd ones the upper two;
// lane t + 2 holds the same sums as lane t, so that each of the two converts half of them. weight: the value of 1 in
// this lane's bytes
__device__ __forceinline__ float sum_of_key(const int (&sums)[2][4], int times, int less, int t, float weight) {
  int both[4];  // bytes, of keys g + 8 r
#pragma unroll
  for (int r = 0; r < 4; ++r) both[r] = times * (sums[r / 2][r % 2 * 2 + 1] * 256 + sums[r / 2][r % 2 * 2]) - less;
  const int even = t < 2 ? both[0] : both[2], odd = t < 2 ? both[1] : both[3];
  const float mine = static_cast<float>(t % 2 ? odd : even) * weight;
  const float theirs = static_cast<float>(t % 2 ? even : odd) * weight;
  return mine + __shfl_xor_sync(0xffffffff, theirs, 1);
}

// What a block's warps share of its query: [0] for codes, [1] for sketches.
struct OneQueryShared {
  alignas(16) float work[2][kOneQueryDim];
  alignas(16) uint32_t columns[2][kOneQueryDim];
  float units[2], totals[2];
  alignas(16) int8_t table[32];
};

// Four channels of the query in a lane of the warp that prepares it for codes, or of the one that does so for sketches.
// They are loaded first and used later, so that loads of keys are issued in between.
struct QueryLane {
  using Traits = HadamardTraits<1, 7, 32, 4>;
  uint4 words{};
  float factor[4], mean[4] = {}, inverse[4] = {1, 1, 1, 1};

  __device__ __forceinline__ void load(const ScoreArguments& a, int64_t batch, bool sketched, int lane) {
    const bool full = a.q_dtype == Dtype::kFloat32;
    const uint8_t* q = static_cast<const uint8_t*>(a.q) + (a.q_rows(batch) + 4 * lane) * (full ? 4 : 2);
    if (full) {
      words = __ldg(reinterpret_cast<const uint4*>(q));
    } else {
      const uint2 half = __ldg(reinterpret_cast<const uint2*>(q));
      words.x = half.x, words.y = half.y;
    }
    cuda::load<Traits>(sketched ? a.projection : a.signs, lane, factor);
    if (!sketched && a.channels.center) cuda::load<Traits>(a.channels.center, lane, mean);
    if (!sketched && a.channels.inverse) cuda::load<Traits>(a.channels.inverse, lane, inverse);
  }

  // Writes the column, its unit and the total that scores need. All lanes of the warp take part.
  template <int BITS, bool UNIFORM>
  __device__ __forceinline__ void prepare(const ScoreArguments& a, bool sketched, int lane,
                                          OneQueryShared& shared) const {
    float x[4];
    const uint32_t word[4] = {words.x, words.y, words.z, words.w}, half[2] = {words.x, words.y};
    if (a.q_dtype == Dtype::kFloat32) {
      floats_of_words<float>(word, x);
    } else if (a.q_dtype == Dtype::kFloat16) {
      floats_of_words<__half>(half, x);
    } else {
      floats_of_words<__nv_bfloat16>(half, x);
    }
    float total = 0, *y = shared.work[sketched];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      total = __fmaf_rn(x[i], mean[i], total);
      x[i] = __fmul_rn(x[i], __fmul_rn(factor[i], inverse[i]));
    }
    transform<Traits>(x, lane);
    *reinterpret_cast<float4*>(y + 4 * lane) = make_float4(x[0], x[1], x[2], x[3]);
    uint32_t amax = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) amax = max(amax, magnitude_bits(x[i]));
    amax = max_of_lanes(amax);
    __syncwarp();
    make_column(y, kOneQueryDim, power_of_two(-coordinate_exponent(amax)), sketched ? 0 : BITS, UNIFORM, 0, lane / 8,
                lane % 8, 0, 1, shared.columns[sketched]);
    if (sketched || a.channels.center) {  // else the total is 0
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (sketched) total += y[lane + 32 * i];
      }
#pragma unroll
      for (int bit = 1; bit < 32; bit *= 2) total += __shfl_xor_sync(0xffffffff, total, bit);
    }
    if (lane == 0) shared.units[sketched] = unit_of(amax), shared.totals[sketched] = total;
  }
};

// The part of 32 scores that codes give. start: added to every sum at its start; less: subtracted from it at its end.
template <class Codes, int BITS, bool SKETCH>
__device__ __forceinline__ float sum_of_codes(const OneQueryPart<BITS, SKETCH>& now, const Codes& expansion,
                                              const uint2 (&column)[4], const int (&start)[4], int less, int t,
                                              float weight) {
  int sums[2][4];
#pragma unroll
  for (int k = 0; k < 8; ++k) sums[k / 4][k % 4] = start[k % 4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t p[4][2], n[4][2];
#pragma unroll
    for (int r = 0; r < 4; ++r) expansion.levels(now.code[r], i, p[r], n[r]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      add_levels<Codes::kUnsigned>(sums[h], p, h, column[i]);
      if constexpr (Codes::kSigned && Codes::kTimes == 1) add_levels<false>(sums[h], n, h, column[i]);
    }
  }
  return sum_of_key(sums, Codes::kTimes, less, t, weight);
}

// The part that bits of sketches give: the sum over those that are 1.
template <int BITS, bool SKETCH>
__device__ __forceinline__ float sum_of_bits(const OneQueryPart<BITS, SKETCH>& now, const uint2 (&column)[4], int t,
                                             float weight) {
  int sums[2][4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t even = 0x01010101u << 2 * (i % 2), odd = 0x02020202u << 2 * (i % 2);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t x = now.bit[2 * h] >> i / 2 * 4, y = now.bit[2 * h + 1] >> i / 2 * 4;
      mma_bytes<true>(sums[h], {x & even, y & even, x & odd, y & odd}, column[i]);
    }
  }
  return sum_of_key(sums, 1, 0, t, weight);
}

// One query, d = 128, at least 32 keys, and structured sketches of 128 bits or none. The scores are the same to the
// bit as those of score_kernel (score/general.cuh).
template <int BITS, bool UNIFORM, bool SKETCH>
__global__ void __launch_bounds__(kThreads, one_query_blocks_per_multiprocessor(BITS))
    score_one_query_kernel(const __grid_constant__ ScoreArguments a) {
  using Codes = Expansion<BITS, UNIFORM>;
  __shared__ OneQueryShared shared;
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;

  // A block's keys are rows 0 to count - 1 from first_key, at least 32: the last block may repeat some keys of the
  // block before it.
  const int64_t batch = blockIdx.y, first_key = min(int64_t{blockIdx.x} * a.span, a.keys - kTileKeys);
  const int count = static_cast<int>(min(int64_t{a.span}, a.keys - first_key)), last = count - kTileKeys;
  const int64_t first_row = batch * a.keys + first_key;

  // The loads for the query are issued first, then those of keys. Warp 0 prepares the query for codes, the next warp
  // for sketches.
  const bool sketched = SKETCH && warp == (BITS ? 1 : 0), prepares = warp == 0 || sketched;
  const bool fills = BITS > 0 && format::fits_nibble(format::as_width(BITS)) && warp == kWarps - 1;
  QueryLane query;
  int level = 0;
  if (prepares) query.load(a, batch, sketched, lane);
  if (fills && lane < 1 << BITS) level = format::level_of_code(format::as_width(BITS), a.levels, lane);

  int key = warp * kTileKeys, row = min(key, last);
  OneQueryKeys<BITS, SKETCH> keys(a, first_row + row, g, t);
  OneQueryPart<BITS, SKETCH> part[2];
  if (key < count) keys.load(part[0]);
  float* out = a.out + first_row + row + 8 * t + g;

  if (fills) shared.table[lane] = static_cast<int8_t>(level);
  if (prepares) query.prepare<BITS, UNIFORM>(a, sketched, lane, shared);
  __syncthreads();
  if (key >= count) return;

  // In a product this lane holds the column of byte g % 4 of a coordinate.
  Codes expansion(shared.table);
  expansion.add_minus();
  if constexpr (Codes::kTwoParts) keep(expansion.minus_low), keep(expansion.minus_high);
  uint2 code_column[4], sketch_column[4];
  int start[4] = {}, less = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int at = i * 16 + t * 4 + g % 4;
    if constexpr (BITS > 0) code_column[i] = reinterpret_cast<const uint2*>(shared.columns[0])[at];
    if constexpr (SKETCH) sketch_column[i] = reinterpret_cast<const uint2*>(shared.columns[1])[at];
    if constexpr (Codes::kSigned) {
      constexpr uint32_t x = Codes::kConstant;
      mma_bytes<Codes::kUnsigned>(start, {x, x, x, x}, code_column[i]);
    }
  }
  if constexpr (Codes::kTimes > 1) {
    less = start[1] * 256 + start[0];
#pragma unroll
    for (int k = 0; k < 4; ++k) start[k] = 0;
  }
  float code_weight = (t % 2 ? 65536 : 1) * kCodeUnit<Codes>;
  float sketch_weight = (t % 2 ? 65536 : 1) * (2.0f / 8 / (1 << kPointBits));
  keep(code_weight), keep(sketch_weight);
  const float code_unit = shared.units[0], shift = shared.totals[0];
  const float sketch_unit = shared.units[1], minus_total = -shared.totals[1];

  // One iteration: issues the loads of the next 32 keys, sums these and writes their scores. Returns whether another
  // one follows. The last 32 keys of a block may overlap others, whose scores are then written twice.
  const auto advance = [&](const auto& now, auto& next) {
    key += kBlockKeys;
    const int step = min(key, last) - row;
    keys.advance(step);
    if (key < count) keys.load(next);

    float score = 0;
    if constexpr (BITS > 0) {
      const float sum = sum_of_codes(now, expansion, code_column, start, less, t, code_weight);
      score = __fmaf_rn(sum * code_unit, __half2float(now.scale), shift);
    }
    if constexpr (SKETCH) {
      // The sum of +-q is twice the sum over bits that are 1, less the sum over all.
      const float sum = sum_of_bits(now, sketch_column, t, sketch_weight);
      const float estimate = a.factor * now.norm * __fmaf_rn(sum, sketch_unit, minus_total);
      score = score + estimate;
    }
    *out = score;
    out += step, row += step;
    return key < count;
  };
  while (advance(part[0], part[1]) && advance(part[1], part[0])) {
  }
}

}  // namespace turboquant::cuda::scores
