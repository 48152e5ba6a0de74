// Queries as operands of the products with codes and with raw channels, and what else a row of scores needs: the
// image of a block of rows, which the kernel copies into its shared memory as it is.
//
// A kernel of its own prepares each row once. The blocks that share a segment would otherwise all do so, each with few
// warps and while it has nothing else to do.
#pragma once

#include "cuda/attention/query_bytes.cuh"
#include "cuda/common/wgmma_swizzled.cuh"
#include "cuda/mla/few_exact.cuh"
#include "cuda/mla/key_tiles/expansion.cuh"

namespace turboquant::cuda::mla {

// A row of queries as integers of 16 bits, whose high and low bytes are columns of their own; the low byte's is the
// next one. Core matrices hold rows 0, 2, 4 and 6 of eight, or the others: a lane of a product then has the sums of
// both bytes, of the rows that it has in products of float16 (mla/key_tiles/scores.cuh).
__device__ __forceinline__ int byte_place(int row) { return row % 2 * 128 + row / 2 * 32; }

// Of eight rows, the part of an image with bytes: 16 channels are 256 bytes.
template <int R>
class QueryBytes {
  using Rotation = RowRotation<R>;
  static constexpr int kPerLane = Rotation::kPerLane;

 public:
  __device__ __forceinline__ QueryBytes(uint8_t* memory, OperandKind kind, int row, int lane)
      : memory_(memory + byte_place(row)), kind_(kind), lane_(lane) {}

  // y: integers of 16 bits. Places repeat every 128 channels, of which a lane has four.
  __device__ __forceinline__ void store(const int (&y)[kPerLane]) const {
    uint8_t* const of_lane[2] = {place(Rotation::channel(lane_, 0)), place(Rotation::channel(lane_, 0) + 1)};
#pragma unroll
    for (int i = 0; i < kPerLane; i += 4) {
      const int further = 128 / 16 * 256 * (i / 4);
      const int high[4] = {y[i] + 128, y[i + 1] + 128, y[i + 2] + 128, y[i + 3] + 128};  // in bits 8 to 15
      if (kind_ == OperandKind::kBytes) {
        uint8_t* to = of_lane[0] + further;
        *reinterpret_cast<uint32_t*>(to) = second_bytes(high[0], high[1]) | second_bytes(high[2], high[3]) << 16;
        *reinterpret_cast<uint32_t*>(to + 16) = first_bytes(y[i], y[i + 1]) | first_bytes(y[i + 2], y[i + 3]) << 16;
      } else {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {  // neighbours in products are two channels apart
          uint8_t* to = of_lane[odd] + further;
          *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(second_bytes(high[odd], high[odd + 2]));
          *reinterpret_cast<uint16_t*>(to + 16) = static_cast<uint16_t>(first_bytes(y[i + odd], y[i + odd + 2]));
        }
      }
    }
  }

 private:
  static __device__ __forceinline__ uint32_t first_bytes(int x, int y) { return select_bytes(x, y, 0x7740) & 0xFFFF; }
  static __device__ __forceinline__ uint32_t second_bytes(int x, int y) { return select_bytes(x, y, 0x7751) & 0xFFFF; }
  __device__ __forceinline__ uint8_t* place(int channel) const {
    const ChannelPlace at = place_of_channel(kind_, channel);
    return memory_ + (at.step * 2 + at.k / 16) * 256 + at.k % 16;
  }

  uint8_t* memory_;
  OperandKind kind_;
  int lane_;
};

constexpr float kMostHalf = 1024;  // the largest channel of a row as float16

// The same of row tiles and warp tiles: channels as float16, of every 64 a row of 128 bytes, in the order in which
// codes are expanded (attention/row_tiles/expansion.cuh).
template <int R>
class QueryHalves {
  using Rotation = RowRotation<R>;
  static constexpr int kPerLane = Rotation::kPerLane;

 public:
  __device__ __forceinline__ QueryHalves(uint8_t* memory, int row, int lane)
      : memory_(memory), row_(row), lane_(lane) {}

  // Places repeat every 128 channels, of which a lane has four.
  __device__ __forceinline__ void store(const float (&y)[kPerLane], float by) const {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int channel = Rotation::channel(lane_, 0) + k, place = channel & ~7 | channel % 4 * 2 | channel / 4 % 2;
      uint8_t* const to = memory_ + place / 64 * kSwizzleGroup + swizzled(row_, place % 64 * 2);
#pragma unroll
      for (int i = 0; i < kPerLane / 4; ++i) {
        *reinterpret_cast<__half*>(to + 128 / 64 * kSwizzleGroup * i) = __float2half_rn(y[4 * i + k] * by);
      }
    }
  }

 private:
  uint8_t* memory_;
  int row_, lane_;
};

