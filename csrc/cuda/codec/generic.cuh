// The codec for vectors of every length, dtype and width that the format knows. A warp holds a vector in shared memory,
// so that lengths are loops and one kernel serves all of them. codec/lanes.cuh is faster for most lengths up to 512,
// codec/encode_bulk.cuh and codec/encode_step.cu are for the lengths, dtypes and widths that most models use; the bytes
// are the same.
#pragma once

#include "cuda/codec/record.cuh"

namespace turboquant::cuda {

constexpr int kMostSharedBytes = 40 * 1024;  // of a block, on every device, with room left for tables

// d = blocks * 2^log_block
struct GenericShape {
  static constexpr int kLanes = 32;  // that share a vector
  static constexpr bool kInRegisters = false;

  int d, blocks, log_block;
  float norm;              // 1 / sqrt(2^log_block)
  bool transforms = true;  // false: codes stand for the channels as they are (latents, docs/format.md section 12)

  GenericShape() = default;
  explicit GenericShape(format::Split split)
      : d(split.blocks * split.block), blocks(split.blocks), log_block(split.log_block()), norm(block_norm(split)) {}
};

// A warp's words of shared memory: the vector, and as many words for its squares or integers.
__host__ __device__ constexpr int generic_stride(int d) { return (d + 3) / 4 * 4; }
__host__ __device__ constexpr int generic_words(int d) { return 2 * generic_stride(d); }

// How many times `words` words fit into the shared memory of a block beside `fixed` others, `most` at most.
inline int times_in_block(int words, int most, int fixed = 0) {
  int times = most;
  while (times > 1 && 4 * (fixed + words * times) > kMostSharedBytes) times /= 2;
  return times;
}

// ---- Channels of a vector in memory ---------------------------------------------------------------------------------

// Two neighbouring constants, i even.
__device__ __forceinline__ float2 two(const float* x, int i) { return __ldg(reinterpret_cast<const float2*>(x + i)); }

// Loads the vector at `offset` and applies center, scales and signs (section 5), for the rotation to follow. signs:
// null where there is no transform.
__device__ __forceinline__ void load_generic(float* y, int d, const void* x, Dtype dtype, int64_t offset,
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
    const float2 s = signs ? two(signs, i) : float2{1, 1};
    y[i] = __fmul_rn(v.x, s.x), y[i + 1] = __fmul_rn(v.y, s.y);
  }
  __syncwarp();
}

// ---- Rotation -------------------------------------------------------------------------------------------------------

