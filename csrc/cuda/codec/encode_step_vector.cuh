// A vector in the registers of some lanes, and its candidates, for kernels that encode few vectors (encode_step.cu,
// mla/store_step.cuh).
//
// * Where the bulk kernel has tables, a binary search compares two coordinates with a boundary at once: 16-bit integers
//   below 2^15 - 2^10 have the order of the float16 values of the same bits. __hge2_mask gives 0xFFFF for each true
//   half, and the mask selects the next boundary of the search. Four magnitudes then form the selector of a byte
//   permutation, which looks up four levels. Magnitudes of 8-bit codes are products, corrected next to a boundary.
// * The sums of a candidate end in the lane of its number, so that the lanes divide for all candidates at once; the
//   lane with the greatest merit stores the scale.
#pragma once

#include "cuda/codec/encode_step_codes.cuh"

namespace turboquant::cuda::encode_step {

// ---- A lane's share of a vector -------------------------------------------------------------------------------------

// Loads a lane's channels of a vector of 16-bit floats: four neighbours in two words.
template <typename Traits>
__device__ __forceinline__ void load_words(const uint8_t* vector, int lane, uint32_t (&word)[Traits::kChunks][2]) {
#pragma unroll
  for (int q = 0; q < Traits::kChunks; ++q) {
    const uint2 w = __ldg(reinterpret_cast<const uint2*>(vector) + lane + 32 * q);
    word[q][0] = w.x, word[q][1] = w.y;
  }
}

// Channels, as they were loaded: without the center, and times factors and signs, where there are such.
template <typename Traits>
__device__ __forceinline__ void prepare_channels(const uint32_t (&word)[Traits::kChunks][2], bool is_half,
                                                 bool has_center, const float (&center)[Traits::kPerLane],
                                                 bool has_factor, const float (&factor)[Traits::kPerLane],
                                                 const float (&signs)[Traits::kPerLane], float (&x)[Traits::kPerLane]) {
#pragma unroll
  for (int q = 0; q < Traits::kChunks; ++q) {
    // One kernel for both dtypes: there is nothing else that depends on them.
    is_half ? floats_of_words<__half>(word[q], x + 4 * q) : floats_of_words<__nv_bfloat16>(word[q], x + 4 * q);
  }
  if (has_center) {
#pragma unroll
    for (int i = 0; i < Traits::kPerLane; ++i) x[i] = __fsub_rn(x[i], center[i]);
  }
  if (has_factor) {
#pragma unroll
    for (int i = 0; i < Traits::kPerLane; ++i) x[i] = __fmul_rn(x[i], factor[i]);
  }
#pragma unroll
  for (int i = 0; i < Traits::kPerLane; ++i) x[i] = __fmul_rn(x[i], signs[i]);
}

// Rotated coordinates, and what the vector's scale needs.
template <typename Traits>
struct StepVector {
  using Constants = StepConstants<Traits::kLogBlock>;
  float (&y)[Traits::kPerLane];
  LengthAndUnits<Constants> scaled;
  int exponent = 0;
  bool finite = true, zero = false;

  // y: the rotated x. As in rotate_vector, a power of two is taken out only where a vector of the warp needs it.
  __device__ __forceinline__ StepVector(const float (&x)[Traits::kPerLane], float (&y)[Traits::kPerLane], int lane)
      : y(y), scaled(0) {
    float squares = sum_of_squares<Traits>(y);
    scaled = LengthAndUnits<Constants>(squares);  // before the vote, whose latency it hides
    if (__all_sync(0xffffffff, squares >= 0x1p-60f && squares <= 0x1p100f)) [[likely]]
      return;
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < Traits::kPerLane; ++i) {
      y[i] = x[i];
      asm volatile("" : "+f"(y[i]));  // keeps this work out of the usual path
      largest = max(largest, magnitude_bits(y[i]));
    }
    largest = max_of_lanes<Traits::kLanes>(largest);
    finite = largest < kInfinityBits;
    exponent = prescale_exponent(largest);
    const float down = power_of_two(-exponent);
#pragma unroll
    for (int i = 0; i < Traits::kPerLane; ++i) y[i] = finite ? __fmul_rn(y[i], down) : 0.0f;
    butterflies<Traits>(y, lane);
    squares = sum_of_squares<Traits>(y);
    zero = squares == 0;
    if (zero) squares = 1;  // any length will do: all coordinates are zero
    scaled = LengthAndUnits<Constants>(squares);
  }

  // The stored scale.
  __device__ __forceinline__ uint16_t scale(const Fit& fit, ScaleMode mode) const {
    constexpr EncodeConstants constants = Constants::values();
    uint16_t scale = fit.scale(mode, scaled.length, exponent, constants);
    if (zero) scale = 0;
    if (!finite) scale = format::kNanScale;
    return scale;
  }
};

// ---- Candidates -----------------------------------------------------------------------------------------------------

// The boundary that decides bit STEPS - 1 - K of magnitudes whose upper bits are masks in `set`. M masks are still to
// be applied; I has the bits that the recursion has chosen already.
template <int STEPS, int K, int M = K, int I = 0>
__device__ __forceinline__ uint32_t deciding(const uint32_t (&boundary)[1 << STEPS], const uint32_t (&set)[STEPS]) {
  if constexpr (M == 0) {
    return boundary[((2 * I + 1) << (STEPS - 1 - K)) - 1];
  } else {
    const uint32_t below = deciding<STEPS, K, M - 1, I>(boundary, set);
    const uint32_t above = deciding<STEPS, K, M - 1, I | 1 << (K - M)>(boundary, set);
    return (above & set[M - 1]) | (below & ~set[M - 1]);
  }
}

