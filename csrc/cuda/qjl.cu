// qjl_sketch: sign bits of a projected residual and its length (docs/format.md section 10). qjl_score is in score.cu.
//
// Structured projections are memory bound: a few lanes hold a vector, rotate it and collect the sign bits of their
// channels. Exact zeros, and sums whose sign depends on the scaling by a power of two, need care: a warp that finds
// one does its vectors again, exactly as the format says. Other lengths take a kernel that always does so, and many
// 16-bit vectors of 64, 128 or 256 channels take a kernel on tensor cores (score/sketch_bulk.cu). choices/score.h
// decides. Dense projections have a kernel on tensor cores, too (score/dense_sketch.cu); for devices and lengths that
// it does not take, products are summed here in a fixed order, without fused multiply-adds.
#include <algorithm>

#include "calls/sketch.h"
#include "choices/score.h"
#include "cuda/codec/arguments.cuh"
#include "cuda/codec/lanes.cuh"
#include "cuda/codec/transform.cuh"
#include "cuda/common/device_facts.cuh"
#include "cuda/score/dense_sketch.cuh"
#include "cuda/score/sketch_bulk.cuh"

namespace turboquant::cuda {
namespace {

// ---- Structured ---------------------------------------------------------------------------------------------------

constexpr int kThreads = 128;

// The lanes of a vector do several vectors, one after the other, and keep the signs in registers if they fit.
template <typename Traits>
constexpr bool kHoldsSigns = Traits::kPerLane <= 64;
template <typename Traits>
constexpr int kRepeats = kHoldsSigns<Traits> ? 4 : 1;

// The butterflies of signs * y. The first stage includes the signs, whose products are exact.
template <typename Traits>
__device__ __forceinline__ void signed_butterflies(float (&y)[Traits::kPerLane], const float (&sign)[Traits::kPerLane],
                                                   int lane) {
#pragma unroll
  for (int i = 0; i < Traits::kPerLane; i += 2) {
    const float p = __fmul_rn(y[i], sign[i]), q = y[i + 1];
    y[i] = __fmaf_rn(sign[i + 1], q, p);
    y[i + 1] = __fmaf_rn(-sign[i + 1], q, p);
  }
  lane_butterflies<2, Traits::kVec>(y);
#pragma unroll
  for (int bit = 1; bit < Traits::kLanes; bit *= 2) {
    const float side = lane & bit ? -1.0f : 1.0f;  // as in butterflies()
#pragma unroll
    for (int i = 0; i < Traits::kPerLane; ++i) y[i] = __fmaf_rn(side, y[i], __shfl_xor_sync(0xffffffff, y[i], bit));
  }
  lane_butterflies<Traits::kVec, Traits::kVec * Traits::kChunks>(y);
}

// residual: rows of Traits::kDim channels -> bits: [count, d / 8], norms: [count]
template <typename Traits>
__global__ void __launch_bounds__(kThreads)
    sketch_kernel(const void* residual, const __grid_constant__ Rows rows, const float* signs, Dtype dtype,
                  uint8_t* bits, float* norms) {
  constexpr int kLanes = Traits::kLanes, kPerLane = Traits::kPerLane, kBytes = kPerLane / 8;
  constexpr int kVectors = 32 / kLanes, kWarpBytes = 4 * kPerLane;  // of a warp at a time
  constexpr float kNorm = block_norm(Traits::kLogBlock);
  static_assert(Traits::kVec == 8, "the bits of a byte lie in one lane");
  __shared__ alignas(16) uint8_t staged[kThreads / 32][kWarpBytes];

  const int lane = threadIdx.x % kLanes, in_warp = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t warp_first = (int64_t{blockIdx.x} * (kThreads / 32) + warp) * (kVectors * kRepeats<Traits>);
  float sign[kPerLane];
  if constexpr (kHoldsSigns<Traits>) load<Traits>(signs, lane, sign);

#pragma unroll 1
  for (int repeat = 0; repeat < kRepeats<Traits>; ++repeat) {
    const int64_t first = warp_first + repeat * kVectors, vector = first + in_warp / kLanes;
    if (first >= rows.count) return;
    const bool active = vector < rows.count;  // idle lanes take part in the shuffles
    const int64_t from = rows(active ? vector : first);

    // The next vectors are prefetched to L2 while these are in registers.
    if (repeat + 1 < kRepeats<Traits> && vector + kVectors < rows.count) {
      const int64_t next = rows(vector + kVectors) + lane * kPerLane;
      const char* p = static_cast<const char*>(residual) + next * (dtype == Dtype::kFloat32 ? 4 : 2);
      asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
    }

    float norm = 0;
    uint32_t negative[(kBytes + 3) / 4];  // one bit per channel of the lane
#pragma unroll 1
    for (bool exact = false;; exact = true) {
      float y[kPerLane], square[kPerLane];
      load_as<Traits>(residual, dtype, from, lane, y);
      bool broken = false;
      float up = 1;
      if (exact) {
        uint32_t amax = 0;
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) amax = max(amax, magnitude_bits(y[i]));
        amax = max_of_lanes<kLanes>(amax);
        broken = amax >= kInfinityBits;
        up = power_of_two(prescale_exponent(amax));
        const float down = power_of_two(-prescale_exponent(amax));
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) y[i] = __fmul_rn(y[i], down);
      }
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) square[i] = __fmul_rn(y[i], y[i]);
      const float sum = tree_sum<Traits>(square);
      norm = broken ? quiet_nan() : __fmul_rn(__fsqrt_rn(sum), up);

