// qjl_sketch: sign bits of a projected residual and its length (docs/format.md section 10). qjl_score is in score.cu.
//
// The structured projection is memory bound: a few lanes hold a vector, rotate it and collect the sign bits of their channels.
// Bits of exact zeros, and of sums that only the scaling by a power of two decides, need more care than the rest: a warp that
// meets one goes over its vectors again, exactly as the format says. Unusual d take a kernel that always does so, and many 16-bit
// vectors of 64, 128 or 256 channels one on tensor cores.
// The dense projection is bound by arithmetic: its products are summed in a fixed order, without fused additions.
#include "qjl.cuh"

#include <algorithm>

#include "codec.cuh"
#include "hadamard.cuh"
#include "mma.cuh"
#include "ring.cuh"

namespace turboquant::cuda {
namespace {

// ---- Structured ---------------------------------------------------------------------------------------------------

constexpr int kThreads = 128;
constexpr uint32_t kInfinityBits = 0x7F800000;

// The largest magnitude among N channels, as its representation: it orders like the value, NaN above infinity.
__device__ __forceinline__ uint32_t magnitude_bits(float x) { return __float_as_uint(x) & 0x7FFFFFFF; }

// Exponent of section 5, step 3.
__device__ __forceinline__ int prescale_exponent(uint32_t amax_bits) {
  return min(max(static_cast<int>(amax_bits >> 23) - 127, -100), 100);
}

__device__ __forceinline__ float nan_norm() { return __int_as_float(0x7FC00000); }

// A group of lanes takes several vectors, one after the other, and keeps the signs in registers where they fit.
template <typename Traits>
constexpr bool kHoldsSigns = Traits::kPerLane <= 64;
template <typename Traits>
constexpr int kRepeats = kHoldsSigns<Traits> ? 4 : 1;

// The butterflies of signs * y. The first stage takes the signs along: products with 1 and -1 are exact.
template <typename Traits>
__device__ __forceinline__ void signed_butterflies(float (&y)[Traits::kPerLane], const float (&sign)[Traits::kPerLane],
                                                   int lane) {
#pragma unroll
  for (int i = 0; i < Traits::kPerLane; i += 2) {
    const float p = __fmul_rn(y[i], sign[i]), q = y[i + 1];
    y[i] = __fmaf_rn(sign[i + 1], q, p);
    y[i + 1] = __fmaf_rn(-sign[i + 1], q, p);
  }
  lane_butterflies<2, Traits::kVec>(y);
#pragma unroll
  for (int bit = 1; bit < Traits::kLanes; bit *= 2) {
    const float side = lane & bit ? -1.0f : 1.0f;  // as in butterflies()
#pragma unroll
    for (int i = 0; i < Traits::kPerLane; ++i) y[i] = __fmaf_rn(side, y[i], __shfl_xor_sync(0xffffffff, y[i], bit));
  }
  lane_butterflies<Traits::kVec, Traits::kVec * Traits::kChunks>(y);
}

// residual: rows of Traits::kDim channels -> bits: [count, d / 8], norms: [count]
template <typename Traits>
__global__ void __launch_bounds__(kThreads)
    sketch_kernel(const void* residual, const __grid_constant__ Rows rows, const float* signs, ScalarType dtype,
                  uint8_t* bits, float* norms) {
  constexpr int kLanes = Traits::kLanes, kPerLane = Traits::kPerLane, kBytes = kPerLane / 8;
  constexpr int kVectors = 32 / kLanes, kWarpBytes = 4 * kPerLane;  // of a warp at a time
  constexpr float kNorm = block_norm(Traits::kLogBlock);
  static_assert(Traits::kVec == 8, "the bits of a byte lie in one lane");
  __shared__ alignas(16) uint8_t staged[kThreads / 32][kWarpBytes];

  const int lane = threadIdx.x % kLanes, in_warp = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t warp_first = (int64_t{blockIdx.x} * (kThreads / 32) + warp) * (kVectors * kRepeats<Traits>);
  float sign[kPerLane];
  if constexpr (kHoldsSigns<Traits>) load<Traits>(signs, lane, sign);

#pragma unroll 1
  for (int repeat = 0; repeat < kRepeats<Traits>; ++repeat) {
    const int64_t first = warp_first + repeat * kVectors, vector = first + in_warp / kLanes;
    if (first >= rows.count) return;
    const bool active = vector < rows.count;  // the others stay for the shuffles
    const int64_t from = rows(active ? vector : first);

    // The next vectors are on their way to the cache while these are in registers.
    if (repeat + 1 < kRepeats<Traits> && vector + kVectors < rows.count) {
      const int64_t next = rows(vector + kVectors) + lane * kPerLane;
      const char* p = static_cast<const char*>(residual) + next * (dtype == ScalarType::Float ? 4 : 2);
      asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
    }

    float norm = 0;
    uint32_t negative[(kBytes + 3) / 4];  // a bit per channel of the lane
#pragma unroll 1
    for (bool exact = false;; exact = true) {
      float y[kPerLane], square[kPerLane];
      load_as<Traits>(residual, dtype, from, lane, y);
      bool broken = false;
      float up = 1;
      if (exact) {
        uint32_t amax = 0;
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) amax = max(amax, magnitude_bits(y[i]));
        amax = max_of_lanes<kLanes>(amax);
        broken = amax >= kInfinityBits;
        up = power_of_two(prescale_exponent(amax));
        const float down = power_of_two(-prescale_exponent(amax));
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) y[i] = __fmul_rn(y[i], down);
      }
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) square[i] = __fmul_rn(y[i], y[i]);
      const float sum = tree_sum<Traits>(square);
      norm = broken ? nan_norm() : __fmul_rn(__fsqrt_rn(sum), up);

