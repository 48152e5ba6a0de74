// encode, decode: standalone vectors [..., d] as dense rows and one scale each (docs/format.md sections 5 to 7).
#include "codec.h"

#include "dense.h"
#include "runtime.h"

namespace turboquant::cpu {
namespace {

// A checked center's numbers, or null.
const float* center_of(const OptionalTensor& center) {
  return center ? static_cast<const float*>(center->data_ptr()) : nullptr;
}

// x: [..., d] float, stride 1 in the last dimension -> packed uint8 [..., row_bytes], scale float16 [...]
std::tuple<Tensor, Tensor> encode(const Tensor& x, const Tensor& signs, const OptionalTensor& levels,
                                  const Tensor& steps, int64_t bits, int64_t scale_mode, const OptionalTensor& center) {
  const format::Split split = check_encode(x, signs, bits, scale_mode, center);
  const int64_t d = x.size(x.dim() - 1);
  const Codebook book = checked_codebook(x, levels, steps, bits, "levels", "steps");
  const float* mean = center_of(center);

  const int64_t row_bytes = format::dense_row_bytes(d, bits);
  Tensor packed = empty_like_shape(x, leading_shape(x, 1, {row_bytes}), ScalarType::Byte);
  Tensor scale = empty_like_shape(x, leading_shape(x, 1, {}), ScalarType::Half);
  uint8_t* packed_out = static_cast<uint8_t*>(packed.data_ptr());
  uint16_t* scale_out = static_cast<uint16_t*>(scale.data_ptr());
  const float* s = static_cast<const float*>(signs.data_ptr());
  const Rows rows(x);
  dispatch_float(x.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* in = static_cast<const T*>(x.data_ptr());
    parallel_for(rows.count(), 16, [&](int64_t begin, int64_t end) {
      Encoder encoder(book, s, split, static_cast<ScaleMode>(scale_mode));
      std::vector<float> vector(d);
      std::vector<uint8_t> codes(d);
      for (int64_t r = begin; r < end; ++r) {
        to_float(in + rows(r), vector.data(), d);
        if (mean) subtract(vector.data(), mean, d);
        scale_out[r] = encoder(vector.data(), codes.data());
        pack_row(codes.data(), packed_out + r * row_bytes, d, bits);
      }
    });
  });
  return {packed, scale};
}

// packed: uint8 [..., row_bytes], scale: float16 [...], both contiguous -> [..., d] of `dtype`; d is that of signs
Tensor decode(const Tensor& packed, const Tensor& scale, const Tensor& signs, const OptionalTensor& levels,
              int64_t bits, ScalarType dtype, const OptionalTensor& center) {
  check_codec_bits(bits);
  check_output_dtype(dtype);
  const DenseVectors in = checked_dense_vectors(packed, scale, signs, levels, bits);
  if (center) check_constant(*center, packed, "center", ScalarType::Float, {in.d});
  const float* mean = center_of(center);

  Tensor out = empty_like_shape(packed, leading_shape(packed, 1, {in.d}), dtype);
  dispatch_float(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    T* to = static_cast<T*>(out.data_ptr());
    parallel_for(in.count, 32, [&](int64_t begin, int64_t end) {
      std::vector<uint8_t> codes(in.d);
      std::vector<float> y(in.d);
      for (int64_t r = begin; r < end; ++r) {
        in.decode_rotated(r, codes.data(), y.data());
        rotate_back(y.data(), in.signs, in.split);
        if (mean) add(y.data(), mean, in.d);
        from_float(y.data(), to + r * in.d, in.d);
      }
    });
  });
  return out;
}

}  // namespace
}  // namespace turboquant::cpu

STABLE_TORCH_LIBRARY_IMPL(turboquant, CPU, m) {
  m.impl("encode", TORCH_BOX(&turboquant::cpu::encode));
  m.impl("decode", TORCH_BOX(&turboquant::cpu::decode));
}
