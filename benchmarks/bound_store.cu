// How fast could cache_store be if a later format were free in its arithmetic?
//
// The format asks for float32 rotations whose bytes are the same everywhere, and cache_store is bound by those
// instructions, not by memory. This program stores the same shape (k4v4, 128 channels, 8 heads, 65,536 tokens of
// bfloat16, pages of 64) with cheaper arithmetic, in bytes of its own, and prints its times beside cudaMemcpy of as
// many bytes:
//   floor      no rotation and no levels: reads, takes the largest magnitude, packs bits, writes
//   fp32       rotation in float32; what follows in pairs of float16
//   half2      rotation in pairs of float16 too, of integers (1)
//   mma        a rotation of 16 channels by the tensor core (2), the other three butterflies in pairs of float16
//   mma, fit   the same with a scale by least squares (4); the others take the norm
// 1. Snapping. A vector is multiplied by the power of two that makes its largest exponent the smallest normal one, in
//    bfloat16: all other numbers end as subnormals, that is, the instruction itself rounds them to a common grid of 8
//    bits and a sign. The same bits read as float16 are integers (times 2^-24); dp4a sums their squares exactly.
// 2. A Hadamard matrix of 16 x 16 times 16 channels of 8 tokens is one m16n8k16. The sums of 16 such integers are
//    exact in the tensor core, and rounded once to float16.
// 3. Codes. An odd polynomial of degree 5 carries the thresholds of the Lloyd-Max quantizer (16 levels, Gaussian) to
//    equal distances; a product that ends as a subnormal float16 is the code, rounded. Levels are integers of 7 bits.
// 4. Scale. Either the norm, or sum(y l) / sum(l l) over the chosen levels l, as sums of integers (dp4a, dp2a).
// The error column is |y - decoded|^2 / |y|^2 against a double precision rotation (0.0095 is the quantizer's own). Two
// counts tell first whether the device sums and rounds as (1) and (2) say.
//
// Left out, so that these are bounds and no op: a scale of NaN, slots that are not 16 consecutive ones (tested for, but
// never handled), correctly rounded roots and quotients, and in fp32 vectors of a size out of float16's range.
//
// mkdir -p build && nvcc -O3 -std=c++20 -arch=sm_90a -o build/bound_store benchmarks/bound_store.cu && build/bound_store
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

using u32 = uint32_t;

enum class Kind { Floor, Fp32, Half2, Mma, MmaFit };
__host__ __device__ constexpr bool uses_mma(Kind kind) { return kind == Kind::Mma || kind == Kind::MmaFit; }

constexpr int kTokens = 65536, kHeads = 8, kDim = 128, kRounds = 21, kWarps = 8;
constexpr int kTokenStride = 2 * kHeads * kDim;  // the keys of a token, then its values
// A tile: 32 keys of 64 bytes, 2 blocks of 16 values, 32 scales of keys, 32 of values; a page has two of each head.
constexpr int kPage = 64, kValues = 32 * 64, kValueBlock = 16 * 64, kScales = 2 * kValues, kTileBytes = kScales + 128;
constexpr int64_t kInputBytes = 2ll * kTokens * kTokenStride, kCacheBytes = int64_t{kTokens} / 32 * kHeads * kTileBytes;
constexpr float kInverseRoot = 0.08838834764f;                // 1 / sqrt(128)
constexpr float kClamp = 3.5f, kStep = 0.02152017374955984f;  // levels are multiples of kStep
constexpr int kLevels[8] = {6, 18, 31, 44, 58, 75, 96, 127};
constexpr u32 kAll = 0xFFFFFFFF;

struct Args {
  const __nv_bfloat16* input;
  const int64_t* slots;
  const u32* signs;  // [keys, values][4][32 lanes][4] masks: where they are read
  uint8_t* cache;
  int* unhandled;
};

// ---- a word is two numbers of 16 bits