      if constexpr (!kHoldsSigns<Traits>) load<Traits>(signs, lane, sign);
      signed_butterflies<Traits>(y, sign, lane);
      if (exact || Traits::kBlocks > 1) {
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) y[i] = __fmul_rn(y[i], kNorm);
        mix_blocks<Traits>(y);
      }
      if (exact) {  // -0 counts as positive
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) y[i] = y[i] >= 0 ? 1.0f : -1.0f;
      }

      float least = INFINITY;
#pragma unroll
      for (int w = 0; w < (kBytes + 3) / 4; ++w) {
        negative[w] = 0;
#pragma unroll
        for (int i = min(32, kPerLane - 32 * w) - 1; i >= 0; --i) {
          negative[w] = __funnelshift_l(__float_as_uint(y[32 * w + i]), negative[w], 1);
          least = fminf(least, fabsf(y[32 * w + i]));
        }
        if (broken) negative[w] = 0xffffffff;
      }
      if (exact) break;
      // Within these bounds the power of two changes no rounding. It could change a sign only where large channels
      // cancel and leave others that are 2^100 times smaller, and then a sum is small.
      if (__all_sync(0xffffffff, sum >= 0x1p-60f && sum <= 0x1p100f && least > norm * 0x1p-30f)) break;
    }

    // The bytes of a warp's vectors are neighbours, and are stored four at a time.
    uint8_t* to = staged[warp] + in_warp / kLanes * (Traits::kDim / 8);
#pragma unroll
    for (int k = 0; k < kBytes; ++k) {
      to[Traits::channel(lane, k) / 8] = static_cast<uint8_t>(~negative[k / 4] >> 8 * (k % 4));
    }
    __syncwarp();
    const int bytes = static_cast<int>(min(int64_t{kVectors}, rows.count - first)) * (Traits::kDim / 8);
    uint8_t* out = bits + first * (Traits::kDim / 8);
#pragma unroll 1
    for (int at = 4 * in_warp; at < kWarpBytes; at += 128) {
      if (at + 4 <= bytes) {
        *reinterpret_cast<uint32_t*>(out + at) = *reinterpret_cast<const uint32_t*>(staged[warp] + at);
      } else {
        for (int i = at; i < bytes; ++i) out[i] = staged[warp][i];
      }
    }
    __syncwarp();
    if (active && lane == 0) norms[vector] = norm;
  }
}