      if constexpr (!kHoldsSigns<Traits>) load<Traits>(signs, lane, sign);
      signed_butterflies<Traits>(y, sign, lane);
      if (exact || Traits::kBlocks > 1) {
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) y[i] = __fmul_rn(y[i], kNorm);
        mix_blocks<Traits>(y);
      }
      if (exact) {  // -0 counts as positive
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) y[i] = y[i] >= 0 ? 1.0f : -1.0f;
      }

      float least = INFINITY;
#pragma unroll
      for (int w = 0; w < (kBytes + 3) / 4; ++w) {
        negative[w] = 0;
#pragma unroll
        for (int i = min(32, kPerLane - 32 * w) - 1; i >= 0; --i) {
          negative[w] = __funnelshift_l(__float_as_uint(y[32 * w + i]), negative[w], 1);
          least = fminf(least, fabsf(y[32 * w + i]));
        }
        if (broken) negative[w] = 0xffffffff;
      }
      if (exact) break;
      // Within these bounds the power of two changes no rounding. Only where channels 2^100 times smaller than others are left
      // over after those cancelled could it change a sign, and then a sum is small.
      if (__all_sync(0xffffffff, sum >= 0x1p-60f && sum <= 0x1p100f && least > norm * 0x1p-30f)) break;
    }

    // The bytes of a warp's vectors are neighbours: they leave four at a time.
    uint8_t* to = staged[warp] + in_warp / kLanes * (Traits::kDim / 8);
#pragma unroll
    for (int k = 0; k < kBytes; ++k) {
      to[Traits::channel(lane, k) / 8] = static_cast<uint8_t>(~negative[k / 4] >> 8 * (k % 4));
    }
    __syncwarp();
    const int bytes = static_cast<int>(min(int64_t{kVectors}, rows.count - first)) * (Traits::kDim / 8);
    uint8_t* out = bits + first * (Traits::kDim / 8);
#pragma unroll 1
    for (int at = 4 * in_warp; at < kWarpBytes; at += 128) {
      if (at + 4 <= bytes) {
        *reinterpret_cast<uint32_t*>(out + at) = *reinterpret_cast<const uint32_t*>(staged[warp] + at);
      } else {
        for (int i = at; i < bytes; ++i) out[i] = staged[warp][i];
      }
    }
    __syncwarp();
    if (active && lane == 0) norms[vector] = norm;
  }
}

// ---- Structured, many vectors -------------------------------------------------------------------------------------------
//
// Few sums come so close to zero that the order of additions decides their sign. So tensor cores do the butterflies for four or
// five bits of a channel's number, in an order of their own, and vectors with a sum that may be one of those few are done again,
// as the format says.
//
// How close: products with 1 and -1 are exact; what the two ways round differently are sums. The format's are off by at most
// log2(d) 2^-24 times the sum of all magnitudes, which is within sqrt(d) times the length. Of tensor cores suppose little: they add
// four or more numbers at a time to the sum so far, and cut each of them, and the result, off at 24 bits of the largest. If all is
// cut by as much as can be, and the same way, both together are off by 2^-15.9 of the length for d = 64, by 2^-15.3 for 128 and by
// 2^-14.04 for 256. The bound is 2^-15 and for 256 2^-14: 1.9, 1.3 and 1.03 times that, and 5, 3 and 2.9 times for tensor cores that
// add sixteen numbers at a time and keep two more bits. Of vectors of random numbers 0.2%, 0.3% and 1.2% have a sum within it.

