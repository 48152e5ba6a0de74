// The step encoder's parameters, and a lane's four channels on their way to codes and stored words (encode_step.cu).
#pragma once

#include <cuda_fp16.h>

#include "choices/codec.h"
#include "cuda/codec/bulk.cuh"
#include "cuda/common/mma.cuh"

namespace turboquant::cuda::encode_step {

using choices::kMostCandidates;
constexpr int kWarps = 8;   // of a block: a multiprocessor starts one block sooner than two
constexpr int kUnroll = 4;  // candidates that are tried side by side, so that their latencies overlap
static_assert(kMostCandidates % kUnroll == 0);
constexpr int kMostBoundaries = 16;
constexpr uint32_t kBeyond = 0x7C00;  // greater than every coordinate

template <int LOG_N>
using StepTraits = HadamardTraits<1, LOG_N, (1 << LOG_N) / 4 < 32 ? (1 << LOG_N) / 4 : 32, 4>;

// ---- Parameters -----------------------------------------------------------------------------------------------------

// Keys or values.
struct StepSource {
  const uint8_t* data;           // [tokens, heads, d], strides in bytes
  const float* signs;            // [d]
  const float *center, *factor;  // [heads, d], null where there is none
  const int8_t* levels;          // [2^bits], null for the uniform grid
  const float* steps;            // [num_steps]
  uint32_t token_stride, head_stride;
  uint16_t section, scales;  // first bytes in a tile: of the planes of keys or the blocks of values, and of the scales
  uint8_t bits, num_steps, mode;

  __device__ __forceinline__ Width width() const { return format::as_width(bits); }
  __device__ __forceinline__ ScaleMode scale_mode() const { return static_cast<ScaleMode>(mode); }
};

// Tail (codec/record.cuh) with narrower fields.
struct StepTail {
  uint8_t* data;                    // [max_seqs, kv_heads, rows, 2, d]
  const void* slots;                // [seqs], of 8 bytes if wide_slots, else of 4
  const int32_t *lengths, *begins;  // [seqs], [seqs + 1]; begins is null with one token per sequence
  int seqs, rows, sink_tokens;
  uint32_t max_seqs, stride;
  int64_t slot_stride;
  bool wide_slots;
};

// The needed part of EncodeArguments in narrow fields. On sm_90 parameters start 16 bytes into a line of 64, so 48
// bytes end it.
struct StepArguments {
  const void* slots;  // [tokens], of 8 bytes if wide_slots, else of 4
  uint8_t* pages;
  uint32_t tokens, heads, num_pages, page_stride, record_bytes, tile_bytes;
  uint8_t page_shift, tile_shift, has_tail, wide_slots;
  uint8_t is_half;  // vectors are float16, or else bfloat16
  alignas(16) StepSource source[2];
  StepTail tail;
};
static_assert(sizeof(StepSource) == 64 && offsetof(StepArguments, source) == 48);

// The constants of 2^LOG_N channels, known to the compiler: they need no parameters.
template <int LOG_N>
struct StepConstants {
  static constexpr double root() {
    double r = LOG_N % 2 ? 1.41421356237309504880 : 1.0;
    for (int i = 0; i < LOG_N / 2; ++i) r *= 2;
    return r;
  }
  static constexpr bool kPowerOfTwo = LOG_N % 2 == 0;
  static constexpr EncodeConstants values() { return EncodeConstants::of_roots(root(), root()); }
};

// ---- Codebooks ------------------------------------------------------------------------------------------------------

// The positive half of a candidate, as in SharedCodebook, for comparisons of pairs: both halves of a word are the same
// boundary, in grains.
struct PairBoundaries {
  uint32_t at[kMostBoundaries];
};
struct PairLevels {
  uint8_t of[kMostBoundaries];
};

// Entry j of candidate s: loaded early, written to shared memory later.
struct PairEntry {
  int below, above;
  float step;
  bool has_level, has_boundary;

