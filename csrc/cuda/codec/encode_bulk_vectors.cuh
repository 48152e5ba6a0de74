// Vectors of the bulk encoder (encode_bulk.cuh): how they come to lanes by way of shared memory, and their rotation.
#pragma once

#include "choices/codec.h"
#include "cuda/codec/dispatch.cuh"
#include "cuda/codec/record.cuh"
#include "cuda/common/async_copy.cuh"

namespace turboquant::cuda {

// ---- Vectors in lanes -----------------------------------------------------------------------------------------------

template <int LOG_N>
struct EncodeTraits {
  static constexpr int kDim = 1 << LOG_N, kPerLane = 64;
  static constexpr int kLanes = kDim / kPerLane, kVectors = 32 / kLanes;  // lanes of a vector, vectors of a warp
  static_assert(kLanes == 1 || kLanes == 2 || kLanes == 4);

  // After the rotation, half h of a lane is this group of 32 channels.
  static __device__ __forceinline__ int group(int part, int h) { return h * kLanes + part; }
};

// ---- Staged vectors -------------------------------------------------------------------------------------------------

// Words between vectors, and between the signs of the lanes of a vector: 16-byte accesses of eight neighbouring lanes
// meet different banks (with d = 256 in two halves).
template <typename Traits>
constexpr int kStageStride = choices::encode_stage_stride(Traits::kDim);
constexpr int kSignStride = choices::kSignStride;

// Issues the copies of all vectors of a warp to shared memory, 16 bytes at a time: neighbouring lanes move neighbouring
// bytes. Vector v is row row_of(v) of rows that lie `stride` bytes apart; row_of must be linear. Row indices are
// clamped to count - 1, which may be negative: that is still a row of the tensor, before the first one. Vectors are the
// first to leave the L2 cache, where stored bytes wait for others of their sectors.
template <typename Traits, typename RowOf>
__device__ __forceinline__ void start_rows(uint32_t* stage, const uint8_t* rows, uint32_t stride, int count, int lane,
                                           RowOf&& row_of) {
  constexpr int kChunks = Traits::kDim / 8, kTogether = 32 / kChunks, kTimes = Traits::kVectors / kTogether;
  const int first = lane / kChunks, chunk = lane % kChunks;
  const uint8_t* from = rows + 16 * chunk;
  uint32_t* to = stage + first * kStageStride<Traits> + 4 * chunk;
  const CopyOnce once;
  if (row_of(Traits::kVectors - 1) < count) {
    const auto at_row = [&](const uint8_t* base, uint32_t row) { return base + uint64_t{row} * stride; };
    from = at_row(from, row_of(first));
    asm("" : "+l"(from));  // keeps one multiplication per row instead of one for each term of its index
#pragma unroll
    for (int k = 0; k < kTimes; ++k) {
      once.copy_async(to + k * kTogether * kStageStride<Traits>, at_row(from, row_of(k * kTogether)));
    }
  } else {
#pragma unroll 1
    for (int k = 0; k < kTimes; ++k) {
      const int64_t row = min(row_of(first + k * kTogether), count - 1);
      once.copy_async(to + k * kTogether * kStageStride<Traits>, from + row * stride);
    }
  }
}

// A warp takes a *span* at a time: neighbouring tokens of one head. Vectors that take four lanes need two passes for
// one.
template <typename Traits>
constexpr int kSpanTokens = choices::encode_span_tokens(Traits::kDim);
template <typename Traits>
constexpr int kPasses = kSpanTokens<Traits> / Traits::kVectors;

// The token of the span that a vector of the warp is. With two passes, each has the tokens that share words of a value
// block.
template <typename Traits>
__device__ __forceinline__ int token_of_vector(int vector, int pass) {
  return Traits::kLanes == 4 ? vector % 4 + 4 * pass + 8 * (vector / 4) : vector;
}

// Sign bits of the channels, a row for each lane of a vector.
template <typename Traits>
__device__ __forceinline__ void fill_signs(uint32_t* rows, const float* signs, int thread, int threads) {
  for (int i = thread; i < Traits::kDim; i += threads) {
    rows[i / 64 * kSignStride + i % 64] = __float_as_uint(signs[i]) & 0x80000000;
  }
}

// A lane's staged channels as float32 with their signs; CENTERED: less the center, and scaled if there are scales. The
// fence after each 16 channels keeps the compiler from loading all 64 into registers at once. CENTERED is a template
// parameter because a test for every 16 channels would take up to a twelfth of the kernel's time from vectors without a
// center.
template <typename T, bool CENTERED>
__device__ __forceinline__ void read_staged(const uint32_t* row, const uint32_t* signs,
                                            const format::Channels& channels, float (&y)[64]) {
#pragma unroll
  for (int i = 0; i < 64; i += 16) {
    uint32_t word[8], sign[16];
#pragma unroll
    for (int k = 0; k < 8; k += 4) {
      const uint4 w = *reinterpret_cast<const uint4*>(row + i / 2 + k);
      word[k] = w.x, word[k + 1] = w.y, word[k + 2] = w.z, word[k + 3] = w.w;
    }
#pragma unroll
    for (int k = 0; k < 16; k += 4) {
      const uint4 s = *reinterpret_cast<const uint4*>(signs + i + k);
      sign[k] = s.x, sign[k + 1] = s.y, sign[k + 2] = s.z, sign[k + 3] = s.w;
    }
    float* to = y + i;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if constexpr (std::is_same_v<T, __half>) {
        const float2 pair = __half22float2(reinterpret_cast<const __half2&>(word[k]));
        to[2 * k] = __uint_as_float(__float_as_uint(pair.x) ^ sign[2 * k]);
        to[2 * k + 1] = __uint_as_float(__float_as_uint(pair.y) ^ sign[2 * k + 1]);
      } else {  // adding the sign bit flips the sign
        to[2 * k] = __uint_as_float(word[k] * 65536u + sign[2 * k]);
        to[2 * k + 1] = __uint_as_float((word[k] & 0xFFFF0000) ^ sign[2 * k + 1]);
      }
    }
    if constexpr (CENTERED) {  // -(a - b) = (-a) - (-b)
#pragma unroll
      for (int k = 0; k < 16; k += 4) {
        const float4 c = __ldg(reinterpret_cast<const float4*>(channels.center + i + k));
        to[k] = __fsub_rn(to[k], __uint_as_float(__float_as_uint(c.x) ^ sign[k]));
        to[k + 1] = __fsub_rn(to[k + 1], __uint_as_float(__float_as_uint(c.y) ^ sign[k + 1]));
        to[k + 2] = __fsub_rn(to[k + 2], __uint_as_float(__float_as_uint(c.z) ^ sign[k + 2]));
        to[k + 3] = __fsub_rn(to[k + 3], __uint_as_float(__float_as_uint(c.w) ^ sign[k + 3]));
      }
      if (channels.scale) {
#pragma unroll
        for (int k = 0; k < 16; k += 4) {
          const float4 c = __ldg(reinterpret_cast<const float4*>(channels.scale + i + k));
          to[k] = __fmul_rn(to[k], c.x), to[k + 1] = __fmul_rn(to[k + 1], c.y);
          to[k + 2] = __fmul_rn(to[k + 2], c.z), to[k + 3] = __fmul_rn(to[k + 3], c.w);
        }
      }
    }
    asm volatile("" ::: "memory");
  }
}

