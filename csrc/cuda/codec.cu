// encode, decode: standalone vectors [..., d] as dense rows and one scale each (docs/format.md sections 5 to 7).
//
// The rows of a block's vectors are one run of bytes: it passes through shared memory, so that memory sees whole words.
#include <algorithm>

#include "cuda/codec/arguments.cuh"
#include "cuda/codec/bulk.cuh"
#include "cuda/codec/generic.cuh"

namespace turboquant::cuda {
namespace {

constexpr int kMostWarps = 4;  // of a block

// A warp is a vector.
__global__ void __launch_bounds__(32 * kMostWarps)
    encode_kernel(const void* x, const __grid_constant__ Rows rows, Dtype dtype, const __grid_constant__ AnyShape shape,
                  const float* signs, const __grid_constant__ format::Channels channels,
                  const __grid_constant__ Codebook book, const __grid_constant__ EncodeConstants constants,
                  int row_bytes, uint8_t* packed, uint16_t* scale) {
  extern __shared__ uint4 dynamic[];
  __shared__ SharedCodebook shared;
  shared.fill(book, threadIdx.x, blockDim.x);
  __syncthreads();

  const int lane = threadIdx.x % 32, mine = threadIdx.x / 32, d = shape.d;
  const int64_t row = int64_t{blockIdx.x} * (blockDim.x / 32) + mine;
  if (row >= rows.count) return;
  float* y = reinterpret_cast<float*>(dynamic) + mine * any_words(d);
  load_any(y, d, x, dtype, rows(row), signs, channels, lane);
  const AnyCodes codes = encode_any(y, y + any_stride(d), shape, lane, shared, book, constants);
  if (lane == 0) scale[row] = codes.scale;

  uint8_t* bytes = reinterpret_cast<uint8_t*>(y);
  for (int o = lane; 8 * o < d; o += 32) {
    const int begin = o * book.bits;
    const uint64_t string = dense_string(codes.octet(o, d, shared, book.bits), book.bits);
    for (int i = 0; i < min(book.bits, row_bytes - begin); ++i) bytes[begin + i] = string >> 8 * i;
  }
  __syncwarp();
  copy_bytes(bytes, packed + row * row_bytes, row_bytes, lane, 32);
}

__global__ void __launch_bounds__(32 * kMostWarps)
    decode_kernel(const uint8_t* packed, const uint16_t* scale, int64_t count, int row_bytes,
                  const __grid_constant__ AnyShape shape, const float* signs, const int8_t* levels, int bits,
                  const __grid_constant__ format::Channels channels, Dtype dtype, void* out) {
  extern __shared__ uint4 dynamic[];
  __shared__ float table[32];
  fill_levels(table, levels, bits, threadIdx.x, blockDim.x);
  __syncthreads();

  const int lane = threadIdx.x % 32, mine = threadIdx.x / 32, d = shape.d;
  const int64_t row = int64_t{blockIdx.x} * (blockDim.x / 32) + mine;
  if (row >= count) return;
  float* y = reinterpret_cast<float*>(dynamic) + mine * any_words(d);
  uint32_t* words = reinterpret_cast<uint32_t*>(y + any_stride(d));  // and room to read past a row
  copy_bytes(packed + row * row_bytes, reinterpret_cast<uint8_t*>(words), row_bytes, lane, 32);
  const float s = __half2float(__ushort_as_half(scale[row]));
  __syncwarp();
  for (int o = lane; 8 * o < d; o += 32) put_any_octet(y, d, o, read_octet(words, o * bits, bits), bits, table, s);
  store_any(y, shape, signs, channels, out, dtype, row * d, true, lane);
}

// Many vectors, in at most two leading dimensions; false where that does not apply.
bool encode_tiles(const AlignedRows& in, const Tensor& x, const Codebook& book, const Constant& signs,
                  const format::Channels& channels, format::Split split, int row_bytes, const Tensor& packed,
                  const Tensor& scale, const Launch& launch) {
  const Rows& rows = in.rows();
  if (rows.dims > 2 || rows.size[rows.dims - 1] > INT32_MAX) return false;
  const int64_t size = x.element_size();
  TileArguments a{};
  a.source[0] = {static_cast<const uint8_t*>(in.data()), rows.stride[0] * size, 0, book, signs.data(), channels, 0};
  a.sources = 1;
  a.tokens = rows.count;
  a.heads = 1;
  if (rows.dims == 2) {
    a.source[0].head_stride = rows.stride[1] * size;
    a.tokens = rows.size[0];
    a.heads = static_cast<int>(rows.size[1]);
  }
  a.dtype = dtype_of(x);
  a.constants = encode_constants(split);
  a.packed = static_cast<uint8_t*>(packed.data_ptr());
  a.scale = static_cast<uint16_t*>(scale.data_ptr());
  a.row_bytes = row_bytes;
  if (!launch_encode_bulk(a, split, launch.stream())) return false;
  launch.check("encode");
  return true;
}

// x: [..., d] float, stride 1 in the last dimension -> packed uint8 [..., row_bytes], scale float16 [...]
std::tuple<Tensor, Tensor> encode(const Tensor& x, const Tensor& signs, const OptionalTensor& levels,
                                  const Tensor& steps, int64_t bits, int64_t scale_mode, const OptionalTensor& center) {
  const format::Split split = check_encode(x, signs, bits, scale_mode, center);
  const int64_t d = x.size(x.dim() - 1);
  const Codebook book = checked_codebook(x, levels, steps, bits, scale_mode, "levels", "steps");

  const int row_bytes = static_cast<int>(format::dense_row_bytes(d, static_cast<int>(bits)));
  Tensor scale = torch::stable::new_empty(x, leading_shape(x, 1, {}), ScalarType::Half);
  Tensor packed = torch::stable::new_empty(x, leading_shape(x, 1, {row_bytes}), ScalarType::Byte);
  if (x.numel() == 0) return {packed, scale};

  const AlignedRows in(x, word_bytes(std::min(8, split.block), x.element_size()));
  const Constant s(signs), constants(center);
  const format::Channels channels = channels_of(center, constants.data(), 1, d);
  const Launch launch(x);
  if (encode_tiles(in, x, book, s, channels, split, row_bytes, packed, scale, launch)) return {packed, scale};
  const int words = any_words(static_cast<int>(d)), warps = any_warps(words, kMostWarps);
  encode_kernel<<<num_blocks(in.rows().count, warps), 32 * warps, 4 * warps * words, launch.stream()>>>(
      in.data(), in.rows(), dtype_of(x), AnyShape(split), s.data(), channels, book, encode_constants(split), row_bytes,
      static_cast<uint8_t*>(packed.data_ptr()), static_cast<uint16_t*>(scale.data_ptr()));
  launch.check("encode");
  return {packed, scale};
}

// Many vectors; false where that does not apply.
bool decode_tiles(const DenseVectors& vectors, const Tensor& packed, const Tensor& scale, const Constant& signs,
                  const OptionalTensor& levels, int bits, const format::Channels& channels, Dtype dtype,
                  const Tensor& out, const Launch& launch) {
  if (!aligned(packed.data_ptr(), 8)) return false;
  LoadTileArguments a{};
  a.source[0] = {bits, levels_data(levels), signs.data(), channels, out.data_ptr()};
  a.sources = a.heads = 1;
  a.dtype = dtype;
  a.seqs = 1;
  a.max_length = vectors.count;
  a.packed = bytes_of(packed);
  a.scale = static_cast<const uint16_t*>(scale.data_ptr());
  a.row_bytes = vectors.row_bytes;
  if (!launch_decode_bulk(a, vectors.split, launch.stream())) return false;
  launch.check("decode");
  return true;
}

// packed: uint8 [..., row_bytes], scale: float16 [...], both contiguous -> [..., d] of `dtype`; d is that of signs
Tensor decode(const Tensor& packed, const Tensor& scale, const Tensor& signs, const OptionalTensor& levels,
              int64_t bits, ScalarType dtype, const OptionalTensor& center) {
  check_codec_bits(bits);
  check_output_dtype(dtype);
  const DenseVectors vectors = checked_dense_vectors(packed, scale, signs, levels, bits);
  check_center(center, packed, vectors.d);
  Tensor out = torch::stable::new_empty(packed, leading_shape(packed, 1, {vectors.d}), dtype);
  if (vectors.count == 0) return out;

  const Constant s(signs), constants(center);
  const format::Channels channels = channels_of(center, constants.data(), 1, vectors.d);
  const Launch launch(packed);
  if (decode_tiles(vectors, packed, scale, s, levels, static_cast<int>(bits), channels, dtype_of(dtype), out, launch))
    return out;
  const int words = any_words(static_cast<int>(vectors.d)), warps = any_warps(words, kMostWarps);
  decode_kernel<<<num_blocks(vectors.count, warps), 32 * warps, 4 * warps * words, launch.stream()>>>(
      bytes_of(packed), static_cast<const uint16_t*>(scale.data_ptr()), vectors.count, vectors.row_bytes,
      AnyShape(vectors.split), s.data(), levels_data(levels), static_cast<int>(bits), channels, dtype_of(dtype),
      out.data_ptr());
  launch.check("decode");
  return out;
}

}  // namespace
}  // namespace turboquant::cuda

STABLE_TORCH_LIBRARY_IMPL(turboquant, CUDA, m) {
  m.impl("encode", TORCH_BOX(&turboquant::cuda::encode));
  m.impl("decode", TORCH_BOX(&turboquant::cuda::decode));
}