// A block prepares eight rows of a segment's block of rows, each by a warp. rows: of a block of rows. The first block
// says that there are no long segments yet. Blocks behind those of images attend to few exact keys.
//
// A latent query is multiplied by inverse and signs and transformed (docs/format.md section 12).
template <int R>
__global__ void __launch_bounds__(32 * kImageRows, 4)
    prepare_kernel(const __grid_constant__ Latents x, const __grid_constant__ Plan plan, int rows) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  using Rotation = RowRotation<R>;
  constexpr int kPerLane = Rotation::kPerLane, kCodes = R * kImageRows * 2;
  __shared__ __align__(16) uint8_t part[kCodes + 64 * kImageRows * 2];
  wait_for_previous_kernel();
  let_next_kernel_begin();  // which may then read all that earlier kernels have written
  if (static_cast<int>(blockIdx.x) >= plan.image_blocks) {
    attend_to_few<R>(x, plan, blockIdx.x - plan.image_blocks);
    return;
  }
  const Attention& a = x.a;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rope_dim = x.record.rope_dim;
  if (blockIdx.x == 0) {
#pragma unroll 1
    for (int i = threadIdx.x; i < plan.num_long; i += 32 * kImageRows) plan.long_segments[i].sequence = -1;
  }
  const int tiles = rows / kImageRows, segment = quotient(blockIdx.x, tiles), tile = blockIdx.x - segment * tiles;
  const int sequence = sequence_of_segment(plan, a, rows, segment);
  const int block = segment - first_segment(plan, a, rows, sequence);
  const int queries = a.num_queries(sequence), length = a.length(sequence), all_rows = queries * a.q_heads;
  // cu_seqlens_q that decreases gives segments numbers of others, before the first one of the sequence.
  if (block < 0 || block * rows >= all_rows) return;
  const int row = tile * kImageRows + warp, index = block * rows + row;
  const bool exists = index < all_rows;
  const RowPlace place = place_of_row(a, a.first_query(sequence), length, queries, exists ? index : 0);

  float y[kPerLane] = {}, center = 0;
  uint16_t rope[2] = {};
  if (exists) {
    with_16_bit_type(a.dtype, [&](auto tag) {
      const auto* q = static_cast<const typename decltype(tag)::type*>(a.q);
      load<Rotation>(q + place.token * a.q_token_stride + place.head * a.q_head_stride, lane, y);
    });
    const int64_t at = place.token * x.rope_token_stride + place.head * x.rope_head_stride;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (lane + 32 * i < rope_dim) rope[i] = static_cast<const uint16_t*>(x.q_rope)[at + lane + 32 * i];
    }
  }
  if (a.channels.center) {
    float c[kPerLane];
    load<Rotation>(a.channels.center, lane, c);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) center = fmaf(y[i], c[i], center);
  }
  if (a.channels.inverse) apply_signs<Rotation>(y, a.channels.inverse, lane);
  if (x.signs) {
    apply_signs<Rotation>(y, x.signs, lane);
    transform<Rotation>(y, lane);
  }
  float most = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) most = max_or_nan(most, fabsf(y[i]));
#pragma unroll
  for (int bit = 1; bit < 32; bit *= 2) {
    most = max_or_nan(most, __shfl_xor_sync(0xffffffff, most, bit));
    center += __shfl_xor_sync(0xffffffff, center, bit);
  }
  const float largest = plan.half_queries ? kMostHalf : kMostQuery, up = most > kLeastQuery ? largest / most : 0;
  int sum = 0;
  if (plan.half_queries) {
    QueryHalves<R>(part, warp, lane).store(y, up);
  } else {
    int v[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) v[i] = __float2int_rn(y[i] * up), sum += v[i];
    sum = sum_of_lanes(sum);
    QueryBytes<R>(part, plan.kind, warp, lane).store(v);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int c = lane + 32 * i, place = plan.half_queries ? swizzled(warp, 2 * c) : place_in_operand(1, warp, c);
    *reinterpret_cast<uint16_t*>(part + kCodes + place) = rope[i];
  }
  uint8_t* image = plan.images + int64_t{segment} * plan.image_bytes;
  if (lane == 0) {
    const RowTable table(image + plan.query_bytes, rows);
    const OperandKind kind = plan.kind;
    const float step = plan.half_queries ? 1 : level_step(kind), offset = plan.half_queries ? 0 : level_offset(kind);
    const float scale = step * format::kLevelUnit * (most <= kLeastQuery ? 0 : most / largest);
    const RowSight sight =
        exists ? sight_of(a, a.tail_of(sequence, length), length, queries, place.position) : RowSight{};
    table.scale[row] = scale;
    table.start[row] = sum * (-offset / step) * scale;
    table.shift[row] = center * (a.softmax_scale * kLog2E);
    table.first[row] = exists ? sight.first : INT32_MIN;  // key tiles mask nothing for a row that does not exist
    table.end[row] = exists ? sight.end : INT32_MAX;
  }
  __syncthreads();

  // In the image, the parts of all eights of rows stand side by side: of 16 channels each, or of 64.
  const uint4* from = reinterpret_cast<const uint4*>(part);
  if (plan.half_queries) {
#pragma unroll 1
    for (int i = threadIdx.x; i < R + 64; i += 32 * kImageRows) {
      *reinterpret_cast<uint4*>(image + i / 64 * (kSwizzleRow * rows) + tile * kSwizzleGroup + i % 64 * 16) = from[i];
    }
    return;
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < R; i += 32 * kImageRows) {
    *reinterpret_cast<uint4*>(image + i / 16 * (32 * rows) + tile * 256 + i % 16 * 16) = from[i];
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < rope_dim; i += 32 * kImageRows) {
    *reinterpret_cast<uint4*>(image + 2 * R * rows + i / 8 * (16 * rows) + tile * 128 + i % 8 * 16) = from[R + i];
  }
#endif
}

}  // namespace turboquant::cuda::mla