__host__ __device__ constexpr u32 splat(u32 bits) { return bits * 0x10001; }
__device__ __half2 halves(u32 word) { return reinterpret_cast<const __half2&>(word); }
__device__ u32 word(__half2 pair) { return reinterpret_cast<const u32&>(pair); }
__device__ u32 word(float x) { return word(__float2half2_rn(x)); }
__device__ u32 add(u32 a, u32 b) { return word(__hadd2_rn(halves(a), halves(b))); }
__device__ u32 sub(u32 a, u32 b) { return word(__hsub2_rn(halves(a), halves(b))); }
__device__ u32 mul(u32 a, u32 b) { return word(__hmul2_rn(halves(a), halves(b))); }
__device__ u32 fma_of(u32 a, u32 b, u32 c) { return word(__hfma2(halves(a), halves(b), halves(c))); }
__device__ u32 fma_sat(u32 a, u32 b, u32 c) { return word(__hfma2_sat(halves(a), halves(b), halves(c))); }
__device__ float add(float a, float b) { return a + b; }
__device__ float sub(float a, float b) { return a - b; }
__device__ u32 minus(u32 a) { return a ^ 0x80008000; }
__device__ float minus(float a) { return -a; }
__device__ float fma_of(float a, float b, float c) { return fmaf(a, b, c); }

__device__ u32 mul_bf16(u32 a, u32 b) {
  const auto pair = [](u32 word) { return reinterpret_cast<const __nv_bfloat162&>(word); };
  const __nv_bfloat162 product = __hmul2_rn(pair(a), pair(b));
  return reinterpret_cast<const u32&>(product);
}

// The larger magnitude, in one instruction; its sign means nothing.
__device__ u32 max_magnitude(u32 a, u32 b) {
  u32 larger;
  asm("max.NaN.xorsign.abs.bf16x2 %0,%1,%2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}

// The largest magnitude of a vector, which lies in four lanes.
__device__ u32 vector_max(const u32 (&x)[16]) {
  u32 pairs[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) pairs[i] = max_magnitude(x[i], x[i + 8]);
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = max_magnitude(pairs[i], pairs[i + 4]);
  u32 largest = max_magnitude(max_magnitude(pairs[0], pairs[1]), max_magnitude(pairs[2], pairs[3]));
  largest = max_magnitude(largest, largest >> 16 | largest << 16);
  largest = max_magnitude(largest, __shfl_xor_sync(kAll, largest, 1));
  return max_magnitude(largest, __shfl_xor_sync(kAll, largest, 2)) & 0x7FFF;
}

// A sum over the four lanes of a vector.
template <typename Number>
__device__ Number quad_sum(Number x) {
  x += __shfl_xor_sync(kAll, x, 1);
  return x + __shfl_xor_sync(kAll, x, 2);
}

__device__ float inverse_root(float x) {
  float root;
  asm("rsqrt.approx.ftz.f32 %0,%1;" : "=f"(root) : "f"(x));
  return root;
}

// A lane's share of the Hadamard matrix, as +-1024: integers times 2^-24 leave with 2^-14, as normal numbers.
__device__ void hadamard_fragment(u32 (&matrix)[4], int lane) {
  const auto entry = [](int row, int column) { return __popc(row & column) & 1 ? 0xE400u : 0x6400u; };
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i % 2 * 8, column = lane % 4 * 2 + i / 2 * 8;
    matrix[i] = entry(row, column) | entry(row, column + 1) << 16;
  }
}

__device__ void mma(u32& upper, u32& lower, const u32 (&matrix)[4], u32 first, u32 second) {
  asm("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1},{%2,%3,%4,%5},{%6,%7},{%8,%8};"
      : "=r"(upper), "=r"(lower)
      : "r"(matrix[0]), "r"(matrix[1]), "r"(matrix[2]), "r"(matrix[3]), "r"(first), "r"(second), "r"(0));
}

// ---- 8 tokens of a head in a warp: half j of x[4 i + r] in lane 4 t + q is channel 32 i + 8 q + 2 r + j of token t

struct Encoded {
  u32 codes[8];  // mma: nibbles of units 0..7 in bytes 0 and 2, for two tokens; else 4 words, of one token
  float scale;   // of token lane / 4, right in the lanes 4 t
};

// Volatile, so that the second 8 tokens read them again: kept, they would take 16 registers.
__device__ void flip_signs(u32 (&x)[16], const u32* signs) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u32 mask[4];
    asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(mask[0]), "=r"(mask[1]), "=r"(mask[2]), "=r"(mask[3])
                 : "l"(signs + 128 * i));