// Butterflies for distances h, 2 h, .. below R h, h = 2^log_h.
template <int R>
__device__ __forceinline__ void generic_pass(float* y, int d, int log_h, int lane) {
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
__device__ __forceinline__ void generic_mix(float* y, int block, int lane) {
  for (int i = lane; i < block; i += 32) {
    float in[M];
#pragma unroll
    for (int j = 0; j < M; ++j) in[j] = y[j * block + i];
#pragma unroll
    for (int b = 0; b < M; ++b) y[b * block + i] = hartley_entry<M>(in, b);
  }
  __syncwarp();
}

// core(y); the factor of section 2, step 2 only if `normed`.
__device__ __forceinline__ void transform_generic(float* y, const GenericShape& s, bool normed, int lane) {
  if (!s.transforms) return;
  int log_h = 0;
#pragma unroll 1
  for (; log_h + 3 <= s.log_block; log_h += 3) generic_pass<8>(y, s.d, log_h, lane);
#pragma unroll 1
  for (; log_h < s.log_block; ++log_h) generic_pass<2>(y, s.d, log_h, lane);
  if (normed) {
    for (int i = lane; i < s.d; i += 32) y[i] = __fmul_rn(y[i], s.norm);
    __syncwarp();
  }
  const int block = 1 << s.log_block;
  switch (s.blocks) {
    case 1: break;
    case 3: generic_mix<3>(y, block, lane); break;
    case 5: generic_mix<5>(y, block, lane); break;
    case 7: generic_mix<7>(y, block, lane); break;
    default: generic_mix<9>(y, block, lane); break;
  }
}

// Adds R neighbours at distance 2^log_h in pairs; the sum replaces the first of them.
template <int R>
__device__ __forceinline__ void generic_tree_pass(float* t, int d, int log_h, int lane) {
  for (int g = lane; g < d >> log_h >> (R == 8 ? 3 : 1); g += 32) {
    float* at = t + (g * R << log_h);
    float v[R];
#pragma unroll
    for (int k = 0; k < R; ++k) v[k] = at[k << log_h];
    *at = pair_sum(v);
  }
  __syncwarp();
}

// tree(y * y), known to all lanes; t: shared memory for the squares.
__device__ __forceinline__ float generic_sum_of_squares(const float* y, float* t, const GenericShape& s, int lane) {
  for (int i = lane; i < s.d; i += 32) t[i] = __fmul_rn(y[i], y[i]);
  __syncwarp();
  int log_h = 0;
#pragma unroll 1
  for (; log_h + 3 <= s.log_block; log_h += 3) generic_tree_pass<8>(t, s.d, log_h, lane);
#pragma unroll 1
  for (; log_h < s.log_block; ++log_h) generic_tree_pass<2>(t, s.d, log_h, lane);
  float total = t[0];
#pragma unroll 1
  for (int b = 1; b < s.blocks; ++b) total = __fadd_rn(total, t[b << s.log_block]);
  __syncwarp();  // before t is written again
  return total;
}

// ---- Encoding -------------------------------------------------------------------------------------------------------

// A vector as integers u in shared memory, its best candidate, and its scale.
struct GenericCodes {
  const int* u;
  int kept;
  uint16_t scale;
  bool finite;

  // Octet o of d channels; the last may be short.
  __device__ __forceinline__ Octet octet(int o, int d, const SharedCodebook& shared, Width width) const {
    int x[8], magnitude[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = 8 * o + i < d ? u[8 * o + i] : 0;
    shared.magnitudes<8>(width, kept, x, magnitude);
    const int half = 1 << (format::num_bits(width) - 1);
    Octet out{0, 0};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int m = magnitude[i];
      const int code =
          format::levels_are_codes(width) ? (x[i] < 0 ? -m : m) & 255 : (x[i] < 0 ? half - 1 - m : half + m);
      if (finite && 8 * o + i < d) out.set(width, i, code);
    }
    return out;
  }
};

// Encodes the vector that load_generic left in y (section 5; its power of two commutes with signs). room:
// generic_stride(d) words. All lanes of the warp take part.
__device__ __forceinline__ GenericCodes encode_generic(float* y, float* room, const GenericShape& s, int lane,
                                                       const SharedCodebook& shared, const Codebook& book,
                                                       const EncodeConstants& constants) {
  uint32_t largest = 0;
  for (int i = lane; i < s.d; i += 32) largest = max(largest, magnitude_bits(y[i]));
  largest = max_of_lanes(largest);
  const int e = prescale_exponent(largest);
  const float down = power_of_two(-e);
  for (int i = lane; i < s.d; i += 32) y[i] = __fmul_rn(y[i], down);
  __syncwarp();
  transform_generic(y, s, false, lane);
  const float length = __fsqrt_rn(generic_sum_of_squares(y, room, s, lane));
  const float k = largest == 0 ? 0.0f : __fdiv_rn(constants.units, length);
  int* u = reinterpret_cast<int*>(room);
  for (int i = lane; i < s.d; i += 32) u[i] = __float2int_rn(__fmul_rn(y[i], k));
  __syncwarp();

  Fit best{0, 0, 0};
  float best_merit = -1;
  GenericCodes codes{u, 0, 0, largest < kInfinityBits};
#pragma unroll 1
  for (int c = 0; c < book.num_steps; ++c) {
    int dot = 0, squares = 0;
#pragma unroll 1
    for (int i = lane; i < s.d; i += 128) {
      int x[4], magnitude[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = i + 32 * j < s.d ? u[i + 32 * j] : 0;
      shared.magnitudes<4>(book.width, c, x, magnitude);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int level = i + 32 * j < s.d ? shared.level_of(book.width, magnitude[j]) : 0;
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

// ---- Decoding -------------------------------------------------------------------------------------------------------

// Writes scale / 32 * level (section 6) of the channels of octet o to y.
__device__ __forceinline__ void put_generic_octet(float* y, int d, int o, Octet octet, Width width, const float* table,
                                                  float scale) {
  const float unit = __fmul_rn(scale, format::kLevelUnit);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (8 * o + i < d) y[8 * o + i] = __fmul_rn(unit, level_of(octet, width, i, table));
  }
}

// Rotates the vector in y back and stores it at `offset`.
__device__ __forceinline__ void store_generic(float* y, const GenericShape& s, const float* signs,
                                              const format::Channels& channels, void* out, Dtype dtype, int64_t offset,
                                              bool exists, int lane) {
  __syncwarp();
  transform_generic(y, s, true, lane);
  if (!exists) return;
  for (int i = 2 * lane; i < s.d; i += 64) {
    const float2 sign = signs ? two(signs, i) : float2{1, 1};
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