template <int LOG_N>
struct SketchTile {
  static constexpr int kDim = 1 << LOG_N, kVectors = 16;            // of a warp at a time: the rows of a product
  static constexpr int kPerLane = kDim / 4, kWords = kPerLane / 2;  // neighbouring channels
  // A lane's words are [kRows][kSums]. The four lanes, kRows and the two channels of a word are for tensor cores, which leaves
  // kSums sums at a time for butterflies in registers.
  static constexpr int kSums = LOG_N == 6 ? 4 : 8, kRows = kWords / kSums;
  static_assert(kRows == 2 || kRows == 4);
  static constexpr int kWarps = 4, kBlocks = LOG_N == 6 ? 7 : LOG_N == 7 ? 4 : 3;  // of a block, of a multiprocessor

  // Where 16 bytes of a vector are staged, such that neighbouring lanes meet different banks, both ways.
  static __device__ __forceinline__ int place(int vector, int chunk) {
    return vector * (kDim / 8) + (chunk ^ chunk / 8 ^ vector % 2 * (kDim / 64));
  }
};

// Right operand of the product for rows r and result tile t: the transform over lanes, rows and the two channels of a word.
template <typename T>
__device__ __forceinline__ uint32_t transform_word(int t, int r, int lane) {
  constexpr uint32_t kOnes = std::is_same_v<T, __half> ? 0x3C003C00 : 0x3F803F80;
  const uint32_t flip = __popc((lane % 4 & lane / 8) | (r & t) << 2) & 1 ? 0x80008000 : 0;
  return kOnes ^ flip ^ (lane & 4 ? 0x80000000 : 0);
}

// By 1 and -1, which the pipe for floats does: the one for logic has more to do.
template <typename T>
__device__ __forceinline__ uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  const Pair c = __hmul2(reinterpret_cast<const Pair&>(a), reinterpret_cast<const Pair&>(b));
  return reinterpret_cast<const uint32_t&>(c);
}

// Sum of squares of N words over neighbouring pairs. Squares of 16-bit numbers are exact, so the first sum rounds once.
template <typename T, int N>
__device__ __forceinline__ float square_sum(const uint32_t* word) {
  if constexpr (N == 1) {
    float y[2];
    floats_of_words<T, 1>({*word}, y);
    return __fmaf_rn(y[0], y[0], __fmul_rn(y[1], y[1]));
  } else {
    return __fadd_rn(square_sum<T, N / 2>(word), square_sum<T, N / 2>(word + N / 2));
  }
}

// A vector as the format says, by a group of lanes; without `bits` they only take part in what the warp does together.
template <typename Traits, typename T>
__device__ __forceinline__ void sketch_exactly(const T* vector, const float* signs, int lane, uint8_t* bits,
                                               float* norm) {
  float y[Traits::kPerLane], square[Traits::kPerLane];
  load<Traits>(vector, lane, y);
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < Traits::kPerLane; ++i) amax = max(amax, magnitude_bits(y[i]));
  amax = max_of_lanes<Traits::kLanes>(amax);
  const bool broken = amax >= kInfinityBits;
  const int e = prescale_exponent(amax);
#pragma unroll
  for (int i = 0; i < Traits::kPerLane; ++i) {
    y[i] = __fmul_rn(y[i], power_of_two(-e));
    square[i] = __fmul_rn(y[i], y[i]);
  }
  const float sum = tree_sum<Traits>(square);
  apply_signs<Traits>(y, signs, lane);
  transform<Traits>(y, lane);
  if (!bits) return;
#pragma unroll
  for (int k = 0; k < Traits::kPerLane / 8; ++k) {
    uint32_t byte = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) byte |= static_cast<uint32_t>(y[8 * k + i] >= 0) << i;  // -0 counts as positive
    bits[Traits::channel(lane, k) / 8] = broken ? 0 : static_cast<uint8_t>(byte);
  }
  if (lane == 0) *norm = broken ? nan_norm() : __fmul_rn(__fsqrt_rn(sum), power_of_two(e));
}