#pragma unroll
    for (int r = 0; r < 4; ++r) x[4 * i + r] ^= mask[r];
  }
}

struct Length {
  float inverse, sigma;  // of the integers 1 / |x|; of the vector |x| / sqrt(128)
};

// Snaps a vector to integers of 8 bits and a sign, and flips its signs.
__device__ Length to_integers(u32 (&x)[16], const u32* signs) {
  int exponent = vector_max(x) >> 7;
  int shift = 0;
  // Rare: too large for a single factor, or so small (zero, too) that a float16 scale is zero.
  if (__any_sync(kAll, exponent < 8 || exponent > 134)) {
    shift = exponent > 134 ? 120 : 0;
    const u32 factor = exponent < 8 ? 0 : splat((127 - shift) << 7);
#pragma unroll
    for (int i = 0; i < 16; ++i) x[i] = mul_bf16(x[i], factor);
    exponent = exponent < 8 ? 127 : exponent - shift;
  }
  const u32 factor = splat(exponent < 128 ? (128 - exponent) << 7 : 128u >> (exponent - 127));  // 2^(1 - exponent)
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i] = mul_bf16(x[i], factor);
  u32 squares = 0;
#pragma unroll
  for (int i = 0; i < 16; i += 2) {
    const u32 magnitudes = __byte_perm(x[i], x[i + 1], 0x6420);
    squares = __dp4a(magnitudes, magnitudes, squares);
  }
  flip_signs(x, signs);
  const float sum = static_cast<float>(quad_sum(squares));
  const float inverse = sum > 0 ? inverse_root(sum) : 0.0f, unit = __uint_as_float((exponent + shift - 7) << 23);
  return {inverse, sum * inverse * unit * kInverseRoot};
}

// The stages of a Hadamard transform between the registers whose numbers differ in a bit under LIMIT.
template <int LIMIT, typename Number, int N>
__device__ void butterflies(Number (&x)[N]) {
#pragma unroll
  for (int distance = 1; distance < LIMIT; distance *= 2) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i & distance) continue;
      const Number first = x[i], second = x[i + distance];
      x[i] = add(first, second), x[i + distance] = sub(first, second);
    }
  }
}

// All stages but that of the halves of a word. A lane's bit and a register's bit go together and change places, so that
// half of the registers travel; where both bits are set afterwards, the sign is wrong (channel_at knows).
template <typename Number, int N>
__device__ void rotate_in_quad(Number (&x)[N], int lane, Number one) {
  butterflies<N / 4>(x);
#pragma unroll
  for (int bit = 0; bit < 2; ++bit) {
    const int distance = N / 4 << bit;
    const Number sign = lane >> bit & 1 ? minus(one) : one, opposite = minus(sign);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i & distance) continue;
      const Number first = x[i], second = x[i + distance];
      x[i] = fma_of(sign, second, first), x[i + distance] = fma_of(opposite, second, first);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i & distance) continue;
      const Number mine = x[i], other = __shfl_xor_sync(kAll, x[i + distance], 1 << bit);
      x[i] = add(mine, other), x[i + distance] = sub(mine, other);
    }
  }
}

// Codes as integers in halves; `factor` makes x relative to the clamp, and so it is left in `relative`.
__device__ void quantize(u32 (&x)[16], u32 factor, u32 (&relative)[16]) {
  const u32 c1 = word(0.90566469f), c3 = word(-0.60099388f), c5 = word(0.25981097f), half = splat(0x3800);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    relative[i] = mul(x[i], factor);
    const u32 square = word(__hmul2_sat(halves(relative[i]), halves(relative[i])));
    const u32 slope = fma_of(fma_of(square, c5, c3), square, c1);
    x[i] = mul(fma_sat(slope, relative[i], half), splat(15));  // 15 * 2^-24
  }
}

__device__ void pack(const u32 (&x)[16], u32 (&codes)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) codes[i] = x[4 * i] + x[4 * i + 1] * 16 + (x[4 * i + 2] + x[4 * i + 3] * 16) * 256;
}

