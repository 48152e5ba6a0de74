// The signed orthonormal Walsh-Hadamard transform of one vector, in the fixed order of docs/format.md section 2, and
// the fixed summation tree of section 5. Every kernel that rotates calls these.
//
// Butterflies run in registers: the first four inside vectors of 16 channels, the others between vectors. Blocks of
// more than 256 channels are rows of 256, and then columns of those rows. Blocks of less than 16 channels take plain
// loops.
#pragma once

#include "cpu/kernels.h"
#include "cpu/simd.h"

namespace turboquant::cpu::TURBOQUANT_LEVEL {

constexpr int kRow = 256;  // channels whose butterflies run in registers

// float32(1 / sqrt(n)): this factor makes the butterflies of a block of n = 2^k channels orthonormal.
inline float block_norm(int n) {
  const int k = __builtin_ctz(static_cast<unsigned>(n));
  return (k % 2 ? 0.707106781f : 1.0f) * bits_to_float(static_cast<uint32_t>(127 - k / 2) << 23);
}

// Butterflies between COUNT vectors.
template <int COUNT>
inline void butterflies_between(Floats (&x)[COUNT]) {
#pragma GCC unroll kUnroll
  for (int h = 1; h < COUNT; h *= 2) {
#pragma GCC unroll kUnroll
    for (int i = 0; i < COUNT; ++i) {
      if (i & h) continue;
      const Floats p = x[i], q = x[i + h];
      x[i] = p + q;
      x[i + h] = p - q;
    }
  }
}

// The butterflies of COUNT vectors of consecutive channels, then the factor.
template <int COUNT>
inline void butterfly_row(float* y, float factor) {
  Floats x[COUNT];
#pragma GCC unroll kUnroll
  for (int i = 0; i < COUNT; ++i) x[i] = butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(load(y + 16 * i)))));
  butterflies_between(x);
#pragma GCC unroll kUnroll
  for (int i = 0; i < COUNT; ++i) store(y + 16 * i, x[i] * broadcast(factor));
}

// Butterflies between ROWS rows, then the factor.
template <int ROWS>
inline void butterfly_columns(float* y, float factor) {
  for (int c = 0; c < kRow; c += 16) {
    Floats x[ROWS];
    for (int i = 0; i < ROWS; ++i) x[i] = load(y + i * kRow + c);
    butterflies_between(x);
    for (int i = 0; i < ROWS; ++i) store(y + i * kRow + c, x[i] * broadcast(factor));
  }
}

// All butterflies of one block of 16 channels and more, then the factor.
inline void butterfly_block(float* y, int n, float factor) {
  switch (n) {
    case 16: return butterfly_row<1>(y, factor);
    case 32: return butterfly_row<2>(y, factor);
    case 64: return butterfly_row<4>(y, factor);
    case 128: return butterfly_row<8>(y, factor);
    case 256: return butterfly_row<16>(y, factor);
    default: break;
  }
  for (int c = 0; c < n; c += kRow) butterfly_row<16>(y + c, 1.0f);
  switch (n / kRow) {
    case 2: return butterfly_columns<2>(y, factor);
    case 4: return butterfly_columns<4>(y, factor);
    case 8: return butterfly_columns<8>(y, factor);
    default: return butterfly_columns<16>(y, factor);
  }
}

inline void butterfly_small_block(float* y, int n, float factor) {
  for (int h = 1; h < n; h *= 2) {
    for (int i = 0; i < n; ++i) {
      if (i & h) continue;
      const float p = y[i], q = y[i + h];
      y[i] = p + q;
      y[i + h] = p - q;
    }
  }
  for (int i = 0; i < n; ++i) y[i] *= factor;
}