// Any d, exactly as the format says: a warp holds a vector in registers (codec/lanes.cuh) or in dynamic shared memory
// (codec/generic.cuh). residual: rows of d channels -> bits: [count, d / 8], norms: [count]
template <typename Shape>
__global__ void __launch_bounds__(kThreads)
    sketch_any_kernel(const void* residual, const __grid_constant__ Rows rows, const __grid_constant__ Shape shape,
                      const float* signs, Dtype dtype, uint8_t* bits, float* norms) {
  static_assert(Shape::kLanes == 32);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, d = shape.d;
  const int64_t vector = int64_t{blockIdx.x} * (blockDim.x / 32) + warp;
  if (vector >= rows.count) return;
  uint8_t* to = bits + vector * (d / 8);

  uint32_t amax = 0;
  float sum;
  if constexpr (Shape::kInRegisters) {
    using Vector = LaneVector<32>;
    Vector v;
    v.load(shape, residual, dtype, rows(vector), signs, {}, lane);
    Vector::for_each_pair(shape,
                          [&](int e) { amax = max(amax, max(magnitude_bits(v.y[e]), magnitude_bits(v.y[e + 1]))); });
    amax = max_of_lanes(amax);
    const float down = power_of_two(-prescale_exponent(amax));
    Vector::for_each_pair(shape, [&](int e) { v.multiply(e, {down, down}); });
    sum = v.sum_of_squares(shape);
    v.transform(shape, true, lane);
    // Four lanes have two bits each of a byte.
    const int place = 2 * (lane % 4);
    Vector::for_each_pair(shape, [&](int e) {
      uint32_t byte = (static_cast<uint32_t>(v.y[e] >= 0) | static_cast<uint32_t>(v.y[e + 1] >= 0) << 1) << place;
#pragma unroll
      for (int bit = 1; bit < 4; bit *= 2) byte |= __shfl_xor_sync(0xffffffff, byte, bit);
      if (place == 0) to[Vector::channel(e, lane) / 8] = amax < kInfinityBits ? static_cast<uint8_t>(byte) : 0;
    });
  } else {
    extern __shared__ float shared[];
    float* y = shared + warp * generic_words(d);
    load_generic(y, d, residual, dtype, rows(vector), signs, {}, lane);
    for (int c = lane; c < d; c += 32) amax = max(amax, magnitude_bits(y[c]));
    amax = max_of_lanes(amax);
    const float down = power_of_two(-prescale_exponent(amax));
    for (int c = lane; c < d; c += 32) y[c] = __fmul_rn(y[c], down);
    sum = generic_sum_of_squares(y, y + generic_stride(d), shape, lane);
    transform_generic(y, shape, true, lane);
    for (int byte = lane; byte < d / 8; byte += 32) {
      unsigned packed = 0;
      for (int k = 0; k < 8; ++k) packed |= static_cast<unsigned>(y[8 * byte + k] >= 0) << k;
      to[byte] = amax < kInfinityBits ? static_cast<uint8_t>(packed) : 0;
    }
  }
  if (lane == 0) {
    const float up = power_of_two(prescale_exponent(amax));
    norms[vector] = amax < kInfinityBits ? __fmul_rn(__fsqrt_rn(sum), up) : quiet_nan();
  }
}

// ---- Dense --------------------------------------------------------------------------------------------------------

constexpr int kDenseThreads = 256;
constexpr int kTileVectors = 32, kTileRows = 64;  // outputs of a block at a time
constexpr int kOwnVectors = 4, kOwnRows = 2;      // of a thread; the lanes of a warp take different rows
constexpr int kTileChannels = 64;                 // in shared memory at a time
constexpr int kStride = kTileChannels + 4;        // of a row there, so that 16-byte reads have no bank conflicts
constexpr int kLevels = 8;                        // of partial sums of 16 channels and more: n <= 4096
static_assert(kDenseThreads == 32 * kTileVectors / kOwnVectors && kTileRows == 32 * kOwnRows);

// The pairwise sum of N rounded products.
template <int N>
__device__ __forceinline__ float product_tree(const float* a, const float* b) {
  if constexpr (N == 1) {
    return __fmul_rn(a[0], b[0]);
  } else {
    const float low = product_tree<N / 2>(a, b);
    return __fadd_rn(low, product_tree<N / 2>(a + N / 2, b + N / 2));
  }
}

// residual: rows of d = blocks * n channels, projection: [m, d] -> bits: [count, m / 8], norms: [count]. INNER divides
// n. A block takes kTileVectors vectors and all rows of the projection. The squares of a vector are one more row.
template <int INNER>
__global__ void __launch_bounds__(kDenseThreads, 2)
    dense_sketch_kernel(const void* residual, const __grid_constant__ Rows rows, Dtype dtype, const float* projection,
                        int m, int blocks, int n, uint8_t* bits, float* norms) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  if constexpr (INNER >= 16) return;  // from here on only lengths that are no multiple of 8 take this kernel