// From sm_80 on.
template <int LOG_N, typename T>
__global__ void __launch_bounds__(32 * SketchTile<LOG_N>::kWarps, SketchTile<LOG_N>::kBlocks)
    sketch_tile_kernel(const T* residual, const __grid_constant__ Rows rows, const float* signs, uint8_t* bits,
                       float* norms) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800  // launch_sketch_tiles asks
  using Tile = SketchTile<LOG_N>;
  constexpr int kSums = Tile::kSums, kRows = Tile::kRows, kWords = Tile::kWords;
  // The next vectors are on their way while a warp works on these: to registers, or to shared memory where they are too many.
  constexpr bool kStaged = LOG_N == 8;
  constexpr int kChunks = kWords / 4;  // of 16 bytes, of a lane's part of a vector
  __shared__ uint4 stages[Tile::kWarps][kStaged ? Tile::kVectors * 4 * kChunks : 1];
  __shared__ alignas(16) uint32_t sign_rows[4][kWords + 4];
  for (int i = threadIdx.x; i < Tile::kDim / 2; i += 32 * Tile::kWarps) {
    sign_rows[i / kWords][i % kWords] = word_of_floats<T>(signs[2 * i], signs[2 * i + 1]);
  }
  __syncthreads();
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int part = lane % 4, row = lane / 4;  // the lane holds this part of vectors `row` and `row` + 8
  uint32_t right[kRows][kRows];
#pragma unroll
  for (int t = 0; t < kRows; ++t) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) right[t][r] = transform_word<T>(t, r, lane);
  }

  const int64_t on = int64_t{gridDim.x} * Tile::kWarps * Tile::kVectors;
  int64_t first = (int64_t{blockIdx.x} * Tile::kWarps + warp) * Tile::kVectors;
  uint4 ahead[2][kStaged ? 1 : kChunks];
  const auto start_loads = [&] {
    if (first >= rows.count) return;
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      const int64_t vector = first + row + 8 * v;
      const T* from = residual + rows(vector < rows.count ? vector : first);
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        if constexpr (kStaged) {
          const int chunk = 4 * k + part;
          copy_async(stages[warp] + Tile::place(row + 8 * v, chunk), from + 8 * chunk);
        } else {
          ahead[v][k] = __ldg(reinterpret_cast<const uint4*>(from) + part * kChunks + k);
        }
      }
    }
  };
  start_loads();

#pragma unroll 1
  while (first < rows.count) {
    const int64_t tile = first;
    first += on;
    uint32_t word[2][kWords];
    if constexpr (kStaged) {
      wait_for_copies();
      __syncwarp();
    }
#pragma unroll
    for (int v = 0; v < 2; ++v) {
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        uint4 w;
        if constexpr (kStaged) {
          w = stages[warp][Tile::place(row + 8 * v, part * kChunks + k)];
        } else {
          w = ahead[v][k];
        }
        word[v][4 * k] = w.x, word[v][4 * k + 1] = w.y, word[v][4 * k + 2] = w.z, word[v][4 * k + 3] = w.w;
      }
    }
    if constexpr (kStaged) {
      __syncwarp();
      start_loads();
    }

    // Even lanes see to the first of their two vectors, odd ones to the second.
    const bool odd = lane % 2;
    const int64_t mine = tile + row + 8 * odd;
    const auto with_neighbour = [&](float a, float b, auto&& combine) {
      return combine(odd ? b : a, __shfl_xor_sync(0xffffffff, odd ? a : b, 1));
    };
    const auto add = [](float a, float b) { return __fadd_rn(a, b); };
    float sum = with_neighbour(square_sum<T, kWords>(word[0]), square_sum<T, kWords>(word[1]), add);
    sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffff, sum, 2));
    bool zero[2] = {};
    if (__any_sync(0xffffffff, sum == 0)) {  // rare, except where vectors are padding
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        uint32_t any = 0;
#pragma unroll
        for (int k = 0; k < kWords; ++k) any |= word[v][k] & 0x7FFF7FFF;
        zero[v] = max_of_lanes<4>(any) == 0;
      }
    }

#pragma unroll
    for (int k = 0; k < kWords; k += 4) {
      const uint4 s = *reinterpret_cast<const uint4*>(&sign_rows[part][k]);
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        uint32_t* w = word[v] + k;
        w[0] = multiply_pairs<T>(w[0], s.x), w[1] = multiply_pairs<T>(w[1], s.y);
        w[2] = multiply_pairs<T>(w[2], s.z), w[3] = multiply_pairs<T>(w[3], s.w);
      }
    }
    if constexpr (!kStaged) start_loads();

    uint32_t negative[kRows];  // of a result tile: two bytes of either vector, or one
    uint32_t least_pair[2] = {0x7F807F80, 0x7F807F80};