// The scale of least squares over that of the norm, of token lane / 4.
__device__ float fit_of(const u32 (&codes)[8], const u32 (&relative)[16], int lane) {
  u32 products[2] = {}, squares[2] = {};  // of the lane's two tokens
#pragma unroll
  for (int part = 0; part < 4; ++part) {
    const int token = part & 1, unit = 4 * (part / 2), half = token ? 0x7632 : 0x5410;
    u32 nibbles = __byte_perm(codes[unit] + codes[unit + 1] * 256, codes[unit + 2] + codes[unit + 3] * 256, half);
    nibbles = (nibbles ^ (~nibbles >> 3 & 0x11111111) * 7) & 0x77777777;  // codes of a sign count from the middle
#pragma unroll
    for (int i = unit; i < unit + 4; i += 2) {
      // Four bytes of the table, chosen by four nibbles; 448 = 128 kClamp: 1 / 128 is the unit of the magnitudes.
      const u32 level =
          __byte_perm(kLevels[0] | kLevels[1] << 8 | kLevels[2] << 16 | kLevels[3] << 24,
                      kLevels[4] | kLevels[5] << 8 | kLevels[6] << 16 | kLevels[7] << 24, nibbles >> 8 * (i - unit));
      const auto magnitude = [&](int at) { return mul(word(__habs2(halves(relative[at]))), splat(448)); };
      squares[token] = __dp4a(level, level, squares[token]);
      products[token] = __dp2a_lo(__byte_perm(magnitude(i), magnitude(i + 8), half), level, products[token]);
      products[token] = __dp2a_hi(__byte_perm(magnitude(i + 1), magnitude(i + 9), half), level, products[token]);
    }
  }
  // Eight lanes have the tokens 2 q and 2 q + 1: the first exchange leaves each of them one token.
  const bool odd = lane & 4;
  const auto sum = [&](const u32(&of)[2]) {
    u32 total = (odd ? of[1] : of[0]) + __shfl_xor_sync(kAll, odd ? of[0] : of[1], 4);
    total += __shfl_xor_sync(kAll, total, 8);
    return static_cast<float>(total + __shfl_xor_sync(kAll, total, 16));
  };
  const float fit = __fdividef(sum(products), sum(squares)) * (1 / (128 * kStep));
  return __shfl_sync(kAll, fit, lane / 8 + (lane & 4));
}

template <Kind KIND>
__device__ void encode(u32 (&x)[16], const u32* signs, const u32 (&matrix)[4], int lane, Encoded& out) {
  u32 relative[16];
  if constexpr (KIND == Kind::Floor) {
    out.scale = __uint_as_float(vector_max(x) << 16);
#pragma unroll
    for (int i = 0; i < 16; ++i) x[i] &= splat(15);
    pack(x, out.codes);
  } else if constexpr (KIND == Kind::Fp32) {
    flip_signs(x, signs);
    float y[32], squares[2] = {};
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      y[i] = __uint_as_float(i % 2 ? x[i / 2] & 0xFFFF0000 : x[i / 2] << 16);
      squares[i % 2] = fmaf(y[i], y[i], squares[i % 2]);
    }
    const float sum = quad_sum(squares[0] + squares[1]), inverse = inverse_root(sum);
    out.scale = sum * inverse * kInverseRoot;
    rotate_in_quad(y, lane, 1.0f);
#pragma unroll
    for (int i = 0; i < 16; ++i) x[i] = word(__floats2half2_rn(y[2 * i], y[2 * i + 1]));
    quantize(x, word(inverse * (1 / kClamp)), relative);
    pack(x, out.codes);
  } else if constexpr (KIND == Kind::Half2) {
    const Length length = to_integers(x, signs);
    out.scale = length.sigma;
#pragma unroll
    for (int i = 0; i < 16; ++i)  // the sum and the difference of a word's halves
      x[i] = word(__hfma2(__high2half2(halves(x[i])), halves(0xBC003C00), __low2half2(halves(x[i]))));
    rotate_in_quad(x, lane, splat(0x3C00));
    quantize(x, word(length.inverse * (0x1p24f / kClamp)), relative);
    pack(x, out.codes);
  } else {
    const Length length = to_integers(x, signs);
    u32 y[16];  // of the tokens 2 q and 2 q + 1; y[p] row lane / 4 of product p, y[p + 8] eight rows below
#pragma unroll
    for (int p = 0; p < 8; ++p) mma(y[p], y[p + 8], matrix, x[2 * p], x[2 * p + 1]);
    butterflies<8>(y);
    const float factor = length.inverse * (0x1p14f / kClamp);
    const float first = __shfl_sync(kAll, factor, 8 * (lane % 4)),
                second = __shfl_sync(kAll, factor, 8 * (lane % 4) + 4);
    quantize(y, word(__floats2half2_rn(first, second)), relative);
#pragma unroll
    for (int p = 0; p < 8; ++p) out.codes[p] = y[p] + y[p + 8] * 16;
    out.scale = length.sigma;
    if constexpr (KIND == Kind::MmaFit) out.scale *= fit_of(out.codes, relative, lane);
  }
}

