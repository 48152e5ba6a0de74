// Vectors of any length and type that the format knows: one kernel for all of them instead of one each. A warp holds a vector in
// shared memory, so that lengths are loops. codec/encode_bulk.cuh and codec/encode_step.cu have the lengths, types and widths that are in use; the bytes
// are the same.
#pragma once

#include "cuda/codec/record.cuh"

namespace turboquant::cuda {

constexpr int kMostSharedBytes = 40 * 1024;  // what a block can have on every device, next to tables

// d = blocks * 2^log_block
struct AnyShape {
  int d, blocks, log_block;
  float norm;  // 1 / sqrt(2^log_block)

  AnyShape() = default;
  explicit AnyShape(format::Split split) : d(split.blocks * split.block), blocks(split.blocks), log_block(0) {
    while (1 << log_block < split.block) ++log_block;
    norm = block_norm(log_block);
  }
};

// What a warp has in shared memory, in words: the vector, and as much for its squares or integers.
__host__ __device__ constexpr int any_stride(int d) { return (d + 3) / 4 * 4; }
__host__ __device__ constexpr int any_words(int d) { return 2 * any_stride(d); }

// How many warps of `words` words each fit in a block, `most` at most.
inline int any_warps(int words, int most) {
  int warps = most;
  while (warps > 1 && 4 * words * warps > kMostSharedBytes) warps /= 2;
  return warps;
}

// ---- Channels of a vector in memory -----------------------------------------------------------------------------------

// Two neighbouring constants, i even.
__device__ __forceinline__ float2 two(const float* x, int i) { return __ldg(reinterpret_cast<const float2*>(x + i)); }

// The vector at `offset`, less the center, scaled and with its signs, as section 5 rotates it.
__device__ __forceinline__ void load_any(float* y, int d, const void* x, Dtype dtype, int64_t offset,
                                         const float* signs, const format::Channels& channels, int lane) {
  for (int i = 2 * lane; i < d; i += 64) {
    float pair[2];
    load_floats_as<2>(x, dtype, offset + i, pair);
    float2 v{pair[0], pair[1]};
    if (channels.center) {
      const float2 c = two(channels.center, i);
      v = {__fsub_rn(v.x, c.x), __fsub_rn(v.y, c.y)};
    }
    if (channels.scale) {
      const float2 c = two(channels.scale, i);
      v = {__fmul_rn(v.x, c.x), __fmul_rn(v.y, c.y)};
    }
    const float2 s = two(signs, i);
    y[i] = __fmul_rn(v.x, s.x), y[i + 1] = __fmul_rn(v.y, s.y);
  }
  __syncwarp();
}

// ---- Rotation -------------------------------------------------------------------------------------------------------

// Butterflies for distances h, 2 h, .. below R h, h = 2^log_h.
template <int R>
__device__ __forceinline__ void any_pass(float* y, int d, int log_h, int lane) {
  for (int g = lane; g < d / R; g += 32) {
    float* at = y + (g >> log_h << log_h) * R + (g & ((1 << log_h) - 1));
    float v[R];
#pragma unroll
    for (int k = 0; k < R; ++k) v[k] = at[k << log_h];
    lane_butterflies<1, R>(v);
#pragma unroll
    for (int k = 0; k < R; ++k) at[k << log_h] = v[k];
  }
  __syncwarp();
}

template <int M>
__device__ __forceinline__ void any_mix(float* y, int block, int lane) {
  for (int i = lane; i < block; i += 32) {
    float in[M];
#pragma unroll
    for (int j = 0; j < M; ++j) in[j] = y[j * block + i];
#pragma unroll
    for (int b = 0; b < M; ++b) y[b * block + i] = hartley_entry<M>(in, b);
  }
  __syncwarp();
}

// core(y); without the factor of section 2, step 2 unless `normed`.
__device__ __forceinline__ void transform_any(float* y, const AnyShape& s, bool normed, int lane) {
  int log_h = 0;
#pragma unroll 1
  for (; log_h + 3 <= s.log_block; log_h += 3) any_pass<8>(y, s.d, log_h, lane);
#pragma unroll 1
  for (; log_h < s.log_block; ++log_h) any_pass<2>(y, s.d, log_h, lane);
  if (normed) {
    for (int i = lane; i < s.d; i += 32) y[i] = __fmul_rn(y[i], s.norm);
    __syncwarp();
  }
  const int block = 1 << s.log_block;
  switch (s.blocks) {
    case 1: break;
    case 3: any_mix<3>(y, block, lane); break;
    case 5: any_mix<5>(y, block, lane); break;
    case 7: any_mix<7>(y, block, lane); break;
    default: any_mix<9>(y, block, lane); break;
  }
}

// Sums of R neighbours at distance 2^log_h, over pairs; into the first of each.
template <int R>
__device__ __forceinline__ void any_tree_pass(float* t, int d, int log_h, int lane) {
  for (int g = lane; g < d >> log_h >> (R == 8 ? 3 : 1); g += 32) {
    float* at = t + (g * R << log_h);
    float v[R];
#pragma unroll
    for (int k = 0; k < R; ++k) v[k] = at[k << log_h];
    *at = pair_sum(v);
  }
  __syncwarp();
}

// tree(y * y), known to all lanes; t: room for the squares.
__device__ __forceinline__ float any_squares(const float* y, float* t, const AnyShape& s, int lane) {
  for (int i = lane; i < s.d; i += 32) t[i] = __fmul_rn(y[i], y[i]);
  __syncwarp();
  int log_h = 0;
#pragma unroll 1
  for (; log_h + 3 <= s.log_block; log_h += 3) any_tree_pass<8>(t, s.d, log_h, lane);
#pragma unroll 1
  for (; log_h < s.log_block; ++log_h) any_tree_pass<2>(t, s.d, log_h, lane);
  float total = t[0];
#pragma unroll 1
  for (int b = 1; b < s.blocks; ++b) total = __fadd_rn(total, t[b << s.log_block]);
  __syncwarp();  // before t is written again
  return total;
}

// ---- Encoding ---------------------------------------------------------------------------------------------------------

// A vector as integers u in shared memory, the candidate it takes, and its scale.
struct AnyCodes {
  const int* u;
  int kept;
  uint16_t scale;
  bool finite;