#endif
  __shared__ alignas(16) float vectors[kTileVectors][kStride];
  __shared__ alignas(16) float tile[kTileRows][kStride];
  __shared__ float down[kTileVectors];  // 2^-e of each vector
  __shared__ bool broken[kTileVectors];
  __shared__ int64_t start[kTileVectors];
  const int d = blocks * n, thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int64_t first = int64_t{blockIdx.x} * kTileVectors;
  const int count = static_cast<int>(min(int64_t{kTileVectors}, rows.count - first));

  for (int v = warp; v < kTileVectors; v += kDenseThreads / 32) {
    uint32_t amax = 0;
    if (v < count) {
      const int64_t from = rows(first + v);
      for (int c = lane; c < d; c += 32) amax = max(amax, magnitude_bits(load_float(residual, dtype, from + c)));
    }
    amax = max_of_lanes(amax);
    if (lane == 0) {
      down[v] = power_of_two(-prescale_exponent(amax)), broken[v] = amax >= kInfinityBits;
      start[v] = rows(first + min(v, count - 1));
    }
  }

  const int own = warp * kOwnVectors;
  for (int tile_row = 0; tile_row < m; tile_row += kTileRows) {
    float total[kOwnVectors][kOwnRows], length = 0;
    for (int block = 0; block < blocks; ++block) {
      // Sums of 2^level * INNER channels that have no right neighbour yet, as the digits of a binary counter.
      float waiting[kOwnVectors * kOwnRows + 1][kLevels];
      const auto carry = [&](float* wait, float sum, int index, float total) {
#pragma unroll
        for (int level = 0; level < kLevels; ++level) {
          if (!(index >> level & 1)) {
            wait[level] = sum;
            break;
          }
          sum = __fadd_rn(wait[level], sum);
        }
        if ((index + 1) * INNER < n) return total;
        return block ? __fadd_rn(total, sum) : sum;
      };
      for (int base = 0; base < n; base += kTileChannels) {
        const int width = min(kTileChannels, n - base), from = block * n + base;
        __syncthreads();
        const int c = thread % kTileChannels;
        if (c < width) {
#pragma unroll 4
          for (int v = thread / kTileChannels; v < kTileVectors; v += kDenseThreads / kTileChannels) {
            vectors[v][c] = __fmul_rn(load_float(residual, dtype, start[v] + from + c), down[v]);
          }
#pragma unroll 4
          for (int r = thread / kTileChannels; r < kTileRows; r += kDenseThreads / kTileChannels) {
            tile[r][c] = tile_row + r < m ? __ldg(projection + int64_t{tile_row + r} * d + from + c) : 0.0f;
          }
        }
        __syncthreads();
#pragma unroll 1
        for (int c = 0; c < width; c += INNER) {
          const int index = (base + c) / INNER;
          float a[INNER];
#pragma unroll
          for (int r = 0; r < kOwnRows; ++r) {
            float b[INNER];
#pragma unroll
            for (int i = 0; i < INNER; ++i) b[i] = tile[lane + 32 * r][c + i];
#pragma unroll
            for (int v = 0; v < kOwnVectors; ++v) {
#pragma unroll
              for (int i = 0; i < INNER; ++i) a[i] = vectors[own + v][c + i];
              total[v][r] = carry(waiting[v * kOwnRows + r], product_tree<INNER>(a, b), index, total[v][r]);
            }
          }
          if (tile_row == 0 && lane < kOwnVectors) {
#pragma unroll
            for (int i = 0; i < INNER; ++i) a[i] = vectors[own + lane][c + i];
            length = carry(waiting[kOwnVectors * kOwnRows], product_tree<INNER>(a, a), index, length);
          }
        }
      }
    }
#pragma unroll
    for (int v = 0; v < kOwnVectors; ++v) {
      const int64_t vector = first + own + v;
#pragma unroll
      for (int r = 0; r < kOwnRows; ++r) {
        const uint32_t word = __ballot_sync(0xffffffff, total[v][r] >= 0 && !broken[own + v]);
        const int byte = (tile_row + 32 * r) / 8 + lane;
        if (lane < 4 && byte < m / 8 && own + v < count)
          bits[vector * (m / 8) + byte] = static_cast<uint8_t>(word >> 8 * lane);
      }
    }
    if (tile_row == 0 && lane < kOwnVectors && own + lane < count) {
      const float norm = __fdiv_rn(__fsqrt_rn(length), down[own + lane]);  // an exact division
      norms[first + own + lane] = broken[own + lane] ? quiet_nan() : norm;
    }
  }
}

// ---- Host ---------------------------------------------------------------------------------------------------------

// Calls fn(DefaultHadamard<..>) for the head_dims of kSketchLaneDims.
template <typename Fn>
void dispatch_lane_dim(format::Split split, Fn&& fn) {
  switch (split.blocks * split.block) {
    case 64: return fn(DefaultHadamard<1, 6>{});
    case 80: return fn(DefaultHadamard<5, 4>{});
    case 96: return fn(DefaultHadamard<3, 5>{});
    case 112: return fn(DefaultHadamard<7, 4>{});
    case 128: return fn(DefaultHadamard<1, 7>{});
    case 160: return fn(DefaultHadamard<5, 5>{});
    case 192: return fn(DefaultHadamard<3, 6>{});
    case 256: return fn(DefaultHadamard<1, 8>{});
    case 512: return fn(DefaultHadamard<1, 9>{});
    case 576: return fn(DefaultHadamard<9, 6>{});
    default: STD_TORCH_CHECK(false, "qjl_sketch has no kernel of head_dim ", split.blocks * split.block);
  }
}