// Magnitudes of two coordinates, in the low bits of the halves.
template <int STEPS, int K = 0>
__device__ __forceinline__ uint32_t magnitudes(uint32_t cell, const uint32_t (&boundary)[1 << STEPS],
                                               uint32_t (&set)[STEPS]) {
  const uint32_t at = deciding<STEPS, K>(boundary, set);
  set[K] = __hge2_mask(reinterpret_cast<const __half2&>(cell), reinterpret_cast<const __half2&>(at));
  const uint32_t bit = set[K] & 0x10001u << (STEPS - 1 - K);
  if constexpr (K + 1 == STEPS) {
    return bit;
  } else {
    return bit | magnitudes<STEPS, K + 1>(cell, boundary, set);
  }
}

// The magnitudes and sums of a lane's coordinates under one candidate. WIDE: 16 boundaries instead of 8.
template <typename Traits, bool WIDE>
struct Tried {
  static constexpr int kQuads = Traits::kChunks;
  uint32_t dot = 0, squares = 0;
  uint32_t selector[kQuads];

  // first: the first eight boundaries, loaded earlier.
  __device__ __forceinline__ Tried(const Quad (&quads)[kQuads], const PairBoundaries& book, const QuadLevels& levels,
                                   const uint4 (&first)[2]) {
    constexpr int kSteps = WIDE ? 4 : 3;
    uint32_t boundary[1 << kSteps];
#pragma unroll
    for (int j = 0; j < (1 << kSteps) / 4; ++j) {
      const uint4 four = j < 2 ? first[j % 2] : reinterpret_cast<const uint4*>(book.at)[j];
      boundary[4 * j] = four.x, boundary[4 * j + 1] = four.y, boundary[4 * j + 2] = four.z,
                   boundary[4 * j + 3] = four.w;
    }
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      uint32_t set[2][kSteps];
      uint32_t x = magnitudes<kSteps>(quads[q].cell[0], boundary, set[0]) |
                   magnitudes<kSteps>(quads[q].cell[1], boundary, set[1]) << 8;
      x |= x >> 12;  // the second channels of pairs between the first ones
      selector[q] = x;
      const uint32_t level = levels.of<WIDE>(x);
      squares = __dp4a(level, level, squares);
      dot = __dp2a_lo(quads[q].size[0], level, dot);
      dot = __dp2a_hi(quads[q].size[1], level, dot);
      if constexpr (Traits::kDim > 128) dot += __dp4a(quads[q].over, level, 0u) << 16;
    }
  }
  __device__ __forceinline__ Tried(const Quad (&quads)[kQuads], const PairBoundaries& book, const QuadLevels& levels)
      : Tried(quads, book, levels,
              {reinterpret_cast<const uint4*>(book.at)[0], reinterpret_cast<const uint4*>(book.at)[1]}) {}

  // own: the lane's place, of the warp
  __device__ __forceinline__ void put_selectors(uint16_t (&to)[kQuads][32], int own) const {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) to[q][own] = static_cast<uint16_t>(selector[q]);
  }
  // Over all lanes of the vector.
  __device__ __forceinline__ int2 sums() const {
    const int all_d = sum_of_lanes<Traits::kLanes>(static_cast<int>(dot));
    const int all_b = sum_of_lanes<Traits::kLanes>(static_cast<int>(squares));
    return {all_d, all_b};
  }
};

// Tries all candidates; the sums of each end in the lane of its number.
template <typename Traits, bool WIDE>
struct Candidates {
  static constexpr int kQuads = Traits::kChunks;
  int dot = 0, squares = 0;

  __device__ __forceinline__ Candidates(const Quad (&quads)[kQuads], const PairBoundaries* books,
                                        const QuadLevels& levels, int steps, int lane,
                                        uint16_t (*selectors)[kQuads][32], int own) {
#pragma unroll 1
    for (int first = 0; first < steps; first += kUnroll) {
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {  // there is room for all, though some may not be used
        const int s = first + i;
        const Tried<Traits, WIDE> tried(quads, books[s], levels);
        tried.put_selectors(selectors[s], own);
        const int2 sums = tried.sums();
        if (lane == s) dot = sums.x, squares = sums.y;
      }
    }
    if (lane >= steps) dot = squares = 0;
  }
};

// The lane, of those of a vector, whose candidate fits best; the first one of equals. first: the vector's first lane.
template <int LANES>
__device__ __forceinline__ int best_lane(const Fit& fit, int first) {
  const float quotient = divide(__fmul_rn(fit.a, fit.a), fit.b);
  const float merit = fit.a > 0 ? quotient : 0;  // 0 where there is no candidate
  const uint32_t most = max_of_lanes<LANES>(__float_as_uint(merit));
  const uint32_t all = __ballot_sync(0xffffffff, __float_as_uint(merit) == most);
  return __ffs(all >> first) - 1;
}

// Four codes of up to 5 bits: low nibbles, and fifth bits.
struct QuadCodes {
  uint32_t low, high;

  // selector: their magnitudes; finite: otherwise codes are zero.
  __device__ __forceinline__ QuadCodes(const Quad& quad, uint32_t selector, Width width, bool finite) {
    const uint32_t half = 1 << (format::num_bits(width) - 1), ones = 2 * half - 1, negative = quad.negative_nibbles();
    low = (selector + (half & 15) * 0x1111) ^ (negative & (ones & 15) * 0x1111);
    low = finite ? low & 0xFFFF : 0;
    high = finite ? (~negative & 1) | (~negative >> 3 & 2) | (~negative >> 6 & 4) | (~negative >> 9 & 8) : 0;
  }
};

}  // namespace turboquant::cuda::encode_step