// Keys: 64 bytes a token. Values: 4 bytes are a unit (two channels) of the tokens 2 q, 2 q + 1, 2 q + 8, 2 q + 9.
template <Kind KIND>
__device__ void store(const Encoded (&encoded)[2], bool value, uint8_t* tile, int first, int lane) {
  const int row = lane / 4, q = lane % 4;
  uint8_t *keys = tile + first * 64, *values = tile + kValues + first / 16 * kValueBlock;
  const auto store16 = [](uint8_t* to, u32 a, u32 b, u32 c, u32 d) { *reinterpret_cast<uint4*>(to) = {a, b, c, d}; };
  if (value) {
    u32 units[8];
    uint8_t* to = values + 16 * lane;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if constexpr (uses_mma(KIND)) {
        units[i] = __byte_perm(encoded[0].codes[i], encoded[1].codes[i], 0x6420);
      } else if (i % 2 == 0) {  // a lane has one token, so it trades half of its units for its neighbour's other half
        const bool odd = row & 1;
        const u32 low = encoded[0].codes[i / 2], high = encoded[1].codes[i / 2];
        const u32 mine = __byte_perm(low, high, odd ? 0x7632 : 0x5410);
        const u32 other = __shfl_xor_sync(kAll, __byte_perm(low, high, odd ? 0x5410 : 0x7632), 4);
        units[i] = __byte_perm(mine, other, odd ? 0x2604 : 0x6240);
        units[i + 1] = __byte_perm(mine, other, odd ? 0x3715 : 0x7351);
      }
    }
    if constexpr (!uses_mma(KIND)) to = values + 16 * (4 * (2 * q + row % 2) + row / 2);
    store16(to, units[0], units[1], units[2], units[3]);
    store16(to + kValueBlock / 2, units[4], units[5], units[6], units[7]);
  } else {
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      const u32(&codes)[8] = encoded[group].codes;
      if constexpr (uses_mma(KIND)) {
        u32 both[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) both[i] = codes[2 * i] + codes[2 * i + 1] * 256;
#pragma unroll
        for (int token = 0; token < 2; ++token) {
          const u32 half = token ? 0x7632 : 0x5410;
          uint8_t* to = keys + (8 * group + 2 * q + token) * 64 + 8 * row;
          *reinterpret_cast<uint2*>(to) = {__byte_perm(both[0], both[1], half), __byte_perm(both[2], both[3], half)};
        }
      } else {
        store16(keys + (8 * group + row) * 64 + 16 * q, codes[0], codes[1], codes[2], codes[3]);
      }
    }
  }
  __half* scales = reinterpret_cast<__half*>(tile + kScales + (value ? 64 : 0)) + first;
  if (q == 0) {
    for (int group = 0; group < 2; ++group)
      scales[8 * group + row] = __float2half_rn(fminf(encoded[group].scale, 65504.0f));
  }
}