#pragma unroll
    for (int t = 0; t < kRows; ++t) {
      float y[kSums][4] = {};
#pragma unroll
      for (int r = 0; r < kRows; r += 2) {
#pragma unroll
        for (int j = 0; j < kSums; ++j) {
          const uint32_t *a = word[0] + j + kSums * r, *b = word[1] + j + kSums * r;
          mma_floats<T>(y[j], make_uint4(a[0], b[0], a[kSums], b[kSums]), right[t][r], right[t][r + 1]);
        }
      }
#pragma unroll
      for (int h = 1; h < kSums; h *= 2) {
#pragma unroll
        for (int j = 0; j < kSums; ++j) {
          if (j & h) continue;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float p = y[j][i], q = y[j + h][i];
            y[j][i] = __fadd_rn(p, q), y[j + h][i] = __fsub_rn(p, q);
          }
        }
      }
      // The lane has channels 2 kSums t + 2 j + i % 2 now. Two that are kSums apart, cut off to bfloat16, are a pair.
      negative[t] = 0;
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        uint32_t pair[2];
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          pair[v] = select_bytes(__float_as_uint(y[i / 2][2 * v + i % 2]),
                                 __float_as_uint(y[i / 2 + kSums / 2][2 * v + i % 2]), 0x7632);
          least_pair[v] = least_magnitudes(least_pair[v], pair[v]);
        }
        const uint32_t four = select_bytes(pair[0], pair[1], 0xFDB9);  // their signs, a byte each
        negative[t] |= four & (kSums == 8 ? 0x01010101u : 0x10011001u) << i;
      }
      if (kSums == 4) negative[t] |= negative[t] >> 8;
    }

#pragma unroll
    for (int v = 0; v < 2; ++v) {
      const int64_t vector = tile + row + 8 * v;
      if (vector >= rows.count) continue;
      const auto word_of = [&](int t) {  // -0 counts as positive
        const uint32_t word =
            select_bytes(negative[t], negative[t + 1], kSums == 4 ? 0x40 + 0x22 * v : 0x5410 + 0x2222 * v);
        return zero[v] ? 0xffffffff : ~word;
      };
      uint8_t* to = bits + vector * (Tile::kDim / 8) + part * (Tile::kPerLane / 8);
      if constexpr (LOG_N == 6) {
        *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(word_of(0));
      } else if constexpr (LOG_N == 7) {
        *reinterpret_cast<uint32_t*>(to) = word_of(0);
      } else {
        *reinterpret_cast<uint2*>(to) = make_uint2(word_of(0), word_of(2));
      }
    }
    if (part < 2 && mine < rows.count) norms[mine] = __fsqrt_rn(sum);

    float least[2];
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      least[v] = fminf(fabsf(__uint_as_float(least_pair[v] << 16)), fabsf(__uint_as_float(least_pair[v] & 0xFFFF0000)));
    }
    const float smallest = with_neighbour(least[0], least[1], [](float a, float b) { return fminf(a, b); });
    // Within these bounds of the length the power of two changes no rounding that matters, as in sketch_kernel.
    constexpr float kBound = LOG_N < 8 ? 0x1p-30f : 0x1p-28f;  // squared
    const bool clear = sum >= 0x1p-60f && sum <= 0x1p100f && __fmul_rn(smallest, smallest) > __fmul_rn(sum, kBound);
    uint32_t again = __ballot_sync(0xffffffff, mine < rows.count && !clear && !(odd ? zero[1] : zero[0]));
    again = (again | again >> 2) & 0x33333333;  // of either half of a vector's lanes, bit 4 row + v

    using Exact = HadamardTraits<1, LOG_N, Tile::kDim / 16>;
    constexpr int kTogether = 32 / Exact::kLanes;
    if (again) __syncwarp();  // other lanes have written there
#pragma unroll 1
    while (again) {
      uint32_t rest = again, own = again;  // of the next kTogether each group of lanes takes one
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        if (k < lane / Exact::kLanes) own &= own - 1;
        rest &= rest - 1;
      }
      const int at = __ffs(static_cast<int>(own ? own : again)) - 1;
      const int64_t vector = tile + at / 4 + 8 * (at % 4);
      sketch_exactly<Exact>(residual + rows(vector), signs, lane % Exact::kLanes,
                            own ? bits + vector * (Tile::kDim / 8) : nullptr, norms + vector);
      again = rest;
    }
  }
#endif
}