// The orthonormal M x M factor across blocks of n channels.
template <int M>
inline void mix_blocks(float* y, int n) {
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    Floats in[M];
    for (int j = 0; j < M; ++j) in[j] = load(y + j * n + i);
    for (int b = 0; b < M; ++b) {
      Floats sum = broadcast(format::hartley(M, 0)) * in[0];
      for (int j = 1; j < M; ++j) sum = sum + broadcast(format::hartley(M, b * j % M)) * in[j];
      store(y + b * n + i, sum);
    }
  }
  for (; i < n; ++i) {
    float in[M];
    for (int j = 0; j < M; ++j) in[j] = y[j * n + i];
    for (int b = 0; b < M; ++b) {
      float sum = format::hartley(M, 0) * in[0];
      for (int j = 1; j < M; ++j) sum += format::hartley(M, b * j % M) * in[j];
      y[b * n + i] = sum;
    }
  }
}

// core(y) in place with `factor` for 1 / sqrt(n). An encoder passes 1, because its codes do not depend on the length.
[[gnu::noinline]] inline void transform(float* y, format::Split split, float factor) {
  for (int b = 0; b < split.blocks; ++b) {
    (split.block < 16 ? butterfly_small_block : butterfly_block)(y + b * split.block, split.block, factor);
  }
  switch (split.blocks) {
    case 3: return mix_blocks<3>(y, split.block);
    case 5: return mix_blocks<5>(y, split.block);
    case 7: return mix_blocks<7>(y, split.block);
    case 9: return mix_blocks<9>(y, split.block);
    default: return;
  }
}

inline void multiply(float* y, const float* by, int d) {
  for (int c = 0; c < d; ++c) y[c] *= by[c];
}
inline void rotate(float* y, const float* signs, format::Split split) {
  multiply(y, signs, split.blocks * split.block);
  transform(y, split, block_norm(split.block));
}
inline void rotate_back(float* y, const float* signs, format::Split split) {
  transform(y, split, block_norm(split.block));
  multiply(y, signs, split.blocks * split.block);
}

// ---- The sum of fixed order ----------------------------------------------------------------------------------------

// The sum of 16 COUNT elements over neighbouring pairs.
template <int COUNT>
inline float tree(const float* p) {
  Floats x[COUNT];
#pragma GCC unroll kUnroll
  for (int i = 0; i < COUNT; ++i) x[i] = load(p + 16 * i);
#pragma GCC unroll kUnroll
  for (int n = COUNT / 2; n > 0; n /= 2) {
#pragma GCC unroll kUnroll
    for (int i = 0; i < n; ++i) x[i] = pair_sums(x[2 * i], x[2 * i + 1]);
  }
  return sum_lanes(x[0]);
}

// The sum of a block of n channels, 16 and more.
inline float tree_block(float* p, int n) {
  switch (n) {
    case 16: return tree<1>(p);
    case 32: return tree<2>(p);
    case 64: return tree<4>(p);
    case 128: return tree<8>(p);
    default: break;
  }
  float part[format::kMaxVectorDim / kRow];
  int parts = n / kRow;
  for (int i = 0; i < parts; ++i) part[i] = tree<16>(p + kRow * i);
  for (; parts > 1; parts /= 2) {
    for (int i = 0; i < parts / 2; ++i) part[i] = part[2 * i] + part[2 * i + 1];
  }
  return part[0];
}

inline float tree_small_block(float* p, int n) {
  for (n /= 2; n > 0; n /= 2) {
    for (int i = 0; i < n; ++i) p[i] = p[2 * i] + p[2 * i + 1];
  }
  return p[0];
}

// The sum of p [d] over pairs of a block, then over blocks in order. Destroys p.
[[gnu::noinline]] inline float tree_sum(float* p, format::Split split) {
  float total = 0;
  for (int b = 0; b < split.blocks; ++b) {
    const float sum = (split.block < 16 ? tree_small_block : tree_block)(p + b * split.block, split.block);
    total = b ? total + sum : sum;
  }
  return total;
}

}  // namespace turboquant::cpu::TURBOQUANT_LEVEL