// residual: [..., d] float, stride 1 in the last dimension -> sign_bits uint8 [..., m / 8], norm float32 [...]
std::tuple<Tensor, Tensor> qjl_sketch(const Tensor& residual, const Tensor& projection) {
  check_float(residual, "residual");
  check_unit_last_stride(residual, "residual");
  const int64_t d = residual.size(residual.dim() - 1);
  const Projection sketch(projection, residual, d);
  const format::Split split = format::split_dim(d);

  Tensor bits = new_tensor(residual, leading_shape(residual, 1, {sketch.bytes()}), ScalarType::Byte);
  Tensor norm = new_tensor(residual, leading_shape(residual, 1, {}), ScalarType::Float);
  if (residual.numel() == 0) return {bits, norm};
  uint8_t* bits_out = static_cast<uint8_t*>(bits.data_ptr());
  float* norm_out = static_cast<float*>(norm.data_ptr());

  const Launch launch(residual);
  const Dtype dtype = dtype_of(residual);
  const AlignedRows in(residual, sketch.dense && d % 8 != 0 ? 1 : 16);
  const Rows& rows = in.rows();
  const Constant<float> constant(projection);
  const auto& [index, facts] = current_device();
  if (sketch.dense) {
    STD_TORCH_CHECK(sketch.rows <= INT32_MAX, "projection has ", sketch.rows, " rows, supported: up to ", INT32_MAX);
  }
  const int m = static_cast<int>(sketch.rows);
  switch (choose_sketch({.dense = sketch.dense, .head_dim = d, .vectors = rows.count, .dtype = dtype}, facts).kernel) {
    case SketchKernel::kDenseTiles:
      launch_dense_sketch(in.data(), rows, dtype, split, constant.data(), m, bits_out, norm_out, facts, index,
                          launch.stream());
      break;
    case SketchKernel::kDense: {
      const auto start = [&](auto inner) {
        dense_sketch_kernel<inner><<<num_blocks(rows.count, kTileVectors), kDenseThreads, 0, launch.stream()>>>(
            in.data(), rows, dtype, constant.data(), m, split.blocks, split.block, bits_out, norm_out);
      };
      if (split.block >= 16) {
        start(std::integral_constant<int, 16>{});
      } else {
        start(std::integral_constant<int, 2>{});
      }
      break;
    }
    case SketchKernel::kBulk:
      launch_sketch_bulk(in.data(), rows, dtype, split, constant.data(), bits_out, norm_out, facts, launch.stream());
      break;
    case SketchKernel::kLanes:
      dispatch_lane_dim(split, [&](auto traits) {
        using Traits = decltype(traits);
        constexpr int per_block = kThreads / Traits::kLanes * kRepeats<Traits>;
        sketch_kernel<Traits>
            <<<num_blocks(rows.count, per_block), kThreads, 0, launch.stream()>>>(in.data(), rows, constant.data(),
                                                                                  dtype, bits_out, norm_out);
      });
      break;
    case SketchKernel::kGeneral: {
      const auto start = [&]<typename Shape>(const Shape& shape) {
        // 48 KB hold a warp's vector at least.
        const int bytes = Shape::kInRegisters ? 0 : 4 * generic_words(shape.d);
        const int warps = bytes ? std::clamp(kDefaultSharedBytes / bytes, 1, kThreads / 32) : kThreads / 32;
        sketch_any_kernel<<<num_blocks(rows.count, warps), 32 * warps, warps * bytes, launch.stream()>>>(
            in.data(), rows, shape, constant.data(), dtype, bits_out, norm_out);
      };
      // Vectors that eight or 16 lanes could share have fewer than 64 channels, or 224. Two kernels more for them would
      // add 36 KB to the library.
      if (choices::vector_lanes(split) == 32) {
        start(LaneShape<32>(split));
      } else {
        start(GenericShape(split));
      }
      break;
    }
  }
  launch.check("qjl_sketch");
  return {bits, norm};
}

}  // namespace
}  // namespace turboquant::cuda

STABLE_TORCH_LIBRARY_IMPL(turboquant, CUDA, m) { m.impl("qjl_sketch", TORCH_BOX(&turboquant::cuda::qjl_sketch)); }
