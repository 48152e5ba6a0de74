// From codes to operands by masks, shifts and byte permutations alone.
//
// Scores are products of bytes: a word of codes is one or two words of bytes. Sums of values are products of float16: a
// code in the low bits of a float16 whose other bits are 0 is the subnormal number code * 2^-24, and tensor cores
// multiply subnormal numbers exactly. There, a word holds codes of two tokens in its halves. Pair i are code i of the
// low half and code i of the high half.
#pragma once

#include "cuda/common/halves.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/mla/shape.cuh"

namespace turboquant::cuda::mla {

// What pair i is multiplied by so that a code 1 is 1. Odd pairs of kNibbles are left four bits higher, hence 16 times
// as large; pairs of kBytes are levels.
__device__ __forceinline__ float inverse_unit(OperandKind kind, int i) {
  return kind == OperandKind::kBytes              ? 1.0f
         : kind == OperandKind::kNibbles && i % 2 ? 1.0f * (1 << 20)
                                                  : 1.0f * (1 << 24);
}
template <OperandKind KIND>
constexpr int kPairsOfWord = KIND == OperandKind::kBytes ? 2 : 4;

// x | (y & MASK)
template <uint32_t MASK>
__device__ __forceinline__ uint32_t or_masked(uint32_t x, uint32_t y) {
  uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0xF8;" : "=r"(out) : "r"(x), "r"(y), "n"(MASK));
  return out;
}

// x & MASK, or ~x & MASK
template <uint32_t MASK, bool NEGATIVE>
__device__ __forceinline__ uint32_t bits(uint32_t x) {
  return NEGATIVE ? ~x & MASK : x & MASK;
}
// The lower half of each byte of x beside the upper half of that of y.
__device__ __forceinline__ uint32_t join_halves(uint32_t x, uint32_t y) {
  uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(out) : "r"(0x0F0F0F0F), "r"(x), "r"(y));
  return out;
}

template <OperandKind KIND>
constexpr int kBytesOfWord = KIND == OperandKind::kBytes ? 1 : 2;  // words of bytes

// Even codes as the bytes of one word, odd codes as those of another. fifth: of kPlanes, the fifth bit of code i in bit
// 4 + i % 2 of byte i / 2, see align_fifth.
template <OperandKind KIND>
__device__ __forceinline__ void expand_bytes(uint32_t x, uint32_t fifth, uint32_t (&bytes)[kBytesOfWord<KIND>]) {
  if constexpr (KIND == OperandKind::kBytes) {
    bytes[0] = x;
  } else {
    bytes[0] = x & 0x0F0F0F0F, bytes[1] = x >> 4 & 0x0F0F0F0F;
    if constexpr (KIND == OperandKind::kPlanes) {
      bytes[0] = or_masked<0x10101010>(bytes[0], fifth), bytes[1] = or_masked<0x10101010>(bytes[1], fifth >> 1);
    }
  }
}

// NEGATIVE: the tokens count negatively (counts_negatively). Flipped codes are the codes of negative levels; where
// elements are levels, the product takes the sign.
template <OperandKind KIND, bool NEGATIVE>
__device__ __forceinline__ void expand_pairs(uint32_t x, uint32_t fifth, uint32_t (&pair)[kPairsOfWord<KIND>]) {
  if constexpr (KIND == OperandKind::kNibbles) {
    const uint32_t y = x >> 8;
    pair[0] = bits<0x000F000F, NEGATIVE>(x), pair[1] = bits<0x00F000F0, NEGATIVE>(x);
    pair[2] = bits<0x000F000F, NEGATIVE>(y), pair[3] = bits<0x00F000F0, NEGATIVE>(y);
  } else if constexpr (KIND == OperandKind::kPlanes) {
    // The lower five bits of a byte are a code.
    const uint32_t even = join_halves(x, fifth), odd = join_halves(x >> 4, fifth >> 1);
    pair[0] = bits<0x001F001F, NEGATIVE>(even), pair[1] = bits<0x001F001F, NEGATIVE>(odd);
    pair[2] = bits<0x001F001F, NEGATIVE>(even >> 8), pair[3] = bits<0x001F001F, NEGATIVE>(odd >> 8);
  } else {
    const uint32_t bytes = x ^ 0x80808080;
    pair[0] = byte_levels(bytes, 0x4240), pair[1] = byte_levels(bytes, 0x4341);
  }
}

// A word of a plane, in which the fifth bits of word j of a channel group are bits 2 j and 2 j + 1 of each byte.
__device__ __forceinline__ uint32_t align_fifth(uint32_t plane, int j) {
  return __funnelshift_r(plane, plane, 2 * j - 4);  // the amount counts modulo 32
}

// Where channel c stands in the order of products for scores: product `step`, place k of 32. A product takes two
// neighbouring words of 16 bytes of each token, or their even or odd codes.
struct ChannelPlace {
  int step, k;
};
__device__ __forceinline__ ChannelPlace place_of_channel(OperandKind kind, int c) {
  return kind == OperandKind::kBytes ? ChannelPlace{c / 32, c % 32} : ChannelPlace{c / 64 * 2 + c % 2, c % 64 / 2};
}

// Where element k of column n of an operand with `tiles` tiles of eight columns stands, in bytes: core matrices of 128
// bytes as common/wgmma.cuh takes them.
__device__ __forceinline__ int place_in_operand(int tiles, int n, int k) {
  return (k / 8 * tiles + n / 8) * 128 + n % 8 * 16 + k % 8 * 2;
}

}  // namespace turboquant::cuda::mla