// A warp stores the keys or the values of 16 tokens of a head. It loads all of them first: other warps hide that.
template <Kind KIND, int BLOCKS>
__global__ void __launch_bounds__(32 * kWarps, BLOCKS) store_kernel(const __grid_constant__ Args args) {
  const int lane = threadIdx.x % 32, item = blockIdx.x * kWarps + threadIdx.x / 32;
  const int token = item / (2 * kHeads) * 16, head = item % kHeads;
  const bool value = item / kHeads % 2;
  const __nv_bfloat16* from = args.input + static_cast<int64_t>(token + lane / 4) * kTokenStride +
                              (value * kHeads + head) * kDim + 8 * (lane % 4);
  u32 x[2][16];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint4 part = __ldcs(reinterpret_cast<const uint4*>(from + i / 4 * 8 * kTokenStride + i % 4 * 32));
    u32* to = x[i / 4] + i % 4 * 4;
    to[0] = part.x, to[1] = part.y, to[2] = part.z, to[3] = part.w;
  }
  u32 matrix[4];
  hadamard_fragment(matrix, lane);
  const int64_t slot = __ldg(args.slots + token + lane % 16), base = __shfl_sync(kAll, slot, 0);
  if (!__all_sync(kAll, slot == base + lane % 16 && base % 16 == 0)) *args.unhandled = 1;
  const int page = static_cast<int>(base / kPage), place = static_cast<int>(base % kPage);
  uint8_t* tile = args.cache + ((static_cast<int64_t>(page) * kHeads + head) * (kPage / 32) + place / 32) * kTileBytes;
  Encoded encoded[2];
#pragma unroll
  for (int group = 0; group < 2; ++group)
    encode<KIND>(x[group], args.signs + value * 512 + lane * 4, matrix, lane, encoded[group]);
  store<KIND>(encoded, value, tile, place % 32, lane);
}

// ---- data, time, and whether the device sums and rounds as the header says

__device__ uint64_t hash_of(int64_t i) {
  uint64_t hash = (i + 1) * 0x9E3779B97F4A7C15;
  hash = (hash ^ hash >> 30) * 0xBF58476D1CE4E5B9;
  hash = (hash ^ hash >> 27) * 0x94D049BB133111EB;
  return hash ^ hash >> 31;
}

// Counts sums unlike the integers' sum rounded once, and products unlike the exact ones rounded to even.
__global__ void count_wrong(int* wrong) {
  const int lane = threadIdx.x;
  const uint64_t hash = hash_of(blockIdx.x * 32 + lane);
  const u32 mask = blockIdx.x % 2 ? 0x00FF00FF : 0x80FF80FF;  // without signs sums get large enough to be rounded
  const u32 x[2] = {static_cast<u32>(hash) & mask, static_cast<u32>(hash >> 32) & mask};
  u32 matrix[4], sums[2];
  hadamard_fragment(matrix, lane);
  mma(sums[0], sums[1], matrix, x[0], x[1]);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    int sum = 0;
#pragma unroll
    for (int k = 0; k < 16; ++k) {
      const u32 bits = __shfl_sync(kAll, x[k / 8], column * 4 + k % 8 / 2) >> k % 2 * 16;
      const bool negative = (__popc(row & k) + (bits >> 15)) & 1;
      sum += negative ? -static_cast<int>(bits & 255) : bits & 255;
    }
    const float got = i % 2 ? __high2float(halves(sums[i / 2])) : __low2float(halves(sums[i / 2]));
    if (got != __half2float(__float2half_rn(sum * 0x1p-14f))) atomicAdd(wrong, 1);
  }
  const u32 number = (hash & 0x807F) | (100 + (hash >> 32) % 31) << 7;  // bfloat16 with an exponent from 100 to 130
  const u32 product = mul_bf16(number, splat(16)) & 0xFFFF;             // 2^-129 makes 130 the smallest normal one
  const float exact = __uint_as_float((number & 0x7FFF) << 16) * 16;
  if (product != (static_cast<u32>(rintf(exact)) | (number & 0x8000))) atomicAdd(wrong + 1, 1);
}

// Gaussian, by a hash; channel 17 of the keys is four times larger.
__global__ void fill(__nv_bfloat16* x) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const uint64_t hash = hash_of(i);
  const float radius = sqrtf(-2 * logf((static_cast<u32>(hash) + 0.5f) * 0x1p-32f));
  const bool large = i % kTokenStride < kHeads * kDim && i % kDim == 17;
  x[i] = __float2bfloat16((large ? 4 : 1) * radius * cospif((hash >> 32) * 0x1p-31f));
}