  // Octet o of d channels; the last may be short.
  __device__ __forceinline__ Octet octet(int o, int d, const SharedCodebook& shared, int bits) const {
    int x[8], magnitude[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = 8 * o + i < d ? u[8 * o + i] : 0;
    shared.magnitudes<8>(bits, kept, x, magnitude);
    const int half = 1 << (bits - 1);
    Octet out{0, 0};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int m = magnitude[i];
      const int code = bits == 8 ? (x[i] < 0 ? -m : m) & 255 : (x[i] < 0 ? half - 1 - m : half + m);
      if (finite && 8 * o + i < d) out.set(bits, i, code);
    }
    return out;
  }
};

// Encodes what load_any left in y (section 5; its power of two commutes with signs). room: any_stride(d) words. All lanes of the warp take part.
__device__ __forceinline__ AnyCodes encode_any(float* y, float* room, const AnyShape& s, int lane,
                                               const SharedCodebook& shared, const Codebook& book,
                                               const EncodeConstants& constants) {
  uint32_t largest = 0;
  for (int i = lane; i < s.d; i += 32) largest = max(largest, magnitude_bits(y[i]));
  largest = max_of_lanes(largest);
  const int e = prescale_exponent(largest);
  const float down = power_of_two(-e);
  for (int i = lane; i < s.d; i += 32) y[i] = __fmul_rn(y[i], down);
  __syncwarp();
  transform_any(y, s, false, lane);
  const float length = __fsqrt_rn(any_squares(y, room, s, lane));
  const float k = largest == 0 ? 0.0f : __fdiv_rn(constants.units, length);
  int* u = reinterpret_cast<int*>(room);
  for (int i = lane; i < s.d; i += 32) u[i] = __float2int_rn(__fmul_rn(y[i], k));
  __syncwarp();

  Fit best{0, 0, 0};
  float best_merit = -1;
  AnyCodes codes{u, 0, 0, largest < kInfinityBits};
#pragma unroll 1
  for (int c = 0; c < book.num_steps; ++c) {
    int dot = 0, squares = 0;
#pragma unroll 1
    for (int i = lane; i < s.d; i += 128) {
      int x[4], magnitude[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = i + 32 * j < s.d ? u[i + 32 * j] : 0;
      shared.magnitudes<4>(book.bits, c, x, magnitude);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int level = i + 32 * j < s.d ? shared.level_of(book.bits, magnitude[j]) : 0;
        dot += abs(x[j]) * level;
        squares += level * level;
      }
    }
    const Fit fit = Fit::of_sums(sum_of_lanes(dot), sum_of_lanes(squares), shared.step[c]);
    const float merit = fit.merit();
    if (merit > best_merit) best = fit, best_merit = merit, codes.kept = c;
  }
  codes.scale = largest == 0 ? 0 : best.scale(book.scale_mode, length, e, constants);
  if (!codes.finite) codes.scale = format::kNanScale;
  return codes;
}

// ---- Decoding ---------------------------------------------------------------------------------------------------------

// Levels of octet o into y: scale / 32 * level (section 6).
__device__ __forceinline__ void put_any_octet(float* y, int d, int o, Octet octet, int bits, const float* table,
                                              float scale) {
  const float unit = __fmul_rn(scale, format::kLevelUnit);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (8 * o + i < d) y[8 * o + i] = __fmul_rn(unit, level_of(octet, bits, i, table));
  }
}

// Rotates back what is in y and stores it at `offset`.
__device__ __forceinline__ void store_any(float* y, const AnyShape& s, const float* signs,
                                          const format::Channels& channels, void* out, Dtype dtype, int64_t offset,
                                          bool exists, int lane) {
  __syncwarp();
  transform_any(y, s, true, lane);
  if (!exists) return;
  for (int i = 2 * lane; i < s.d; i += 64) {
    const float2 sign = two(signs, i);
    float2 v{__fmul_rn(y[i], sign.x), __fmul_rn(y[i + 1], sign.y)};
    if (channels.inverse) {
      const float2 c = two(channels.inverse, i);
      v = {__fmul_rn(v.x, c.x), __fmul_rn(v.y, c.y)};
    }
    if (channels.center) {
      const float2 c = two(channels.center, i);
      v = {__fadd_rn(v.x, c.x), __fadd_rn(v.y, c.y)};
    }
    const float pair[2] = {v.x, v.y};
    store_floats_as<2>(pair, out, dtype, offset + i);
  }
}

}  // namespace turboquant::cuda
