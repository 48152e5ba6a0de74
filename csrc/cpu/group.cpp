// group_encode, group_decode: affine quantisation of groups of channels, scale and zero per group (docs/format.md
// section 10). The paper-form baseline for values.
#include "dense.h"

namespace turboquant::cpu {
namespace {

uint16_t limited_half_bits(float x) { return half_bits(std::clamp(x, -format::kMaxHalf, format::kMaxHalf)); }

// One group: x [group] -> codes [group]; returns the float16 bits of scale and zero.
std::pair<uint16_t, uint16_t> encode_group(const float* x, uint8_t* codes, int64_t group, int64_t bits) {
  std::memset(codes, 0, group);
  if (!(finite_amax(x, static_cast<int>(group)) <= FLT_MAX)) return {format::kNanScale, format::kNanScale};
  const auto [least, greatest] = std::minmax_element(x, x + group);
  const float low = *least + 0.0f, high = *greatest + 0.0f;  // of equal zeros either may be found: +0 counts
  const float top = static_cast<float>((1 << bits) - 1);
  const uint16_t zero_bits = limited_half_bits(low), scale_bits = limited_half_bits((high - low) / top);
  const float zero = half_value(zero_bits), scale = half_value(scale_bits);
  if (scale > 0) {
    const float inverse = 1 / scale;
    for (int64_t c = 0; c < group; ++c) {
      codes[c] = static_cast<uint8_t>(std::clamp(std::floor((x[c] - zero) * inverse + 0.5f), 0.0f, top));
    }
  }
  return {scale_bits, zero_bits};
}

// x: [..., d] float, stride 1 in the last dimension -> packed [..., row_bytes], scale and zero float16 [..., d / group]
std::tuple<Tensor, Tensor, Tensor> group_encode(const Tensor& x, int64_t group, int64_t bits) {
  check_float(x, "x");
  check_unit_last_stride(x, "x");
  const int64_t d = x.size(x.dim() - 1);
  check_group(d, group, bits);

  const int64_t row_bytes = format::dense_row_bytes(d, bits), groups = d / group;
  Tensor packed = empty_like_shape(x, leading_shape(x, 1, {row_bytes}), ScalarType::Byte);
  Tensor scale = empty_like_shape(x, leading_shape(x, 1, {groups}), ScalarType::Half);
  Tensor zero = empty_like_shape(x, leading_shape(x, 1, {groups}), ScalarType::Half);
  uint8_t* packed_out = static_cast<uint8_t*>(packed.data_ptr());
  uint16_t* scale_out = static_cast<uint16_t*>(scale.data_ptr());
  uint16_t* zero_out = static_cast<uint16_t*>(zero.data_ptr());
  const Rows rows(x);
  dispatch_float(x.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* in = static_cast<const T*>(x.data_ptr());
    parallel_for(rows.count(), 64, [&](int64_t begin, int64_t end) {
      std::vector<float> vector(d);
      std::vector<uint8_t> codes(d);
      for (int64_t r = begin; r < end; ++r) {
        to_float(in + rows(r), vector.data(), d);
        for (int64_t g = 0; g < groups; ++g) {
          std::tie(scale_out[r * groups + g], zero_out[r * groups + g]) =
              encode_group(vector.data() + g * group, codes.data() + g * group, group, bits);
        }
        pack_row(codes.data(), packed_out + r * row_bytes, d, static_cast<int>(bits));
      }
    });
  });
  return {packed, scale, zero};
}

// packed: uint8 [..., row_bytes], scale and zero float16 [..., d / group] -> [..., d] of `dtype`
Tensor group_decode(const Tensor& packed, const Tensor& scale, const Tensor& zero, int64_t group, int64_t bits,
                    int64_t d, ScalarType dtype) {
  check_group(d, group, bits);
  check_output_dtype(dtype);
  const int64_t row_bytes = check_packed_rows(packed, d, bits), groups = d / group;
  check_beside(scale, packed, "scale", ScalarType::Half, 1, {groups});
  check_beside(zero, packed, "zero", ScalarType::Half, 1, {groups});
  const uint16_t* scales = static_cast<const uint16_t*>(scale.data_ptr());
  const uint16_t* zeros = static_cast<const uint16_t*>(zero.data_ptr());

  Tensor out = empty_like_shape(packed, leading_shape(packed, 1, {d}), dtype);
  const uint8_t* in = static_cast<const uint8_t*>(packed.data_ptr());
  dispatch_float(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    T* to = static_cast<T*>(out.data_ptr());
    parallel_for(packed.numel() / row_bytes, 64, [&](int64_t begin, int64_t end) {
      std::vector<uint8_t> codes(d);
      for (int64_t r = begin; r < end; ++r) {
        unpack_row(in + r * row_bytes, codes.data(), d, static_cast<int>(bits));
        for (int64_t c = 0; c < d; ++c) {
          const int64_t g = r * groups + c / group;
          to[r * d + c] = static_cast<T>(static_cast<float>(codes[c]) * half_value(scales[g]) + half_value(zeros[g]));
        }
      }
    });
  });
  return out;
}

}  // namespace
}  // namespace turboquant::cpu

STABLE_TORCH_LIBRARY_IMPL(turboquant, CPU, m) {
  m.impl("group_encode", TORCH_BOX(&turboquant::cpu::group_encode));
  m.impl("group_decode", TORCH_BOX(&turboquant::cpu::group_decode));
}
