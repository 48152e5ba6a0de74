// group_encode, group_decode: affine quantisation of groups of channels, with a scale and a zero per group
// (docs/format.md section 10). Papers quantise values this way, so it is the baseline for them. A group in this file
// is a quantisation group.
//
// Both kernels are memory bound. To encode, a lane takes 16 neighbouring channels, so that two or four lanes share a
// group; to decode, a lane takes 8 channels at a time.
#include <cfloat>

#include "cuda/common/torch.cuh"

namespace turboquant::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kEncoded = 16;       // channels of a lane
constexpr int kDecoded = 8;        // channels of a lane at a time
constexpr int kDecodeRepeats = 2;  // so that several loads are in flight

// 2^23. Between it and 2^24, float32 holds integers only, in the low bits of its representation.
constexpr float kIntegers = 8388608.0f;
constexpr uint32_t kIntegerBits = 0x4B000000;

__device__ __forceinline__ __half limited_half(float x) {
  return __float2half_rn(fminf(fmaxf(x, -format::kMaxHalf), format::kMaxHalf));
}

// x: rows of `row_groups` groups -> packed codes, scales and zeros of all groups, contiguous
template <int GROUP, int BITS>
__global__ void __launch_bounds__(kThreads, 8)
    group_encode_kernel(const void* x, const __grid_constant__ Rows rows, int64_t row_groups, Dtype dtype,
                        uint8_t* packed, __half* scales, __half* zeros) {
  constexpr int kLanes = GROUP / kEncoded;
  constexpr float top = (1 << BITS) - 1;
  const int lane = threadIdx.x % kLanes;
  const int64_t index = int64_t{blockIdx.x} * (kThreads / kLanes) + threadIdx.x / kLanes;
  const bool active = index < rows.count * row_groups;  // idle threads of the last block take part in the shuffles
  const int64_t group = active ? index : 0;
  int64_t from = group * GROUP;
  if (rows.dims > 1 || rows.stride[0] != row_groups * GROUP) {
    const int64_t row = group / row_groups;
    from = rows(row) + (group - row * row_groups) * GROUP;
  }

  float y[kEncoded];
  load_floats_as<kEncoded>(x, dtype, from + lane * kEncoded, y);
  float low = y[0], high = y[0], broken = 0;  // broken: NaN if any channel is NaN or infinite
#pragma unroll
  for (int i = 0; i < kEncoded; ++i) {
    low = fminf(low, y[i]), high = fmaxf(high, y[i]);
    broken = __fmaf_rn(y[i], 0.0f, broken);
  }
  if (broken != broken) low = -INFINITY;
#pragma unroll
  for (int bit = 1; bit < kLanes; bit *= 2) {
    low = fminf(low, __shfl_xor_sync(0xffffffff, low, bit));
    high = fmaxf(high, __shfl_xor_sync(0xffffffff, high, bit));
  }

  low = __fadd_rn(low, 0.0f), high = __fadd_rn(high, 0.0f);  // fminf may return either of -0 and +0: always take +0
  __half zero_half = limited_half(low);
  __half scale_half = limited_half(__fdiv_rn(__fsub_rn(high, low), top));
  if (low < -FLT_MAX) zero_half = scale_half = __ushort_as_half(format::kNanScale);
  const float zero = __half2float(zero_half), scale = __half2float(scale_half);
  const float inverse = __frcp_rn(scale);

  uint32_t word[kEncoded * BITS / 32];
#pragma unroll
  for (int w = 0; w < kEncoded * BITS / 32; ++w) {
    constexpr int kCodes = 32 / BITS;
    uint32_t sum = 0, offset = 0;
#pragma unroll
    for (int i = 0; i < kCodes; ++i) {
      const float t = __fadd_rn(__fmul_rn(__fsub_rn(y[w * kCodes + i], zero), inverse), 0.5f);
      const float code = __fadd_rd(fminf(fmaxf(t, 0.0f), top), kIntegers);  // rounded down: floor(t)
      sum += __float_as_uint(code) << BITS * i;
      offset += kIntegerBits << BITS * i;
    }
    word[w] = scale > 0 ? sum - offset : 0;  // 0 if the scale is NaN, too
  }

  if (!active) return;
  uint8_t* to = packed + (group * GROUP + lane * kEncoded) / 8 * BITS;
  if constexpr (BITS == 4) {
    *reinterpret_cast<uint2*>(to) = make_uint2(word[0], word[1]);
  } else {
    *reinterpret_cast<uint32_t*>(to) = word[0];
  }
  if (lane == 0) scales[group] = scale_half, zeros[group] = zero_half;
}

