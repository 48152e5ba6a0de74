// A call of score or qjl_score as its kernels see it, and the queries of a block as operands of products with bytes: a
// coordinate becomes an integer, whose four bytes are four columns.
#pragma once

#include <cstdint>

#include "choices/score.h"
#include "cuda/codec/transform.cuh"
#include "cuda/common/device.cuh"
#include "cuda/score/operands.cuh"
#include "format.h"

namespace turboquant::cuda::scores {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kTileKeys = kOneQueryLeastKeys;   // of a warp at a time
constexpr int kBlockKeys = kWarps * kTileKeys;  // of a block at a time
constexpr int kSection = 128;                   // channels, or bits of a sketch, whose sums are integers
constexpr int kQuarter = 32;                    // neighbouring ones of a section that a lane has
constexpr int kMaxQueries = 4;                  // of a block; each pair of them shares the columns of a product
constexpr int kBlocksPerMultiprocessor = 2;
constexpr int one_query_blocks_per_multiprocessor(int bits) { return bits == 0 ? 4 : 2; }
constexpr int kPointBits = 25;  // fraction bits of a coordinate; sketches need room for a factor of 8 above
// The factor from a sum of bytes to the product, for coordinates in units of Side::unit.
template <typename Codes>
constexpr float kCodeUnit = format::kLevelUnit / (1 << kPointBits) / (1 << Codes::kPlace);

struct ScoreArguments {
  const void* q;
  Rows q_rows;  // batch * queries
  Dtype q_dtype;
  int queries, d;
  format::Split split;
  float hartley[format::kMaxBlocks];  // row 1 of the transform's odd factor
  int64_t keys;
  int key_blocks, query_blocks;
  int span;  // keys of a block
  float* out;

  const uint8_t* packed;  // codes: rows of row_bytes; null without codes
  const __half* scale;
  const float* signs;
  const int8_t* levels;
  format::Channels channels;  // [d]
  int bits, row_bytes, sections;

  const uint8_t* sign_bits;  // sketches: rows of sketch_bytes; null without them
  const float* norm;
  const float* projection;
  bool dense;
  int m, sketch_bytes, sketch_sections;
  float factor;

