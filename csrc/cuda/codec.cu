// encode, decode: standalone vectors [..., d] as dense rows and one scale each (docs/format.md sections 5 to 7).
//
// The kernels are in codec/; here are the ops, which ask choices/codec.h whether a bulk kernel takes the call.
#include "choices/codec.h"

#include <algorithm>

#include "cuda/codec/arguments.cuh"
#include "cuda/codec/bulk.cuh"
#include "cuda/common/device_facts.cuh"

namespace turboquant::cuda {
namespace {

// Whether kernels can take vectors as [tokens, heads, d]. They encode kLeastTokens tokens of a head at a time, so that
// fewer would leave lanes idle, and heads are a dimension of the grid, of at most kMostHeads.
bool are_tokens_and_heads(const Rows& rows) {
  constexpr int64_t kLeastTokens = 16, kMostHeads = 65535;
  return rows.dims == 1 || (rows.dims == 2 && rows.size[0] >= kLeastTokens && rows.size[1] <= kMostHeads);
}

EncodeShape shape_of(const Rows& rows, int d, Dtype dtype, const Codebook& book) {
  const int64_t size = element_size(dtype);
  EncodeShape shape{.head_dim = d,
                    .dtype = dtype,
                    .tokens = rows.count,
                    .heads = 1,
                    .source = {book.width, book.num_steps, rows.stride[0] * size, 0}};
  if (rows.dims == 2) {
    shape.tokens = rows.size[0], shape.heads = rows.size[1];
    shape.source.head_stride = rows.stride[1] * size;
  }
  return shape;
}

// x: [..., d] float, stride 1 in the last dimension -> packed uint8 [..., row_bytes], scale float16 [...]
std::tuple<Tensor, Tensor> encode(const Tensor& x, const Tensor& signs, const OptionalTensor& levels,
                                  const Tensor& steps, int64_t bits, int64_t scale_mode, const OptionalTensor& center) {
  const format::Split split = check_encode(x, signs, bits, scale_mode, center);
  const int64_t d = x.size(x.dim() - 1);
  const Codebook book = checked_codebook(x, levels, steps, bits, scale_mode, "levels", "steps");

  const int row_bytes = static_cast<int>(format::dense_row_bytes(d, static_cast<int>(bits)));
  Tensor scale = new_tensor(x, leading_shape(x, 1, {}), ScalarType::Half);
  Tensor packed = new_tensor(x, leading_shape(x, 1, {row_bytes}), ScalarType::Byte);
  if (x.numel() == 0) return {packed, scale};

  // A copy of x where these are not its leading dimensions.
  const AlignedRows in(x, word_bytes(std::min(8, split.block), x.element_size()), are_tokens_and_heads);
  const Constant<float> s(signs), constants(center);
  const Launch launch(x);
  const EncodeShape shape = shape_of(in.rows(), static_cast<int>(d), dtype_of(x), book);
  EncodeArguments a{};
  a.source[0] = {.data = static_cast<const uint8_t*>(in.data()),
                 .token_stride = shape.source.token_stride,
                 .head_stride = shape.source.head_stride,
                 .book = book,
                 .signs = s.data(),
                 .channels = channels_of(center, constants.data(), 1, d),
                 .channel_stride = 0};
  a.sources = 1;
  a.tokens = shape.tokens, a.heads = static_cast<int>(shape.heads);
  a.dtype = shape.dtype;
  a.constants = EncodeConstants::of(split);
  a.packed = static_cast<uint8_t*>(packed.data_ptr()), a.row_bytes = row_bytes;
  a.scale = static_cast<uint16_t*>(scale.data_ptr());
  if (choose_encode(shape, current_device().facts).kernel == CodecKernel::kBulk) {
    launch_encode_bulk(a, shape.head_dim, launch.stream());
  } else {
    launch_encode_any(a, split, launch.stream());
  }
  launch.check("encode");
  return {packed, scale};
}

// packed: uint8 [..., row_bytes], scale: float16 [...], both contiguous -> [..., d] of `dtype`; d is that of signs
Tensor decode(const Tensor& packed, const Tensor& scale, const Tensor& signs, const OptionalTensor& levels,
              int64_t bits, ScalarType dtype, const OptionalTensor& center) {
  check_codec_bits(bits);
  check_output_dtype(dtype);
  const DenseVectors vectors = checked_dense_vectors(packed, scale, signs, levels, bits);
  check_center(center, packed, vectors.d);
  Tensor out = new_tensor(packed, leading_shape(packed, 1, {vectors.d}), dtype);
  if (vectors.count == 0) return out;

  const Constant<float> s(signs), constants(center);
  const format::Channels channels = channels_of(center, constants.data(), 1, vectors.d);
  const Launch launch(packed);
  const DecodeShape shape{.head_dim = static_cast<int>(vectors.d),
                          .dtype = dtype_of(dtype),
                          .vectors = vectors.count,
                          .aligned = aligned(packed.data_ptr(), 8)};
  DecodeArguments a{};
  a.source[0] = {format::as_width(bits), levels_data(levels), s.data(), channels, out.data_ptr()};
  a.sources = a.heads = 1;
  a.dtype = shape.dtype;
  a.seqs = 1, a.max_length = vectors.count;
  a.packed = bytes_of(packed), a.row_bytes = vectors.row_bytes;
  a.scale = static_cast<const uint16_t*>(scale.data_ptr());
  if (choose_decode(shape, current_device().facts).kernel == CodecKernel::kBulk) {
    launch_decode_bulk(a, shape.head_dim, launch.stream());
  } else {
    launch_decode_any(a, vectors.split, launch.stream());
  }
  launch.check("decode");
  return out;
}

}  // namespace
}  // namespace turboquant::cuda

STABLE_TORCH_LIBRARY_IMPL(turboquant, CUDA, m) {
  m.impl("encode", TORCH_BOX(&turboquant::cuda::encode));
  m.impl("decode", TORCH_BOX(&turboquant::cuda::decode));
}