  // bits, levels, steps: as in StepSource
  __device__ __forceinline__ PairEntry(int bits, const int8_t* levels, const float* steps, int num_steps, int s,
                                       int j) {
    const int half = 1 << (bits - 1);
    has_level = s < num_steps && j < half, has_boundary = s < num_steps && j + 1 < half;
    below = 2 * j + 1, above = below + 2;
    step = __ldg(steps + (s < num_steps ? s : 0));
    if (levels && has_level) below = __ldg(levels + (half + j));
    if (levels && has_boundary) above = __ldg(levels + (half + j + 1));
  }
  __device__ __forceinline__ uint32_t boundary() const {
    const float at = table_boundary(below, above, step);
    return (has_boundary ? static_cast<uint32_t>(fminf(at, kBeyond)) : kBeyond) * 0x10001;
  }
  __device__ __forceinline__ uint8_t level() const { return static_cast<uint8_t>(has_level ? below : 0); }
};

// ---- Codes of four channels -----------------------------------------------------------------------------------------

// Four neighbouring coordinates, in pairs.
struct Quad {
  uint32_t cell[2];      // u or ~u, in grains
  uint32_t size[2];      // |u|, the low 16 bits
  uint32_t over;         // |u| >> 16, bytes
  uint32_t negative[2];  // 65535 where u < 0

  Quad() = default;
  __device__ __forceinline__ Quad(const float* y, float k) {
    uint32_t grain[4], whole[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float u = __fsub_rn(__fadd_rn(__fmul_rn(y[i], k), kInteger), kInteger);
      grain[i] = __float_as_uint(__fmaf_rd(u, 1.0f / 16, kInteger));
      whole[i] = __float_as_uint(__fadd_rn(fabsf(u), 0x1p23f));
    }
    over = select_bytes(select_bytes(whole[0], whole[1], 0x62), select_bytes(whole[2], whole[3], 0x62), 0x5410) &
           0x01010101;
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      const uint32_t pair = select_bytes(grain[2 * p], grain[2 * p + 1], 0x5410);
      negative[p] = select_bytes(pair, pair, 0xBB99);
      cell[p] = pair ^ negative[p];
      size[p] = select_bytes(whole[2 * p], whole[2 * p + 1], 0x5410);
    }
  }

  // Nibbles of all ones where u < 0.
  __device__ __forceinline__ uint32_t negative_nibbles() const {
    const uint32_t x = (negative[0] & 0x000F000F) | (negative[1] & 0x0F000F00);
    return (x & 0x0F0F) | (x >> 12 & 0xF0F0);
  }
};

// The same for 8-bit codes.
struct ByteQuad {
  float place[4];    // as ByteSteps takes them
  uint32_t size[2];  // |u|, the low 16 bits
  uint32_t over;     // |u| >> 16, bytes

  ByteQuad() = default;
  __device__ __forceinline__ ByteQuad(const float* y, float k) {
    uint32_t whole[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float u = nearest_integer(__fmul_rn(y[i], k));
      whole[i] = __float_as_uint(__fadd_rn(fabsf(u), 0x1p23f));
      place[i] = __fadd_rn(u, 0.5f);
    }
    size[0] = select_bytes(whole[0], whole[1], 0x5410), size[1] = select_bytes(whole[2], whole[3], 0x5410);
    over = select_bytes(select_bytes(whole[0], whole[1], 0x62), select_bytes(whole[2], whole[3], 0x62), 0x5410) &
           0x01010101;
  }

  // Levels without their signs, and codes, which are levels.
  __device__ __forceinline__ uint32_t magnitudes(const ByteSteps& steps) const {
    const auto of = [&](int i) { return __fadd_rn(steps.magnitude(place[i]), kInteger); };
    return low_bytes(of(0), of(1), of(2), of(3));
  }
  __device__ __forceinline__ uint32_t codes(const ByteSteps& steps) const {
    const auto of = [&](int i) { return __fadd_rn(copysignf(steps.magnitude(place[i]), place[i]), kInteger); };
    return low_bytes(of(0), of(1), of(2), of(3));
  }
};