  bool in_registers;  // d = 128, and signs, center and projection allow 16-byte loads
};

// ---- Queries --------------------------------------------------------------------------------------------------------

// A block's queries in shared memory, prepared for the products with codes or with sketches.
struct Side {
  uint32_t* columns;  // bytes of coordinates: [sections][4 products][queries][t][4 bytes of a coordinate][2 words]
  float* work;        // [queries][d] floats; dense projections: [queries][d + m]
  float* unit;        // [queries]: the value of 2^kPointBits
  float* total;       // [queries]: <q, center> for codes, the sum of all coordinates for sketches
};

// The sizes of columns, work and tables in dynamic shared memory.
struct Layout {
  int code_columns, sketch_columns, code_work, sketch_work;  // words
  __host__ __device__ Layout(const ScoreArguments& a, int queries)
      : code_columns(queries * a.sections * kSection), sketch_columns(queries * a.sketch_sections * kSection),
        code_work(a.bits ? queries * a.d : 0), sketch_work(a.sign_bits ? queries * (a.d + (a.dense ? a.m : 0)) : 0) {}
  __host__ __device__ int bytes() const {
    return 4 * (code_columns + sketch_columns + code_work + sketch_work) + kTableBytes;
  }
};

// q * factors * inverse -> y[d] in shared memory, by one warp; factors may be null. Returns this lane's part of <q,
// center>.
__device__ __forceinline__ float load_products(const ScoreArguments& a, int64_t from, const float* factors,
                                               const format::Channels& channels, float* y, int lane) {
  constexpr int kAhead = 4;  // loads that are in flight together
  float sum = 0;
#pragma unroll 1
  for (int base = lane; base < a.d; base += 32 * kAhead) {
    float x[kAhead], factor[kAhead], other[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int c = base + 32 * i;
      x[i] = c < a.d ? load_float(a.q, a.q_dtype, from + c) : 0;
      factor[i] = factors && c < a.d ? factors[c] : 1;
      if (channels.inverse && c < a.d) factor[i] *= channels.inverse[c];
      other[i] = channels.center && c < a.d ? channels.center[c] : 0;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (base + 32 * i < a.d) y[base + 32 * i] = __fmul_rn(x[i], factor[i]);
      sum = __fmaf_rn(x[i], other[i], sum);
    }
  }
  return sum;
}

// The transform of y[d] in shared memory (docs/format.md section 2), by one warp. The code is short and the same for
// every d, because each block runs it once. row: row 1 of the m x m factor
__device__ inline void transform_shared(float* y, format::Split split, const float (&row)[format::kMaxBlocks],
                                        int lane) {
  const int m = split.blocks, n = split.block, d = m * n;
#pragma unroll 1
  for (int h = 1; h < n; h *= 2) {
    __syncwarp();
#pragma unroll 2
    for (int i = lane; i < d / 2; i += 32) {
      const int low = 2 * i - (i & (h - 1));
      const float p = y[low], q = y[low + h];
      y[low] = __fadd_rn(p, q), y[low + h] = __fsub_rn(p, q);
    }
  }
  __syncwarp();
  const float norm = __fsqrt_rn(__frcp_rn(static_cast<float>(n)));  // float32(1 / sqrt(n)): 1 / n is exact
#pragma unroll 4
  for (int c = lane; c < d; c += 32) y[c] = __fmul_rn(y[c], norm);
  __syncwarp();
  if (m == 1) return;
#pragma unroll 1
  for (int i = lane; i < n; i += 32) {
    float in[format::kMaxBlocks];
#pragma unroll 1
    for (int j = 0; j < m; ++j) in[j] = y[j * n + i];
#pragma unroll 1
    for (int b = 0; b < m; ++b) {
      float sum = __fmul_rn(row[0], in[0]);
      int entry = 0;  // b * j mod m
#pragma unroll 1
      for (int j = 1; j < m; ++j) {
        entry += b;
        if (entry >= m) entry -= m;
        sum = __fadd_rn(sum, __fmul_rn(row[entry], in[j]));
      }
      y[b * n + i] = sum;
    }
  }
  __syncwarp();
}

// load_products followed by the transform, for d = 128.
__device__ __forceinline__ float rotate_in_registers(const ScoreArguments& a, int64_t from, const float* signs,
                                                     const format::Channels& channels, float* y, int lane) {
  using Traits = HadamardTraits<1, 7, 32, 4>;
  float x[4], sign[4], mean[4] = {}, inverse[4] = {1, 1, 1, 1}, sum = 0;
  load_as<Traits>(a.q, a.q_dtype, from, lane, x);
  load<Traits>(signs, lane, sign);
  if (channels.center) load<Traits>(channels.center, lane, mean);
  if (channels.inverse) load<Traits>(channels.inverse, lane, inverse);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum = __fmaf_rn(x[i], mean[i], sum);
    x[i] = __fmul_rn(x[i], __fmul_rn(sign[i], inverse[i]));
  }
  transform<Traits>(x, lane);
  *reinterpret_cast<float4*>(y + 4 * lane) = make_float4(x[0], x[1], x[2], x[3]);
  __syncwarp();
  return sum;
}

// The exponent of the largest coordinate from the bits of its magnitude, limited to what power_of_two takes
// (prescale_exponent is limited further), and its power of two, or NaN if a coordinate is not finite.
__device__ __forceinline__ int coordinate_exponent(uint32_t amax) {
  return min(max(static_cast<int>(amax >> 23) - 127, -126), 126);
}
__device__ __forceinline__ float unit_of(uint32_t amax) {
  return amax < kInfinityBits ? power_of_two(coordinate_exponent(amax)) : quiet_nan();
}

// Writes word `word` of quarter t of a section of the columns, from coordinates y[count]: y * down becomes an integer,
// which is cut into bytes. bits = 0: for a sketch.
__device__ __forceinline__ void make_column(const float* y, int count, float down, int bits, bool uniform, int section,
                                            int t, int word, int query, int queries, uint32_t* columns) {
  uint32_t bytes[4];  // of each channel: signed digits in base 256
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int c = section * kSection + t * kQuarter +
                  (bits ? channel_of_byte(bits, uniform, word, j) : channel_of_sketch_byte(word, j));
    int point = c < count ? __float2int_rn(y[c] * down * (1 << kPointBits)) : 0;
    point <<= bits ? shift_of_byte(bits, uniform, j) : shift_of_sketch_word(word);
    bytes[j] = (static_cast<uint32_t>(point) + 0x80808080) ^ 0x80808080;
  }
  // Transposes four bytes of four channels.
  const uint32_t low01 = select_bytes(bytes[0], bytes[1], 0x5140), low23 = select_bytes(bytes[2], bytes[3], 0x5140);
  const uint32_t high01 = select_bytes(bytes[0], bytes[1], 0x7362), high23 = select_bytes(bytes[2], bytes[3], 0x7362);
  uint32_t* to = columns + (((section * 4 + word / 2) * queries + query) * 16 + t * 4) * 2 + word % 2;
  to[0] = select_bytes(low01, low23, 0x5410), to[2] = select_bytes(low01, low23, 0x7632);
  to[4] = select_bytes(high01, high23, 0x5410), to[6] = select_bytes(high01, high23, 0x7632);
}