// Any d, a warp per vector, in dynamic shared memory: [vectors of the block][2][d].
__global__ void __launch_bounds__(kThreads)
    sketch_any_kernel(const void* residual, const __grid_constant__ Rows rows, format::Split split, const float* signs,
                      ScalarType dtype, uint8_t* bits, float* norms) {
  extern __shared__ float shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, m = split.blocks, n = split.block, d = m * n;
  const int64_t vector = int64_t{blockIdx.x} * (blockDim.x / 32) + warp;
  if (vector >= rows.count) return;
  float *y = shared + warp * 2 * d, *square = y + d;

  const int64_t from = rows(vector);
  uint32_t amax = 0;
  for (int c = lane; c < d; c += 32) {
    y[c] = load_float(residual, dtype, from + c);
    amax = max(amax, magnitude_bits(y[c]));
  }
  amax = max_of_lanes(amax);
  const int e = prescale_exponent(amax);
  const bool broken = amax >= kInfinityBits;
  for (int c = lane; c < d; c += 32) {
    const float x = __fmul_rn(y[c], power_of_two(-e));
    square[c] = __fmul_rn(x, x);
    y[c] = __fmul_rn(x, signs[c]);
  }
  transform_shared(y, split, lane);
  for (int h = 1; h < n; h *= 2) {
    for (int i = 2 * h * lane; i < d; i += 64 * h) square[i] = __fadd_rn(square[i], square[i + h]);
    __syncwarp();
  }
  for (int byte = lane; byte < d / 8; byte += 32) {
    unsigned packed = 0;
    for (int k = 0; k < 8; ++k) packed |= static_cast<unsigned>(y[8 * byte + k] >= 0) << k;
    bits[vector * (d / 8) + byte] = broken ? 0 : static_cast<uint8_t>(packed);
  }
  if (lane == 0) {
    float sum = square[0];
    for (int b = 1; b < m; ++b) sum = __fadd_rn(sum, square[b * n]);
    norms[vector] = broken ? nan_norm() : __fmul_rn(__fsqrt_rn(sum), power_of_two(e));
  }
}

// ---- Dense --------------------------------------------------------------------------------------------------------

constexpr int kDenseThreads = 256;
constexpr int kTileVectors = 32, kTileRows = 64;  // outputs of a block at a time
constexpr int kOwnVectors = 4, kOwnRows = 2;      // of a thread; the lanes of a warp take different rows
constexpr int kTileChannels = 64;                 // in shared memory at a time
constexpr int kStride = kTileChannels + 4;        // of a row there: keeps 16-byte reads free of bank conflicts
constexpr int kLevels = 8;                        // of partial sums of 16 channels and more: n <= 4096
static_assert(kDenseThreads == 32 * kTileVectors / kOwnVectors && kTileRows == 32 * kOwnRows);

// Pairwise sum of N rounded products.
template <int N>
__device__ __forceinline__ float product_tree(const float* a, const float* b) {
  if constexpr (N == 1) {
    return __fmul_rn(a[0], b[0]);
  } else {
    const float low = product_tree<N / 2>(a, b);
    return __fadd_rn(low, product_tree<N / 2>(a + N / 2, b + N / 2));
  }
}