// Levels of four magnitudes, nibbles of `selector`.
struct QuadLevels {
  uint4 word;

  template <bool WIDE>
  __device__ __forceinline__ uint32_t of(uint32_t selector) const {
    if constexpr (!WIDE) return select_bytes(word.x, word.y, selector);
    const uint32_t upper = select_bytes(0x80808080, 0x80808080, selector), low = selector & 0x7777;  // 255 or 128
    return (select_bytes(word.z, word.w, low) & upper) | (select_bytes(word.x, word.y, low) & ~upper);
  }
};

// Where a tile has the codes of a lane, as far as this is known before the token's slot is. lane: of its vector; quad q
// holds channels 4 LANES q + 4 lane and up. Codes have up to 5 bits.
struct StepTarget {
  int at;           // the lane's first byte for token 0
  int shift, mask;  // tokens of a row of keys, or of a block of values
  int pitch;        // bytes between rows or blocks
  int stride;       // between the bytes of a value
  int quad;         // to the next quad
  bool is_owner;    // whether the lane stores

  // In the row of a key, half an octet has 16 bits; where codes are spread, every fourth lane pair gives its bits to
  // the others.
  template <int D, int LANES>
  static __device__ __forceinline__ StepTarget of_key(Width width, int lane) {
    const bool spread = format::is_spread(width);
    const int j = lane / 2 % 4;
    const int at = spread ? lane / 8 * 12 + 4 * j + lane % 2 * 2 : width == Width::k2 ? lane : 2 * lane;
    const int low = min(format::num_bits(width), 4);  // without fifth bits
    return {.at = at,
            .shift = 0,
            .mask = 0,
            .pitch = D / 8 * low,
            .stride = 0,
            .quad = LANES / 2 * low,
            .is_owner = !spread || j < 3};
  }

  // The bytes that a token owns in a value block are not neighbours. Lanes whose channels share these bytes divide
  // them.
  template <int D, int LANES>
  static __device__ __forceinline__ StepTarget of_value(Width width, int lane, int section) {
    using namespace format;
    static_assert(kValueGroup == 16);
    const int bits = num_bits(width), set_bytes = kUnitBytes * bits;  // of 64 channels
    const bool two = width == Width::k2, spread = is_spread(width);
    const int set = two ? kChunkBytes * (lane / 32) + 4 * (lane / 8 % 4) : set_bytes * (lane / 16) + 4 * (lane / 4 % 4);
    const int stride = spread ? 12 : two && D < 128 ? D / 8 : 16;
    return {.at = section + set + stride * (16 * (lane & 1) + 4 * (lane & 2)),
            .shift = 4,
            .mask = 15,
            .pitch = 2 * D * bits,
            .stride = stride,
            .quad = LANES == 32 ? 2 * set_bytes
                    : two       ? 8
                                : set_bytes,
            .is_owner = width == Width::k4 || (spread ? lane / 4 % 4 < 3 : !(lane & 4))};
  }

  // 8-bit codes: a word of a key's row, or four bytes of a value.
  template <int D, int LANES>
  static __device__ __forceinline__ StepTarget of_bytes(int kind, int lane, int section) {
    using namespace format;
    constexpr int kWord = 4 * kChunkUnits;  // bytes between the words of neighbouring lanes of a chunk
    const int set = kChunkBytes * (lane / 8) + 16 * kWord * (lane & 1) + 4 * (lane / 2 % 4);
    return {.at = kind == 0 ? 4 * lane : section + set,
            .shift = kind == 0 ? 0 : 4,
            .mask = kind == 0 ? 0 : 15,
            .pitch = kind == 0 ? D : kValueGroup * D,
            .stride = kind == 0 ? 0 : kWord,
            .quad = kind == 0 ? 4 * LANES : kChunkBytes / 8 * LANES,
            .is_owner = true};
  }