// Reads more than the L2 holds, and so leaves nothing in it that a kernel would have to write back.
constexpr int64_t kFlushWords = 512 << 18;
__global__ void flush(u32* words) {
  u32 all = 0;
  for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < kFlushWords; i += gridDim.x * blockDim.x) all ^= words[i];
  if (all == 0x12345678) *words = all;
}

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::printf("CUDA: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

template <typename T>
T* on_device(int64_t count, const T* from = nullptr) {
  T* to;
  check(cudaMalloc(&to, count * sizeof(T)));
  check(from ? cudaMemcpy(to, from, count * sizeof(T), cudaMemcpyHostToDevice) : cudaMemset(to, 1, count * sizeof(T)));
  return to;
}

template <typename T>
std::vector<T> on_host(const T* from, int64_t count) {
  std::vector<T> to(count);
  check(cudaMemcpy(to.data(), from, count * sizeof(T), cudaMemcpyDeviceToHost));
  return to;
}

float median(std::vector<float> x) {
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}

void transform(double* x, int n) {
  for (int distance = 1; distance < n; distance *= 2) {
    for (int i = 0; i < n; ++i) {
      if (i & distance) continue;
      const double first = x[i], second = x[i + distance];
      x[i] = first + second, x[i + distance] = first - second;
    }
  }
}

// ---- decoding

struct Place {
  int channel;
  bool negated;
};

// The channel of a nibble of a unit, the 64 units in the order of a key's bytes.
Place channel_at(Kind kind, bool value, int unit, int nibble) {
  if (uses_mma(kind)) {
    const int product = unit % 8, row = unit / 8 + 8 * nibble;
    return {32 * (product / 2) + 8 * (row / 2 % 4) + 4 * (product % 2) + 2 * (row / 8) + row % 2, false};
  }
  const int q = unit / 16, part = value ? unit / 2 % 4 : unit / 4 % 4, half = value ? unit / 8 % 2 : unit / 2 % 2;
  return {half + 2 * nibble + 4 * (unit % 2) + 8 * part + 32 * q, ((q & part & 1) ^ ((q & part) >> 1)) != 0};
}

// |y - decoded|^2 / |y|^2 over 255 tokens, in all places of a page.
double error_of(Kind kind, const std::vector<uint8_t>& cache, const std::vector<int64_t>& slots,
                const std::vector<__nv_bfloat16>& input, const std::vector<int>& negative) {
  double error = 0, power = 0;
  for (int n = 0; n < kTokens / 257 * 2 * kHeads; ++n) {
    const int head = n % kHeads;
    const bool value = n / kHeads % 2;
    const int64_t token = n / (2 * kHeads) * 257, slot = slots[token];
    double y[kDim];
    for (int c = 0; c < kDim; ++c) {
      y[c] = __bfloat162float(input[token * kTokenStride + (value * kHeads + head) * kDim + c]) / std::sqrt(kDim);
      if (negative[value * kDim + c]) y[c] = -y[c];
    }
    transform(y, kDim);
    const int place = slot % 32, in_block = place % 16;
    const uint8_t* tile = &cache[((slot / kPage * kHeads + head) * (kPage / 32) + slot % kPage / 32) * kTileBytes];
    __half scale;
    std::memcpy(&scale, tile + kScales + 64 * value + 2 * place, 2);
    for (int i = 0; i < kDim; ++i) {
      const int unit = i / 2, nibble = i % 2;
      const int in_values = place / 16 * kValueBlock + unit % 8 / 4 * (kValueBlock / 2) + unit / 8 * 64 +
                            in_block % 8 / 2 * 16 + unit % 4 * 4 + in_block / 8 * 2 + in_block % 2;
      const int code = tile[value ? kValues + in_values : place * 64 + unit] >> 4 * nibble & 15;
      const double level = kStep * (code < 8 ? -kLevels[7 - code] : kLevels[code - 8]);
      const Place at = channel_at(kind, value, unit, nibble);
      const double want = y[at.channel], got = __half2float(scale) * (at.negated ? -level : level);
      error += (want - got) * (want - got), power += want * want;
    }
  }
  return error / power;
}

int main() {
  constexpr int blocks = 4096;
  int* wrong = on_device(2, std::vector<int>(2).data());
  count_wrong<<<blocks, 32>>>(wrong);
  const std::vector<int> counts = on_host(wrong, 2);
  std::printf("wrong: %d of %d sums, %d of %d products\n", counts[0], 128 * blocks, counts[1], 32 * blocks);

  std::mt19937 random(7);
  std::vector<int64_t> pages(kTokens / kPage), slots(kTokens);
  std::iota(pages.begin(), pages.end(), 0);
  std::shuffle(pages.begin(), pages.end(), random);
  for (int t = 0; t < kTokens; ++t) slots[t] = pages[t / kPage] * kPage + t % kPage;

  std::vector<int> negative(2 * kDim);
  for (int& sign : negative) sign = random() & 1;
  std::vector<u32> signs(4 * kDim * 2);
  for (int i = 0; i < 2 * 512; ++i) {
    const int c = i / 512 * kDim + i / 128 % 4 * 32 + i / 4 % 4 * 8 + i % 4 * 2;
    signs[i] = negative[c] * 0x8000u | negative[c + 1] * 0x80000000u;
  }

  __nv_bfloat16* input = on_device<__nv_bfloat16>(kInputBytes / 2);
  fill<<<kInputBytes / 2 / 256, 256>>>(input);
  const Args args{input, on_device(kTokens, slots.data()), on_device(signs.size(), signs.data()),
                  on_device<uint8_t>(kCacheBytes), on_device(1, std::vector<int>(1).data())};
  const std::vector<__nv_bfloat16> host_input = on_host(input, kInputBytes / 2);
  struct Variant {
    const char* name;
    Kind kind;
    void (*kernel)(const Args);
    std::vector<float> times;
    double error;
  };
  std::vector<Variant> variants = {{"floor", Kind::Floor, store_kernel<Kind::Floor, 4>},
                                   {"fp32", Kind::Fp32, store_kernel<Kind::Fp32, 3>},
                                   {"half2", Kind::Half2, store_kernel<Kind::Half2, 3>},
                                   {"mma", Kind::Mma, store_kernel<Kind::Mma, 3>},
                                   {"mma, fit", Kind::MmaFit, store_kernel<Kind::MmaFit, 3>}};
  const auto run = [&](const Variant& variant) { variant.kernel<<<kTokens / kWarps, 32 * kWarps>>>(args); };
  for (Variant& variant : variants) {
    check(cudaMemset(args.cache, 0, kCacheBytes));
    run(variant);
    check(cudaGetLastError());
    variant.error = error_of(variant.kind, on_host(args.cache, kCacheBytes), slots, host_input, negative);
  }
  if (on_host(args.unhandled, 1)[0] != 0) std::printf("some slots were not consecutive\n");

  constexpr int64_t copied = (kInputBytes + kCacheBytes) / 2;
  char *copy_from = on_device<char>(copied), *copy_to = on_device<char>(copied);
  u32* flushed = on_device<u32>(kFlushWords);
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  const auto time = [&](std::vector<float>& times, const auto& work) {
    flush<<<1056, 512>>>(flushed);
    check(cudaEventRecord(begin));
    work();
    check(cudaEventRecord(end));
    check(cudaEventSynchronize(end));
    float milliseconds;
    check(cudaEventElapsedTime(&milliseconds, begin, end));
    times.push_back(1000 * milliseconds);
  };
  std::vector<float> copies;
  for (int round = 0; round < kRounds; ++round) {
    time(copies, [&] { check(cudaMemcpyAsync(copy_to, copy_from, copied, cudaMemcpyDeviceToDevice)); });
    for (Variant& variant : variants) time(variant.times, [&] { run(variant); });
  }
  const float yardstick = median(copies);
  std::printf("cudaMemcpy of as many bytes: %.1f us, %.2f TB/s\n", yardstick, 2e-6 * copied / yardstick);
  std::printf("%-10s %8s %14s %8s %9s\n", "variant", "us", "of a copy", "error", "registers");
  for (const Variant& variant : variants) {
    cudaFuncAttributes attributes;
    check(cudaFuncGetAttributes(&attributes, variant.kernel));
    const float us = median(variant.times);
    std::printf("%-10s %8.1f %14.2f ", variant.name, us, yardstick / us);
    std::printf(variant.kind == Kind::Floor ? "       -" : "%8.5f", variant.error);
    std::printf(" %9d\n", attributes.numRegs);
  }
}
