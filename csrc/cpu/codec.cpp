// encode, decode: standalone vectors [..., d] as dense rows and one scale each (docs/format.md sections 5 to 7).
#include "cpu/codec/codebook.h"
#include "cpu/common/torch.h"

namespace turboquant::cpu {
namespace {

// x: [..., d] float, stride 1 in the last dimension -> packed uint8 [..., row_bytes], scale float16 [...]
std::tuple<Tensor, Tensor> encode(const Tensor& x, const Tensor& signs, const OptionalTensor& levels,
                                  const Tensor& steps, int64_t bits, int64_t scale_mode, const OptionalTensor& center) {
  const format::Split split = check_encode(x, signs, bits, scale_mode, center);
  const int64_t d = x.size(x.dim() - 1), row_bytes = format::dense_row_bytes(d, bits);
  const Codebook book = checked_codebook(x, levels, steps, bits, "levels", "steps");
  const Quantiser quantiser = book.quantiser(d, static_cast<format::ScaleMode>(scale_mode));

  Tensor packed = new_tensor(x, leading_shape(x, 1, {row_bytes}), ScalarType::Byte);
  Tensor scale = new_tensor(x, leading_shape(x, 1, {}), ScalarType::Half);
  uint8_t* packed_out = data_of<uint8_t>(packed);
  uint16_t* scale_out = data_of<uint16_t>(scale);
  const float* s = checked_signs(signs, "signs");
  const format::Channels channels = channels_of(center, data_of<float>(center), 1, d);
  const Rows rows(x);
  parallel_for(rows.count(), row_grain(d, 4 + 4 * quantiser.num_steps), [&](int64_t begin, int64_t end) {
    rows.runs(begin, end, [&](int64_t first, int64_t count, int64_t offset, int64_t stride) {
      const EncodeRows some{.x = element(x, offset),
                            .dtype = dtype_of(x),
                            .count = count,
                            .stride = stride,
                            .split = split,
                            .signs = s,
                            .channels = channels};
      kernels().encode(some, quantiser, packed_out + first * row_bytes, scale_out + first);
    });
  });
  return {packed, scale};
}

// packed: uint8 [..., row_bytes], scale: float16 [...], both contiguous -> [..., d] of `dtype`; d is that of signs
Tensor decode(const Tensor& packed, const Tensor& scale, const Tensor& signs, const OptionalTensor& levels,
              int64_t bits, ScalarType dtype, const OptionalTensor& center) {
  check_codec_bits(bits);
  check_output_dtype(dtype);
  const int64_t d = check_dense_vectors(packed, scale, signs, bits), row_bytes = format::dense_row_bytes(d, bits);
  const format::Width width = format::as_width(bits);
  const Levels table(width, checked_levels(levels, packed, bits, "levels"));
  check_center(center, packed, d);
  const format::Channels channels = channels_of(center, data_of<float>(center), 1, d);

  Tensor out = new_tensor(packed, leading_shape(packed, 1, {d}), dtype);
  const uint8_t* in = data_of<uint8_t>(packed);
  const uint16_t* scales = data_of<uint16_t>(scale);
  const float* s = checked_signs(signs, "signs");
  parallel_for(packed.numel() / row_bytes, row_grain(d, 4), [&](int64_t begin, int64_t end) {
    const DecodeRows some{.packed = in + begin * row_bytes,
                          .scale = scales + begin,
                          .count = end - begin,
                          .width = width,
                          .levels = table.of,
                          .split = format::split_dim(d),
                          .signs = s,
                          .channels = channels,
                          .dtype = dtype_of(dtype)};
    kernels().decode(some, element(out, begin * d));
  });
  return out;
}

}  // namespace
}  // namespace turboquant::cpu

STABLE_TORCH_LIBRARY_IMPL(turboquant, CPU, m) {
  m.impl("encode", TORCH_BOX(&turboquant::cpu::encode));
  m.impl("decode", TORCH_BOX(&turboquant::cpu::decode));
}