  __device__ __forceinline__ uint32_t of_token(uint32_t number) const {
    const int inner = number & mask;
    return at + (number >> shift) * pitch + value_b(inner) + stride * value_q(inner);
  }
};

// Stores four codes of a key. codes: low nibbles; high: fifth bits.
__device__ __forceinline__ void put_step_key(uint32_t codes, uint32_t high, Width width, int lane, bool stored,
                                             uint8_t* to, uint8_t* plane) {
  if (format::fills_nibble(width)) {
    if (stored) *reinterpret_cast<uint16_t*>(to) = codes;
    if (width == Width::k4) return;
    const int j = lane / 2 % 4;
    uint32_t both = ((high & 3) | (high & 12) << 6) << 2 * j;
    both |= __shfl_xor_sync(0xffffffff, both, 2);
    both |= __shfl_xor_sync(0xffffffff, both, 4);
    if (stored && j == 0) *reinterpret_cast<uint16_t*>(plane + lane / 8 * 4 + lane % 2 * 2) = both;
  } else if (format::is_spread(width)) {
    const uint32_t last = __shfl_sync(0xffffffff, codes, threadIdx.x % 32 | 6);
    codes |= last << (3 - lane / 2 % 4) & 0x8888;
    if (stored) *reinterpret_cast<uint16_t*>(to) = codes;
  } else {
    codes = (codes & 0x0303) | (codes >> 2 & 0x0C0C);
    if (stored) *to = codes | codes >> 4;
  }
}

// Stores four codes of a value; step: from a byte to the next but one.
__device__ __forceinline__ void put_step_value(uint32_t codes, Width width, int lane, bool stored, uint8_t* to,
                                               int step) {
  uint32_t x = (codes | codes << 8) & 0x00FF00FF;
  x = (x | x << 4) & 0x0F0F0F0F;  // byte i: channel i
  x <<= width == Width::k2 ? lane & 6 : 2 * (lane & 2);
  x |= __shfl_xor_sync(0xffffffff, x, 2);
  if (width != Width::k4) {
    const bool spread = format::is_spread(width);
    const int own = threadIdx.x % 32;
    const uint32_t other = __shfl_sync(0xffffffff, x, spread ? own | 12 : own ^ 4);
    x |= spread ? other << (3 - lane / 4 % 4) & 0x88888888 : other;
  }
  x >>= 8 * (lane & 2);
  if (stored) to[0] = x, to[step] = x >> 8;
}

// ---- Rotation -------------------------------------------------------------------------------------------------------

// tree(y * y)
template <typename Traits>
__device__ __forceinline__ float sum_of_squares(const float (&y)[Traits::kPerLane]) {
  float square[Traits::kPerLane];
#pragma unroll
  for (int i = 0; i < Traits::kPerLane; ++i) square[i] = __fmul_rn(y[i], y[i]);
  return tree_sum<Traits>(square);
}

// A vector's length and the factor that turns its coordinates into units, from the sum of its squares: root(squares)
// and divide(units, length). The reciprocal of the root is within two units of the last place of the length's
// reciprocal, which saves computing that: the quotients are the same for all lengths, unless `units` is a power of two.
template <typename Constants>
struct LengthAndUnits {
  float length, k;

  __device__ __forceinline__ explicit LengthAndUnits(float squares) {
    float r;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(squares));
    const float y = __fmul_rn(squares, r);
    length = __fmaf_rn(__fmaf_rn(-y, y, squares), __fmul_rn(r, 0.5f), y);
    constexpr float kUnits = Constants::values().units;
    if constexpr (Constants::kPowerOfTwo) {
      k = divide(kUnits, length);
    } else {
      r = __fmaf_rn(r, __fmaf_rn(-length, r, 1), r);
      const float q = __fmul_rn(kUnits, r);
      k = __fmaf_rn(r, __fmaf_rn(-length, q, kUnits), q);
    }
  }
};

}  // namespace turboquant::cuda::encode_step