// Makes all columns of one query, by one warp. bits = 0: for a sketch. total: this lane's part of Side::total
__device__ __forceinline__ void make_columns(const float* y, int count, int bits, bool uniform, int sections, int query,
                                             int queries, const Side& side, float total, int lane) {
  uint32_t amax = 0;
#pragma unroll 4
  for (int c = lane; c < count; c += 32) {
    amax = max(amax, magnitude_bits(y[c]));
    if (bits == 0) total += y[c];
  }
#pragma unroll 1  // unrolled shuffles are long, because the compiler does not know that all lanes are here
  for (int bit = 1; bit < 32; bit *= 2) {
    amax = max(amax, __shfl_xor_sync(0xffffffff, amax, bit));
    total += __shfl_xor_sync(0xffffffff, total, bit);
  }
  const float down = power_of_two(-coordinate_exponent(amax));
  if (lane == 0) side.unit[query] = unit_of(amax), side.total[query] = total;
#pragma unroll 1
  for (int i = lane; i < sections * 32; i += 32) {  // [section][t][word]
    make_column(y, count, down, bits, uniform, i / 32, i / 8 % 4, i % 8, query, queries, side.columns);
  }
}

// Prepares all that depends on the queries alone, by a whole block: warp w prepares query w % 4, for codes if w < 4,
// else for sketches. bits, uniform: of the codes; 0 bits: there are none. The caller synchronises.
template <bool SKETCH>
__device__ __forceinline__ void prepare_queries(const ScoreArguments& a, int bits, bool uniform, int64_t first_row,
                                                int queries, const Side& codes, const Side& sketch) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, query = warp % kMaxQueries;
  const bool sketched = SKETCH && (bits == 0 || warp >= kMaxQueries), dense = sketched && a.dense;
  const bool mine = query < queries && (sketched ? warp >= kMaxQueries && a.sign_bits : warp < kMaxQueries);
  const Side side = sketched ? sketch : codes;
  const int stride = dense ? a.d + a.m : a.d, count = sketched ? a.m : a.d;
  float *y = side.work + query * stride, total = 0;
  if (mine) {
    const float* factors = !sketched ? a.signs : dense ? nullptr : a.projection;
    const format::Channels channels = sketched ? format::Channels{} : a.channels;
    const int64_t from = a.q_rows(first_row + query);
    if (a.in_registers && !dense) {
      total = rotate_in_registers(a, from, factors, channels, y, lane);
    } else {
      total = load_products(a, from, factors, channels, y, lane);
      if (!dense) transform_shared(y, a.split, a.hartley, lane);
    }
  }
  if (SKETCH && a.dense) {  // all warps divide the rows of the projection
    __syncthreads();
#pragma unroll 1
    for (int i = warp; i < a.m; i += kWarps) {
      float sum[kMaxQueries] = {};
#pragma unroll 4
      for (int c = lane; c < a.d; c += 32) {
        const float s = __ldg(a.projection + int64_t{i} * a.d + c);
#pragma unroll
        for (int k = 0; k < kMaxQueries; ++k) {
          if (k < queries) sum[k] = __fmaf_rn(s, sketch.work[k * (a.d + a.m) + c], sum[k]);
        }
      }
#pragma unroll
      for (int k = 0; k < kMaxQueries; ++k) {
#pragma unroll 1
        for (int bit = 1; bit < 32; bit *= 2) sum[k] += __shfl_xor_sync(0xffffffff, sum[k], bit);
        if (k < queries) sketch.work[k * (a.d + a.m) + a.d + i] = sum[k];
      }
    }
    __syncthreads();
    if (dense) y += a.d;
  }
  if (!mine) return;
  make_columns(y, count, sketched ? 0 : bits, uniform, sketched ? a.sketch_sections : a.sections, query, queries, side,
               total, lane);
}

}  // namespace turboquant::cuda::scores
