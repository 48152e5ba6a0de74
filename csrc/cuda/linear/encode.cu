// weight_encode, weight_pack: weights of linear layers as blocks of codes (docs/format.md section 13).
#include "calls/linear.h"
#include "cuda/codec/arguments.cuh"
#include "cuda/common/torch.cuh"
#include "cuda/linear/blocks.cuh"

namespace turboquant::cuda {
namespace {

struct WeightEncoder {
  WeightBlocks blocks;
  const void* w;
  Dtype dtype;
  int64_t stride;              // of rows, in elements
  const float* signs;          // [group]
  const float* channel_scale;  // [k], or null
  Codebook book;
  EncodeConstants constants;
  float over;  // 512 / sqrt(group), for scales with multipliers
  GenericShape shape;
};

// ---- Multipliers ----------------------------------------------------------------------------------------------------

// The positive boundaries of codes under one candidate times every multiplier, of a warp.
constexpr int kHalf = 8;  // levels of a sign
using WarpBoundaries = int[format::kMultiplierCodes][kHalf];

__device__ __forceinline__ float step_of(float candidate, int m) {
  return __fmul_rn(__fmul_rn(candidate, static_cast<float>(format::multiplier(m))), format::kMultiplierUnit);
}

__device__ __forceinline__ void fill_boundaries(WarpBoundaries& boundary, const int* level, float candidate, int lane) {
  __syncwarp();
  for (int i = lane; i < format::kMultiplierCodes * kHalf; i += 32) {
    const int m = i / kHalf, j = i % kHalf;
    const float limit = j + 1 < kHalf ? table_boundary(level[j], level[j + 1], step_of(candidate, m)) : 0;
    boundary[m][j] = static_cast<int>(fminf(limit, format::kMaxBoundary));
  }
  __syncwarp();
}

// How many positive boundaries are <= u, or <= ~u.
__device__ __forceinline__ int magnitude_of(const int (&boundary)[kHalf], int u) {
  const int cell = static_cast<int>(static_cast<unsigned>(u ^ u >> 31) / format::kTableGrain);
  int m = 0;
#pragma unroll
  for (int step = kHalf / 2; step > 0; step /= 2) {
    if (boundary[m + step - 1] <= cell) m += step;
  }
  return m;
}

// What 32 channels have chosen under one candidate.
struct SubChoice {
  int code;
  float gain, dot, square;
};

// Chooses candidate and multipliers of the coordinates in u (section 13), leaves codes and multipliers in `rows`, and
// returns `scale` before the power of two is put back. All lanes take part; lane i has channel i of every 32.
__device__ __forceinline__ float search_multipliers(const WeightEncoder& e, const int* u, const int* level,
                                                    WarpBoundaries& boundary, float r, SharedRows& rows, int row,
                                                    int lane) {
  const int subs = e.blocks.block.subs();
  int x[kMostSubs];
#pragma unroll
  for (int s = 0; s < kMostSubs; ++s) x[s] = s < subs ? u[format::kSubChannels * s + lane] : 0;
  float best_dot = 0, best_square = 1, best_merit = -1;
  int best = 0, kept[kMostSubs] = {};
#pragma unroll 1
  for (int c = 0; c < e.book.num_steps; ++c) {
    const float candidate = e.book.steps[c];
    fill_boundaries(boundary, level, candidate, lane);
    SubChoice choice[kMostSubs];
#pragma unroll
    for (int s = 0; s < kMostSubs; ++s) choice[s] = {-1, 0, 0, 0};
#pragma unroll 1
    for (int m = 0; m < format::kMultiplierCodes; ++m) {
      const float step = step_of(candidate, m);
#pragma unroll
      for (int s = 0; s < kMostSubs; ++s) {
        if (s >= subs) continue;
        const int size = level[magnitude_of(boundary[m], x[s])];
        const float dot = __fmul_rn(static_cast<float>(sum_of_lanes(abs(x[s]) * size)), 1 / format::kUnitsPerSigma);
        const float square = static_cast<float>(sum_of_lanes(size * size));
        const float gain = __fmul_rn(step, __fsub_rn(__fmul_rn(2, dot), __fmul_rn(step, square)));
        if (choice[s].code < 0 || gain > choice[s].gain) choice[s] = {m, gain, dot, square};
      }
    }
    float dot = 0, square = 0;
#pragma unroll
    for (int s = 0; s < kMostSubs; ++s) {
      if (s >= subs) continue;
      const float by = static_cast<float>(format::multiplier(choice[s].code));
      const float a = __fmul_rn(by, choice[s].dot), b = __fmul_rn(__fmul_rn(by, by), choice[s].square);
      dot = s ? __fadd_rn(dot, a) : a, square = s ? __fadd_rn(square, b) : b;
    }
    const float merit = dot > 0 ? __fdiv_rn(__fmul_rn(dot, dot), square) : 0;
    if (!(merit > best_merit)) continue;
    best = c, best_dot = dot, best_square = square, best_merit = merit;
#pragma unroll
    for (int s = 0; s < kMostSubs; ++s) kept[s] = choice[s].code;
  }
  fill_boundaries(boundary, level, e.book.steps[best], lane);
#pragma unroll
  for (int s = 0; s < kMostSubs; ++s) {
    if (s >= subs) continue;
    const int m = magnitude_of(boundary[kept[s]], x[s]);
    rows.codes[row][format::kSubChannels * s + lane] = static_cast<uint8_t>(x[s] < 0 ? kHalf - 1 - m : kHalf + m);
    if (lane == 0) rows.multipliers[row][s] = static_cast<uint8_t>(kept[s]);
  }
  return best_dot > 0 ? __fmul_rn(__fmul_rn(r, e.over), __fdiv_rn(best_dot, best_square)) : 0;
}

// ---- Rows -----------------------------------------------------------------------------------------------------------

// A row with multipliers. y: the channels times signs, room: generic_stride(group) words
__device__ __forceinline__ void encode_with_multipliers(const WeightEncoder& e, float* y, float* room, const int* level,
                                                        WarpBoundaries& boundary, SharedRows& rows, int row, int lane) {
  const GenericShape& shape = e.shape;
  uint32_t largest = 0;
  for (int i = lane; i < shape.d; i += 32) largest = max(largest, magnitude_bits(y[i]));
  largest = max_of_lanes(largest);
  if (largest >= kInfinityBits) {  // codes and multipliers are zero
    if (lane == 0) rows.scale[row] = format::kNanScale;
    return;
  }
  const int exponent = prescale_exponent(largest);
  const float down = power_of_two(-exponent);
  for (int i = lane; i < shape.d; i += 32) y[i] = __fmul_rn(y[i], down);
  __syncwarp();
  transform_generic(y, shape, false, lane);
  const float length = __fsqrt_rn(generic_sum_of_squares(y, room, shape, lane));
  const float k = largest == 0 ? 0.0f : __fdiv_rn(e.constants.units, length);
  int* u = reinterpret_cast<int*>(room);
  for (int i = lane; i < shape.d; i += 32) u[i] = __float2int_rn(__fmul_rn(y[i], k));
  __syncwarp();
  const float r = __fmul_rn(length, e.constants.norm);
  const float scale = search_multipliers(e, u, level, boundary, r, rows, row, lane);
  const float whole = fminf(__fmul_rn(scale, power_of_two(exponent)), format::kMaxHalf);
  if (lane == 0) rows.scale[row] = largest == 0 ? 0 : __half_as_ushort(__float2half_rn(whole));
}

__global__ void __launch_bounds__(kBlockThreads)
    weight_encode_kernel(const __grid_constant__ WeightEncoder e, uint8_t* packed) {
  __shared__ SharedCodebook shared;
  __shared__ SharedRows rows;
  __shared__ WarpBoundaries boundary[kBlockWarps];
  __shared__ int level[kHalf];
  __shared__ alignas(16) float vectors[kBlockWarps][generic_words(kMostGroup)];
  __shared__ alignas(16) uint8_t bytes[kMostBlockBytes];
  const format::WeightBlock& b = e.blocks.block;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (b.sub) {
    if (threadIdx.x < kHalf)
      level[threadIdx.x] = format::level_of_code(e.book.width, e.book.levels, kHalf + threadIdx.x);
  } else {
    shared.fill(e.book, threadIdx.x, kBlockThreads);
  }
  clear_rows(rows, threadIdx.x);
  __syncthreads();

  float *y = vectors[warp], *room = y + generic_stride(kMostGroup);
  const int64_t first = int64_t{e.blocks.group()} * b.group;
  const format::Channels channels{nullptr, e.channel_scale ? e.channel_scale + first : nullptr, nullptr};
#pragma unroll 1
  for (int row = warp; row < format::kWeightRows && e.blocks.row(row) < e.blocks.n; row += kBlockWarps) {
    load_generic(y, b.group, e.w, e.dtype, e.blocks.row(row) * e.stride + first, e.signs, channels, lane);
    if (b.sub) {
      encode_with_multipliers(e, y, room, level, boundary[warp], rows, row, lane);
    } else {
      const GenericCodes codes = encode_generic(y, room, e.shape, lane, shared, e.book, e.constants);
      if (lane == 0) rows.scale[row] = codes.scale;
      if (8 * lane < b.group) {
        const Octet octet = codes.octet(lane, b.group, shared, e.book.width);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          rows.codes[row][8 * lane + i] = static_cast<uint8_t>(octet.code(e.book.width, i));
        }
      }
    }
    __syncwarp();  // before y is written again
  }
  __syncthreads();
  put_rows(rows, b, bytes, threadIdx.x);
  __syncthreads();
  copy_bytes(bytes, packed + int64_t{blockIdx.x} * b.block_bytes(), b.block_bytes(), threadIdx.x, kBlockThreads);
}

__global__ void __launch_bounds__(kBlockThreads)
    weight_pack_kernel(const __grid_constant__ WeightBlocks blocks, const uint8_t* codes, const uint16_t* scale,
                       const uint8_t* multipliers, uint8_t* packed) {
  __shared__ SharedRows rows;
  __shared__ alignas(16) uint8_t bytes[kMostBlockBytes];
  const format::WeightBlock& b = blocks.block;
  clear_rows(rows, threadIdx.x);
  __syncthreads();
  for (int i = threadIdx.x; i < format::kWeightRows * b.group; i += kBlockThreads) {
    const int row = i / b.group, c = i % b.group;
    if (blocks.row(row) < blocks.n) rows.codes[row][c] = codes[blocks.vector(row) * b.group + c];
  }
  const int row = threadIdx.x;
  if (row < format::kWeightRows && blocks.row(row) < blocks.n) {
    rows.scale[row] = scale[blocks.vector(row)];
    for (int s = 0; s < b.subs(); ++s) rows.multipliers[row][s] = multipliers[blocks.vector(row) * b.subs() + s];
  }
  __syncthreads();
  put_rows(rows, b, bytes, threadIdx.x);
  __syncthreads();
  copy_bytes(bytes, packed + int64_t{blockIdx.x} * b.block_bytes(), b.block_bytes(), threadIdx.x, kBlockThreads);
}

// ---- Ops ------------------------------------------------------------------------------------------------------------

Tensor weight_encode(const WeightEncodeCall& c) {
  const WeightShape shape = check_weight_encode(c);
  const Codebook book =
      checked_codebook(c.w, c.levels, c.steps, c.bits, static_cast<int64_t>(ScaleMode::kMse), "levels", "steps");
  Tensor packed = new_packed_weight(c.w, shape);
  if (packed.numel() == 0) return packed;
  const format::Split split{1, shape.block.group};
  const AlignedRows in(c.w, word_bytes(2, c.w.element_size()));
  const Constant<float> signs(c.signs), channel_scale(c.channel_scale);
  const Launch launch(c.w);
  const double root = std::sqrt(static_cast<double>(shape.group()));
  const WeightEncoder encoder{.blocks = blocks_of(shape),
                              .w = in.data(),
                              .dtype = dtype_of(c.w),
                              .stride = shape.n > 1 ? in.rows().stride[0] : shape.k,
                              .signs = signs.data(),
                              .channel_scale = channel_scale.data(),
                              .book = book,
                              .constants = EncodeConstants::of(split),
                              .over = static_cast<float>(1.0 / format::kLevelUnit / format::kMultiplierUnit / root),
                              .shape = GenericShape(split)};
  const unsigned blocks = num_blocks(shape.tiles() * shape.groups(), 1);
  weight_encode_kernel<<<blocks, kBlockThreads, 0, launch.stream()>>>(encoder,
                                                                      static_cast<uint8_t*>(packed.data_ptr()));
  launch.check("weight_encode");
  return packed;
}

Tensor weight_pack(const WeightPackCall& c) {
  const WeightShape shape = check_weight_pack(c);
  Tensor packed = new_packed_weight(c.codes, shape);
  if (packed.numel() == 0) return packed;
  const Launch launch(c.codes);
  const unsigned blocks = num_blocks(shape.tiles() * shape.groups(), 1);
  weight_pack_kernel<<<blocks, kBlockThreads, 0, launch.stream()>>>(blocks_of(shape), bytes_of(c.codes),
                                                                    static_cast<const uint16_t*>(c.scale.data_ptr()),
                                                                    c.multipliers ? bytes_of(*c.multipliers) : nullptr,
                                                                    static_cast<uint8_t*>(packed.data_ptr()));
  launch.check("weight_pack");
  return packed;
}

}  // namespace
}  // namespace turboquant::cuda

STABLE_TORCH_LIBRARY_IMPL(turboquant, CUDA, m) {
  using namespace turboquant;
  m.impl("weight_encode", boxed<&turboquant::cuda::weight_encode>);
  m.impl("weight_pack", boxed<&turboquant::cuda::weight_pack>);
}