// residual: rows of d = blocks * n channels, projection: [m, d] -> bits: [count, m / 8], norms: [count]. INNER divides n.
// A block takes kTileVectors vectors and all rows of the projection. The squares of a vector are one more row.
template <int INNER>
__global__ void __launch_bounds__(kDenseThreads, 2)
    dense_sketch_kernel(const void* residual, const __grid_constant__ Rows rows, ScalarType dtype,
                        const float* projection, int m, int blocks, int n, uint8_t* bits, float* norms) {
  __shared__ alignas(16) float vectors[kTileVectors][kStride];
  __shared__ alignas(16) float tile[kTileRows][kStride];
  __shared__ float down[kTileVectors];  // 2^-e of each vector
  __shared__ bool broken[kTileVectors];
  __shared__ int64_t start[kTileVectors];
  const int d = blocks * n, thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int64_t first = int64_t{blockIdx.x} * kTileVectors;
  const int count = static_cast<int>(min(int64_t{kTileVectors}, rows.count - first));

  for (int v = warp; v < kTileVectors; v += kDenseThreads / 32) {
    uint32_t amax = 0;
    if (v < count) {
      const int64_t from = rows(first + v);
      for (int c = lane; c < d; c += 32) amax = max(amax, magnitude_bits(load_float(residual, dtype, from + c)));
    }
    amax = max_of_lanes(amax);
    if (lane == 0) {
      down[v] = power_of_two(-prescale_exponent(amax)), broken[v] = amax >= kInfinityBits;
      start[v] = rows(first + min(v, count - 1));
    }
  }

  const int own = warp * kOwnVectors;
  for (int tile_row = 0; tile_row < m; tile_row += kTileRows) {
    float total[kOwnVectors][kOwnRows], length = 0;
    for (int block = 0; block < blocks; ++block) {
      // Sums of 2^level * INNER channels that wait for their right neighbour, as in a binary counter.
      float waiting[kOwnVectors * kOwnRows + 1][kLevels];
      const auto carry = [&](float* wait, float sum, int index, float total) {
#pragma unroll
        for (int level = 0; level < kLevels; ++level) {
          if (!(index >> level & 1)) {
            wait[level] = sum;
            break;
          }
          sum = __fadd_rn(wait[level], sum);
        }
        if ((index + 1) * INNER < n) return total;
        return block ? __fadd_rn(total, sum) : sum;
      };
      for (int base = 0; base < n; base += kTileChannels) {
        const int width = min(kTileChannels, n - base), from = block * n + base;
        __syncthreads();
        const int c = thread % kTileChannels;
        if (c < width) {
#pragma unroll 4
          for (int v = thread / kTileChannels; v < kTileVectors; v += kDenseThreads / kTileChannels) {
            vectors[v][c] = __fmul_rn(load_float(residual, dtype, start[v] + from + c), down[v]);
          }
#pragma unroll 4
          for (int r = thread / kTileChannels; r < kTileRows; r += kDenseThreads / kTileChannels) {
            tile[r][c] = tile_row + r < m ? __ldg(projection + int64_t{tile_row + r} * d + from + c) : 0.0f;
          }
        }
        __syncthreads();
#pragma unroll 1
        for (int c = 0; c < width; c += INNER) {
          const int index = (base + c) / INNER;
          float a[INNER];
#pragma unroll
          for (int r = 0; r < kOwnRows; ++r) {
            float b[INNER];
#pragma unroll
            for (int i = 0; i < INNER; ++i) b[i] = tile[lane + 32 * r][c + i];
#pragma unroll
            for (int v = 0; v < kOwnVectors; ++v) {
#pragma unroll
              for (int i = 0; i < INNER; ++i) a[i] = vectors[own + v][c + i];
              total[v][r] = carry(waiting[v * kOwnRows + r], product_tree<INNER>(a, b), index, total[v][r]);
            }
          }
          if (tile_row == 0 && lane < kOwnVectors) {
#pragma unroll
            for (int i = 0; i < INNER; ++i) a[i] = vectors[own + lane][c + i];
            length = carry(waiting[kOwnVectors * kOwnRows], product_tree<INNER>(a, a), index, length);
          }
        }
      }
    }
#pragma unroll
    for (int v = 0; v < kOwnVectors; ++v) {
      const int64_t vector = first + own + v;
#pragma unroll
      for (int r = 0; r < kOwnRows; ++r) {
        const uint32_t word = __ballot_sync(0xffffffff, total[v][r] >= 0 && !broken[own + v]);
        const int byte = (tile_row + 32 * r) / 8 + lane;
        if (lane < 4 && byte < m / 8 && own + v < count)
          bits[vector * (m / 8) + byte] = static_cast<uint8_t>(word >> 8 * lane);
      }
    }
    if (tile_row == 0 && lane < kOwnVectors && own + lane < count) {
      const float norm = __fdiv_rn(__fsqrt_rn(length), down[own + lane]);  // an exact division
      norms[first + own + lane] = broken[own + lane] ? nan_norm() : norm;
    }
  }
}

// ---- Host ---------------------------------------------------------------------------------------------------------

// Calls fn(DefaultHadamard<..>) for the usual head sizes; false for any other.
template <typename Fn>
bool dispatch_usual_dim(format::Split split, Fn&& fn) {
  switch (split.blocks * split.block) {
    case 64: fn(DefaultHadamard<1, 6>{}); return true;
    case 80: fn(DefaultHadamard<5, 4>{}); return true;
    case 96: fn(DefaultHadamard<3, 5>{}); return true;
    case 112: fn(DefaultHadamard<7, 4>{}); return true;
    case 128: fn(DefaultHadamard<1, 7>{}); return true;
    case 160: fn(DefaultHadamard<5, 5>{}); return true;
    case 192: fn(DefaultHadamard<3, 6>{}); return true;
    case 256: fn(DefaultHadamard<1, 8>{}); return true;
    case 512: fn(DefaultHadamard<1, 9>{}); return true;
    case 576: fn(DefaultHadamard<9, 6>{}); return true;
    default: return false;
  }
}