// packed: 4-byte aligned; count: channels of all groups together
template <int BITS, typename T>
__global__ void __launch_bounds__(kThreads)
    group_decode_kernel(const uint8_t* packed, const __half* scales, const __half* zeros, int log_group, int64_t count,
                        T* out) {
  const int64_t first = int64_t{blockIdx.x} * (kThreads * kDecodeRepeats * kDecoded) + threadIdx.x * kDecoded;
  uint32_t word[kDecodeRepeats] = {};
  __half scales_of[kDecodeRepeats] = {}, zeros_of[kDecodeRepeats] = {};
#pragma unroll
  for (int k = 0; k < kDecodeRepeats; ++k) {
    const int64_t at = first + k * (kThreads * kDecoded);
    if (at >= count) continue;
    const uint8_t* from = packed + at / 8 * BITS;
    if constexpr (BITS == 4) {
      word[k] = __ldg(reinterpret_cast<const uint32_t*>(from));
    } else {
      word[k] = __ldg(reinterpret_cast<const uint16_t*>(from));
    }
    scales_of[k] = __ldg(scales + (at >> log_group)), zeros_of[k] = __ldg(zeros + (at >> log_group));
  }
#pragma unroll
  for (int k = 0; k < kDecodeRepeats; ++k) {
    const int64_t at = first + k * (kThreads * kDecoded);
    if (at >= count) continue;
    const float scale = __half2float(scales_of[k]), zero = __half2float(zeros_of[k]);
    float y[kDecoded];
#pragma unroll
    for (int i = 0; i < kDecoded; ++i) {
      const uint32_t code = word[k] >> BITS * i & ((1 << BITS) - 1);
      y[i] = __fadd_rn(__fmul_rn(__fsub_rn(__uint_as_float(kIntegerBits | code), kIntegers), scale), zero);
    }
    store_floats<kDecoded>(y, out + at);
  }
}

// Calls fn(std::integral_constant<int, bits>) for 2 and 4 bits.
template <typename Fn>
void dispatch_bits(int64_t bits, Fn&& fn) {
  if (bits == 2) return fn(std::integral_constant<int, 2>{});
  return fn(std::integral_constant<int, 4>{});
}

// x: [..., d] float, stride 1 in the last dimension -> packed [..., row_bytes], scale and zero float16 [..., d / group]
std::tuple<Tensor, Tensor, Tensor> group_encode(const Tensor& x, int64_t group, int64_t bits) {
  check_float(x, "x");
  check_unit_last_stride(x, "x");
  const int64_t d = x.size(x.dim() - 1);
  check_group(d, group, bits);

  const int64_t groups = d / group;
  Tensor packed = new_tensor(x, leading_shape(x, 1, {format::dense_row_bytes(d, bits)}), ScalarType::Byte);
  Tensor scale = new_tensor(x, leading_shape(x, 1, {groups}), ScalarType::Half);
  Tensor zero = new_tensor(x, leading_shape(x, 1, {groups}), ScalarType::Half);
  if (x.numel() == 0) return {packed, scale, zero};

  const Launch launch(x);
  const AlignedRows in(x, 16);
  const auto run = [&](auto width, auto size) {
    group_encode_kernel<size, width>
        <<<num_blocks(scale.numel(), kThreads * kEncoded / size), kThreads, 0, launch.stream()>>>(
            in.data(), in.rows(), groups, dtype_of(x), static_cast<uint8_t*>(packed.data_ptr()),
            static_cast<__half*>(scale.data_ptr()), static_cast<__half*>(zero.data_ptr()));
  };
  dispatch_bits(bits, [&](auto width) {
    if (group == 32) return run(width, std::integral_constant<int, 32>{});
    return run(width, std::integral_constant<int, 64>{});
  });
  launch.check("group_encode");
  return {packed, scale, zero};
}

// packed: uint8 [..., row_bytes], scale and zero float16 [..., d / group] -> [..., d] of `dtype`
Tensor group_decode(const Tensor& packed, const Tensor& scale, const Tensor& zero, int64_t group, int64_t bits,
                    int64_t d, ScalarType dtype) {
  check_group(d, group, bits);
  check_output_dtype(dtype);
  check_packed_rows(packed, d, bits);
  const int64_t groups = d / group;
  check_beside(scale, packed, "scale", ScalarType::Half, 1, {groups});
  check_beside(zero, packed, "zero", ScalarType::Half, 1, {groups});
  const __half* scales = static_cast<const __half*>(scale.data_ptr());
  const __half* zeros = static_cast<const __half*>(zero.data_ptr());

  Tensor out = new_tensor(packed, leading_shape(packed, 1, {d}), dtype);
  const int64_t count = out.numel();
  if (count == 0) return out;
  const Launch launch(packed);
  const Tensor words = aligned(packed.data_ptr(), 4) ? packed : new_copy(packed);
  dispatch_bits(bits, [&](auto width) {
    dispatch_float(dtype_of(dtype), [&](auto tag) {
      using T = typename decltype(tag)::type;
      group_decode_kernel<width>
          <<<num_blocks(count, kThreads * kDecodeRepeats * kDecoded), kThreads, 0, launch.stream()>>>(
              bytes_of(words), scales, zeros, group == 32 ? 5 : 6, count, static_cast<T*>(out.data_ptr()));
    });
  });
  launch.check("group_decode");
  return out;
}

}  // namespace
}  // namespace turboquant::cuda

STABLE_TORCH_LIBRARY_IMPL(turboquant, CUDA, m) {
  m.impl("group_encode", TORCH_BOX(&turboquant::cuda::group_encode));
  m.impl("group_decode", TORCH_BOX(&turboquant::cuda::group_decode));
}
