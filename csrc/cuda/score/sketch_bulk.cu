// The kernel for sketches of many vectors of 64, 128 or 256 channels, on tensor cores from sm_80 on; qjl.cu has the
// other kernels.
//
// Few sums are so close to zero that the order of additions decides their sign. So tensor cores do the butterflies
// over four or five bits of the channel index, in an order of their own, and vectors with a sum that may be one of
// those few are sketched again in the order of the format.
//
// The bound for such a sum: products with 1 and -1 are exact, so the two ways differ in how they round sums. The
// format's sums are off by at most log2(d) 2^-24 times the sum of all magnitudes, which is at most sqrt(d) times the
// length. Of tensor cores we assume little: they add four or more elements at a time to the sum so far, and truncate
// each of them, and the result, to 24 bits of the largest one. If every truncation is as large as it can be and has
// the same direction, both ways together are off by 2^-15.9 of the length for d = 64, by 2^-15.3 for 128 and by
// 2^-14.04 for 256. The bound is 2^-15, and 2^-14 for d = 256: 1.9, 1.3 and 1.03 times these errors, and 5, 3 and 2.9
// times the errors of tensor cores that add sixteen elements at a time and keep two more bits. Of random vectors 0.2%,
// 0.3% and 1.2% have a sum within the bound.
#include "cuda/score/sketch_bulk.cuh"

#include <algorithm>

#include "choices/score.h"
#include "cuda/codec/codebook.cuh"
#include "cuda/codec/transform.cuh"
#include "cuda/common/async_copy.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/torch.cuh"

namespace turboquant::cuda {
namespace {

template <int LOG_N>
struct SketchTile {
  static constexpr int kDim = 1 << LOG_N, kVectors = kSketchBulkVectors;  // of a warp at a time: the rows of a product
  static constexpr int kPerLane = kDim / 4, kWords = kPerLane / 2;        // neighbouring channels
  // A lane's words are [kRows][kSums]. Tensor cores transform over the four lanes, kRows and the two channels of a
  // word; butterflies in registers do the rest, kSums sums at a time.
  static constexpr int kSums = LOG_N == 6 ? 4 : 8, kRows = kWords / kSums;
  static_assert(kRows == 2 || kRows == 4);
  static constexpr int kWarps = kSketchBulkWarps;  // of a block
  // Of a multiprocessor: a thread then has up to 72, 128 and 168 registers.
  static constexpr int kBlocks = LOG_N == 6 ? 7 : LOG_N == 7 ? 4 : 3;

  // The place of 16 bytes of a vector in its stage: neighbouring lanes have different banks when they write and when
  // they read.
  static __device__ __forceinline__ int place(int vector, int chunk) {
    return vector * (kDim / 8) + (chunk ^ chunk / 8 ^ vector % 2 * (kDim / 64));
  }
};

// The right operand of the product for rows r and result t: the transform over lanes, rows and the two channels of a
// word.
template <typename T>
__device__ __forceinline__ uint32_t transform_word(int t, int r, int lane) {
  constexpr uint32_t kOnes = std::is_same_v<T, __half> ? 0x3C003C00 : 0x3F803F80;
  const uint32_t flip = __popc((lane % 4 & lane / 8) | (r & t) << 2) & 1 ? 0x80008000 : 0;
  return kOnes ^ flip ^ (lane & 4 ? 0x80000000 : 0);
}

// Multiplies by 1 and -1 instead of flipping signs with xor: the integer pipe is the bottleneck here, the float pipe
// is not.
template <typename T>
__device__ __forceinline__ uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  const Pair c = __hmul2(reinterpret_cast<const Pair&>(a), reinterpret_cast<const Pair&>(b));
  return reinterpret_cast<const uint32_t&>(c);
}

// The sum of squares of N words over neighbouring pairs. Squares of 16-bit floats are exact, so the first sum rounds
// once.
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

// Sketches a vector in the order of the format, by some neighbouring lanes. Where `bits` is null, they only take part
// in the shuffles of the warp.
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
  if (lane == 0) *norm = broken ? quiet_nan() : __fmul_rn(__fsqrt_rn(sum), power_of_two(e));
}