// False where there are too few vectors, or no kernel for them.
bool launch_sketch_tiles(const AlignedRows& in, ScalarType dtype, format::Split split, const Constant& signs,
                         uint8_t* bits, float* norms, cudaStream_t stream) {
  int device = 0, major = 0, multiprocessors = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
             "cudaDeviceGetAttribute");
  if (major < 8) return false;
  const auto launch = [&](auto tag, auto log_n) {
    using T = typename decltype(tag)::type;
    using Tile = SketchTile<log_n>;
    const int64_t tiles = (in.rows().count + Tile::kVectors - 1) / Tile::kVectors;
    if (tiles < int64_t{multiprocessors} * Tile::kWarps) return false;
    const int64_t blocks =
        std::min<int64_t>(multiprocessors * Tile::kBlocks, (tiles + Tile::kWarps - 1) / Tile::kWarps);
    sketch_tile_kernel<log_n, T>
        <<<static_cast<unsigned>(blocks), 32 * Tile::kWarps, 0, stream>>>(static_cast<const T*>(in.data()), in.rows(),
                                                                          signs.data(), bits, norms);
    return true;
  };
  const auto of_dim = [&](auto tag) {
    switch (split.blocks * split.block) {
      case 64: return launch(tag, std::integral_constant<int, 6>{});
      case 128: return launch(tag, std::integral_constant<int, 7>{});
      case 256: return launch(tag, std::integral_constant<int, 8>{});
      default: return false;
    }
  };
  if (dtype == ScalarType::BFloat16) return of_dim(Tag<__nv_bfloat16>{});
  return dtype == ScalarType::Half && of_dim(Tag<__half>{});
}

// residual: [..., d] float, stride 1 in the last dimension -> sign_bits uint8 [..., m / 8], norm float32 [...]
std::tuple<Tensor, Tensor> qjl_sketch(const Tensor& residual, const Tensor& projection) {
  check_float(residual, "residual");
  check_unit_last_stride(residual, "residual");
  const int64_t d = residual.size(residual.dim() - 1);
  const Projection sketch(projection, residual, d);
  const format::Split split = format::split_dim(d);

  Tensor bits = torch::stable::new_empty(residual, leading_shape(residual, 1, {sketch.bytes()}), ScalarType::Byte);
  Tensor norm = torch::stable::new_empty(residual, leading_shape(residual, 1, {}), ScalarType::Float);
  if (residual.numel() == 0) return {bits, norm};
  uint8_t* bits_out = static_cast<uint8_t*>(bits.data_ptr());
  float* norm_out = static_cast<float*>(norm.data_ptr());

  const Launch launch(residual);
  const ScalarType dtype = residual.scalar_type();
  const AlignedRows in(residual, sketch.dense ? 1 : 16);
  const Rows& rows = in.rows();
  if (sketch.dense) {
    STD_TORCH_CHECK(sketch.rows <= INT32_MAX, "projection has ", sketch.rows, " rows, supported: up to ", INT32_MAX);
    const auto start = [&](auto inner) {
      dense_sketch_kernel<inner><<<num_blocks(rows.count, kTileVectors), kDenseThreads, 0, launch.stream()>>>(
          in.data(), rows, dtype, sketch.data, static_cast<int>(sketch.rows), split.blocks, split.block, bits_out,
          norm_out);
    };
    if (split.block >= 16) {
      start(std::integral_constant<int, 16>{});
    } else {
      start(std::integral_constant<int, 2>{});
    }
  } else {
    const Constant signs(projection);
    if (launch_sketch_tiles(in, dtype, split, signs, bits_out, norm_out, launch.stream())) {
      launch.check("qjl_sketch");
      return {bits, norm};
    }
    const bool usual = dispatch_usual_dim(split, [&](auto traits) {
      using Traits = decltype(traits);
      constexpr int per_block = kThreads / Traits::kLanes * kRepeats<Traits>;
      sketch_kernel<Traits><<<num_blocks(rows.count, per_block), kThreads, 0, launch.stream()>>>(in.data(), rows,
                                                                                                 signs.data(), dtype,
                                                                                                 bits_out, norm_out);
    });
    if (!usual) {
      constexpr int64_t shared = 48 << 10;
      const int64_t bytes = 2 * d * int64_t{sizeof(float)};  // of a warp
      const int warps = static_cast<int>(std::min<int64_t>(kThreads / 32, shared / bytes));
      sketch_any_kernel<<<num_blocks(rows.count, warps), 32 * warps, warps * bytes, launch.stream()>>>(
          in.data(), rows, split, signs.data(), dtype, bits_out, norm_out);
    }
  }
  launch.check("qjl_sketch");
  return {bits, norm};
}

}  // namespace
}  // namespace turboquant::cuda

STABLE_TORCH_LIBRARY_IMPL(turboquant, CUDA, m) { m.impl("qjl_sketch", TORCH_BOX(&turboquant::cuda::qjl_sketch)); }