// ---- Rotation -------------------------------------------------------------------------------------------------------

// Butterflies of a vector. Halves of a lane may come out with the opposite sign (is_negated), which is corrected for
// free.
template <typename Traits>
__device__ __forceinline__ void rotate_lanes(float (&y)[64], int part) {
  lane_butterflies<1, 32>(y);
  // Products with 1 and -1 are exact, so that only sums and differences round. A lane whose first partner is below it
  // has the differences first.
  const float first = part & 1 ? -1.0f : 1.0f;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const float p = y[i], q = y[i + 32];
    y[i] = __fmaf_rn(first, q, p);
    y[i + 32] = __fmaf_rn(-first, q, p);
  }
#pragma unroll
  for (int bit = 1; bit < Traits::kLanes; bit *= 2) {
    // The next partner needs its halves in swapped order.
    const bool swapped = part & 2 * bit;
    const float next_side = swapped ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const float own = y[i];
      const float other = __shfl_xor_sync(0xffffffff, y[i + 32], bit);
      y[i] = __fmaf_rn(next_side, other, own);
      y[i + 32] = __fmaf_rn(-next_side, other, own);
    }
  }
}

// Whether half h of a lane has the opposite sign: the upper of two partners subtracts in the opposite order.
template <typename Traits>
__device__ __forceinline__ bool is_negated(int part, int h) {
  if (Traits::kLanes == 1) return false;
  if (Traits::kLanes == 2) return h == 1 && part == 1;
  return h == 0 ? part == 3 : part == 2;
}

// Sum of squares of N channels over neighbouring pairs (format.md section 5, step 4), depth first: few live registers.
template <int N>
__device__ __forceinline__ float square_tree(const float* y) {
  if constexpr (N == 1) {
    return __fmul_rn(y[0], y[0]);
  } else {
    return __fadd_rn(square_tree<N / 2>(y), square_tree<N / 2>(y + N / 2));
  }
}

template <typename Traits>
__device__ __forceinline__ float sum_of_squares(const float (&y)[64]) {
  float t[2] = {square_tree<32>(y), square_tree<32>(y + 32)};
#pragma unroll
  for (int bit = 1; bit < Traits::kLanes; bit *= 2) {
#pragma unroll
    for (int h = 0; h < 2; ++h) t[h] = __fadd_rn(t[h], __shfl_xor_sync(0xffffffff, t[h], bit));
  }
  return __fadd_rn(t[0], t[1]);
}

// A rotated vector, besides its coordinates y in the lanes' registers: its length, and the power of two that was taken
// out.
struct Rotated {
  float length;
  int exponent;
  bool finite;  // else y is zero
};

// read(y) reads the vector, signs applied; it is called again if the vector must be scaled.
template <typename Traits, typename Read>
__device__ __forceinline__ Rotated rotate_vector(float (&y)[64], int part, Read&& read) {
  Rotated v{0, 0, true};
  bool scaled = false;
#pragma unroll 1
  while (true) {
    read(y);
    if (scaled) {  // rare
      uint32_t largest = 0;
#pragma unroll
      for (int i = 0; i < 64; ++i) largest = max(largest, magnitude_bits(y[i]));
      largest = max_of_lanes<Traits::kLanes>(largest);
      v.finite = largest < kInfinityBits;
      v.exponent = prescale_exponent(largest);
      const float down = power_of_two(-v.exponent);
#pragma unroll
      for (int i = 0; i < 64; ++i) y[i] = v.finite ? __fmul_rn(y[i], down) : 0.0f;
    }
    rotate_lanes<Traits>(y, part);
    const float squares = sum_of_squares<Traits>(y);
    if (__all_sync(0xffffffff, squares >= 0x1p-60f && squares <= 0x1p100f)) {
      v.length = root(squares);
      return v;
    }
    if (scaled) {
      v.length = __fsqrt_rn(squares);
      return v;
    }
    scaled = true;
  }
}

}  // namespace turboquant::cuda
