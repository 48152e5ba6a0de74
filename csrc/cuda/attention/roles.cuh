// What kernels share whose warpgroups have roles: one computes scores and weights of 64 tokens, others sum weighted
// values of the unit before (attention/key_tiles/kernel.cuh, mla/key_tiles/roles.cuh). Keys are the long side of their
// products, rows of queries are columns, and weights reach the warpgroups of values through a buffer in shared memory.
// (mla/row_tiles/roles.cuh has references and the number of buffers in common with them.)
#pragma once

#include "cuda/attention/softmax_math.cuh"
#include "cuda/common/device.cuh"
#include "cuda/common/wgmma.cuh"

namespace turboquant::cuda::roles {

constexpr int kWeightBuffers = 2;

// The stage and the buffer of weights of a unit, and the phases of their barriers. All warpgroups count units alike.
struct Turn {
  int stage = 0;
  uint32_t phase = 0, count = 0;

  __device__ __forceinline__ void next(int stages) {
    ++count;
    if (++stage == stages) stage = 0, phase ^= 1;
  }
  // As next() so many times.
  __device__ __forceinline__ void skip(int units, int stages) {
    count += units, stage += units;
    phase ^= stage / stages & 1, stage %= stages;
  }
  __device__ __forceinline__ int buffer() const { return count % kWeightBuffers; }
  __device__ __forceinline__ uint32_t buffer_phase() const { return count / kWeightBuffers & 1; }
};

constexpr int kScoresBarrier = 1;  // a named barrier, of the warpgroup of scores

// ---- Weights

// Whether a block of 16 tokens, of the four in a unit, counts negatively: its weights are negated, and so are the
// levels of its values, which leaves their products as they are. Tensor cores add float32 numbers by cutting digits
// off, so sums of codes, which are all positive, would become too small by as many units in the last place as there
// are products: 3% over 131,072 tokens that weigh the same. With such signs they stay near 0, and so does what is cut
// off.
__host__ __device__ constexpr bool counts_negatively(int block) { return block == 1 || block == 2; }

// Four 8 x 8 matrices of 16-bit elements, or two, to shared memory, transposed: lane i gives the address of row i % 8
// of matrix i / 8.
__device__ __forceinline__ void store_transposed(uint32_t row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
#endif
}
__device__ __forceinline__ void store_transposed(uint32_t row, uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(row), "r"(a), "r"(b) : "memory");
#endif
}

// ---- References: what exponents are relative to
//
// A weight is 2^exponent times the token's scale, rounded to float16. A row's reference follows the largest such
// product of a unit: it is raised as soon as one is 2^kRaise above it, and lowered, every kLowerUnits units, when all
// are 2^kLower below it, so that weights keep their digits behind a token that had nearly all weight. Sums are float32
// and follow the reference; it is never lowered to less than 2^-kDeepest of what it once was, where nothing counts any
// more. In most units no reference moves: then nobody needs to know the largest product.

constexpr float kRaise = 12, kLower = 4, kDeepest = 40;
constexpr int kLowerUnits = 8;
constexpr float kNothing = -1e30f;               // a row's largest product before the first key
constexpr float kNobody = 1e30f;                 // and that of a row that does not exist: no reference moves
constexpr float kLeastScale = 1.0f / (1 << 24);  // of a token in its reference: that of a zero vector is 0

// Lets a row's reference follow. most: the logarithm of the unit's largest product, relative to the reference `old`.
// top: the largest one so far. set(x): the reference becomes x. factor: of the row's sums. less: to be added to its
// exponents. mla/key_tiles/scores.cuh decides the same in code of its own (move_references): change both.
template <typename F>
__device__ __forceinline__ void move_reference(float most, float old, float& top, F&& set, float& factor, float& less) {
  most += old;
  const bool first = top == kNothing;
  const float highest = fmaxf(top, most), wanted = fmaxf(most, highest - kDeepest);
  const bool moves = most > -INFINITY && (first || most > old + kRaise || wanted < old - kLower);
  if (most > -INFINITY) top = highest;
  if (moves) set(wanted);
  factor = moves && !first ? exp2_fast(old - wanted) : 1;
  less = moves ? old - wanted : 0;
}

}  // namespace turboquant::cuda::roles