// Sketches vectors of a tile again, in the order of the format. again: for vector v of the tile, bit 4 (v % 8) + v / 8.
template <int LOG_N, typename T>
__device__ __forceinline__ void sketch_again(const T* residual, const Rows& rows, int64_t tile, uint32_t again,
                                             const float* signs, int lane, uint8_t* bits, float* norms) {
  using Tile = SketchTile<LOG_N>;
  using Exact = HadamardTraits<1, LOG_N, Tile::kDim / 16>;
  constexpr int kTogether = 32 / Exact::kLanes;
  __syncwarp();  // other lanes have written to the same places
#pragma unroll 1
  while (again) {
    uint32_t rest = again, own = again;  // the next kTogether vectors, one for every kLanes lanes
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

// The signs of all sums of a lane's two vectors, and for either a pair of magnitudes, the smaller of which is that of
// the vector's smallest sum in this lane, truncated to bfloat16. word: the vectors, times their signs. negative, of
// each result of the right operand: two bytes of either vector, or one.
template <typename Tile, typename T>
__device__ __forceinline__ void signs_of_sums(const uint32_t (&word)[2][Tile::kWords],
                                              const uint32_t (&right)[Tile::kRows][Tile::kRows],
                                              uint32_t (&negative)[Tile::kRows], uint32_t (&least_pair)[2]) {
  constexpr int kSums = Tile::kSums, kRows = Tile::kRows;
  least_pair[0] = least_pair[1] = 0x7F807F80;
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
    // The lane now has channels 2 kSums t + 2 j + i % 2. Two channels that are kSums apart, truncated to bfloat16,
    // are a pair.
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
}

// Stores a lane's bits of its vector v; a sum that is -0 counts as positive, as all sums of a vector of zeros do.
template <typename Tile>
__device__ __forceinline__ void store_bits(const uint32_t (&negative)[Tile::kRows], int v, bool zero, uint8_t* to) {
  const auto word_of = [&](int t) {
    const uint32_t word =
        select_bytes(negative[t], negative[t + 1], Tile::kSums == 4 ? 0x40 + 0x22 * v : 0x5410 + 0x2222 * v);
    return zero ? 0xffffffff : ~word;
  };
  if constexpr (Tile::kDim == 64) {
    *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(word_of(0));
  } else if constexpr (Tile::kDim == 128) {
    *reinterpret_cast<uint32_t*>(to) = word_of(0);
  } else {
    *reinterpret_cast<uint2*>(to) = make_uint2(word_of(0), word_of(2));
  }
}

template <int LOG_N, typename T>
__global__ void __launch_bounds__(32 * SketchTile<LOG_N>::kWarps, SketchTile<LOG_N>::kBlocks)
    sketch_tile_kernel(const T* residual, const __grid_constant__ Rows rows, const float* signs, uint8_t* bits,
                       float* norms) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800  // choose_sketch asks
  using Tile = SketchTile<LOG_N>;
  constexpr int kRows = Tile::kRows, kWords = Tile::kWords;
  // The loads of the next vectors are in flight while a warp works on these: to registers, or to shared memory if they
  // are too many.
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

    // Even lanes finish the first of their two vectors, odd lanes the second.
    const bool odd = lane % 2;
    const int64_t mine = tile + row + 8 * odd;
    const auto with_neighbour = [&](float a, float b, auto&& combine) {
      return combine(odd ? b : a, __shfl_xor_sync(0xffffffff, odd ? a : b, 1));
    };
    const auto add = [](float a, float b) { return __fadd_rn(a, b); };
    float sum = with_neighbour(square_sum<T, kWords>(word[0]), square_sum<T, kWords>(word[1]), add);
    sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffff, sum, 2));
    bool zero[2] = {};
    if (__any_sync(0xffffffff, sum == 0)) {  // rare, unless vectors are padding
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

    uint32_t negative[kRows], least_pair[2];
    signs_of_sums<Tile, T>(word, right, negative, least_pair);
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      const int64_t vector = tile + row + 8 * v;
      if (vector >= rows.count) continue;
      store_bits<Tile>(negative, v, zero[v], bits + vector * (Tile::kDim / 8) + part * (Tile::kPerLane / 8));
    }
    if (part < 2 && mine < rows.count) norms[mine] = __fsqrt_rn(sum);

    float least[2];
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      least[v] = fminf(fabsf(__uint_as_float(least_pair[v] << 16)), fabsf(__uint_as_float(least_pair[v] & 0xFFFF0000)));
    }
    const float smallest = with_neighbour(least[0], least[1], [](float a, float b) { return fminf(a, b); });
    // For lengths within these bounds the power of two changes no rounding that matters, as in qjl.cu.
    constexpr float kBound = LOG_N < 8 ? 0x1p-30f : 0x1p-28f;  // squared
    const bool clear = sum >= 0x1p-60f && sum <= 0x1p100f && __fmul_rn(smallest, smallest) > __fmul_rn(sum, kBound);
    uint32_t again = __ballot_sync(0xffffffff, mine < rows.count && !clear && !(odd ? zero[1] : zero[0]));
    again = (again | again >> 2) & 0x33333333;
    if (again) sketch_again<LOG_N>(residual, rows, tile, again, signs, lane, bits, norms);
  }
#endif
}

}  // namespace

void launch_sketch_bulk(const void* x, const Rows& rows, Dtype dtype, format::Split split, const float* signs,
                        uint8_t* bits, float* norms, const DeviceFacts& device, cudaStream_t stream) {
  const auto launch = [&](auto tag, auto log_n) {
    using T = typename decltype(tag)::type;
    using Tile = SketchTile<log_n>;
    const int64_t tiles = (rows.count + Tile::kVectors - 1) / Tile::kVectors;
    const int64_t blocks =
        std::min<int64_t>(device.multiprocessors * Tile::kBlocks, (tiles + Tile::kWarps - 1) / Tile::kWarps);
    sketch_tile_kernel<log_n, T>
        <<<static_cast<unsigned>(blocks), 32 * Tile::kWarps, 0, stream>>>(static_cast<const T*>(x), rows, signs, bits,
                                                                          norms);
  };
  const auto of_dim = [&](auto tag) {
    switch (split.blocks * split.block) {
      case 64: return launch(tag, std::integral_constant<int, 6>{});
      case 128: return launch(tag, std::integral_constant<int, 7>{});
      default: return launch(tag, std::integral_constant<int, 8>{});
    }
  };
  if (dtype == Dtype::kBFloat16) return of_dim(Tag<__nv_bfloat16>{});
  of_dim(Tag<__half>{});
}

}  // namespace turboquant::cuda
