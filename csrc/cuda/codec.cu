// encode, decode: standalone vectors [..., d] as dense rows and one scale each (docs/format.md sections 5 to 7).
//
// Here are the kernels for every length, dtype and width (codec/lanes.cuh, codec/generic.cuh), and the ops, which ask
// choices/codec.h whether a bulk kernel takes the call.
#include "choices/codec.h"

#include <algorithm>

#include "cuda/codec/arguments.cuh"
#include "cuda/codec/bulk.cuh"
#include "cuda/codec/generic.cuh"
#include "cuda/codec/lanes.cuh"
#include "cuda/common/device_facts.cuh"

namespace turboquant::cuda {
namespace {

constexpr int kMostWarps = 4;      // of a block
constexpr int kEncodeBlocks = 32;  // per multiprocessor, at most: more of them encode one after the other

// A group of lanes encodes a vector, or (ROOM 0, codec/lanes.cuh) a warp. The packed row passes through shared memory,
// so that memory is written in whole words.
template <int ROOM, typename Shape>
__global__ void __launch_bounds__(32 * kMostWarps)
    encode_kernel(const void* x, const __grid_constant__ Rows rows, Dtype dtype, const __grid_constant__ Shape shape,
                  const float* signs, const __grid_constant__ format::Channels channels,
                  const __grid_constant__ Codebook book, const __grid_constant__ EncodeConstants constants,
                  int row_bytes, uint8_t* packed, uint16_t* scale) {
  extern __shared__ uint4 dynamic[];
  __shared__ SharedCodebook shared;
  shared.fill(book, threadIdx.x, blockDim.x);
  __syncthreads();

  const int lanes = lanes_of(shape), lane = threadIdx.x % lanes, mine = threadIdx.x / lanes, d = shape.d;
  const int count = blockDim.x / lanes;
  float* y = reinterpret_cast<float*>(dynamic) + mine * generic_words(d);
  uint8_t* bytes = reinterpret_cast<uint8_t*>(y);
  const auto write_row = [&](auto&& octet) {
    for (int o = lane; 8 * o < d; o += lanes) {
      const int bits = format::num_bits(book.width), begin = o * bits;
      const uint64_t string = dense_string(octet(o), book.width);
      for (int i = 0; i < min(bits, row_bytes - begin); ++i) bytes[begin + i] = string >> 8 * i;
    }
  };
  for (int64_t first = int64_t{blockIdx.x} * count; first < rows.count; first += int64_t{gridDim.x} * count) {
    const int64_t row = first + mine;
    const bool exists = row < rows.count;
    uint16_t found;
    if constexpr (ROOM > 0) {
      const int64_t at = rows(exists ? row : 0);
      const auto load = [&](auto& v) { v.load(shape, x, dtype, at, signs, channels, lane); };
      LaneVector<ROOM> v;
      load(v);
      const ByteCodes codes = encode_in_lanes(v, load, shape, lane, shared, book, constants,
                                              reinterpret_cast<uint8_t*>(y + generic_stride(d)));
      __syncwarp();
      write_row([&](int o) { return codes.octet(o, book.width); });
      found = codes.scale;
    } else {
      load_generic(y, d, x, dtype, rows(exists ? row : 0), signs, channels, lane);
      const GenericCodes codes = encode_generic(y, y + generic_stride(d), shape, lane, shared, book, constants);
      write_row([&](int o) { return codes.octet(o, d, shared, book.width); });
      found = codes.scale;
    }
    __syncwarp();
    if (exists) {
      if (lane == 0) scale[row] = found;
      copy_bytes(bytes, packed + row * row_bytes, row_bytes, lane, lanes);
    }
    __syncwarp();  // before the row is written again
  }
}

template <int ROOM, typename Shape>
__global__ void __launch_bounds__(32 * kMostWarps)
    decode_kernel(const uint8_t* packed, const uint16_t* scale, int64_t count, int row_bytes,
                  const __grid_constant__ Shape shape, const float* signs, const int8_t* levels, Width width,
                  const __grid_constant__ format::Channels channels, Dtype dtype, void* out) {
  extern __shared__ uint4 dynamic[];
  __shared__ float table[32];
  fill_levels(table, levels, width, threadIdx.x, blockDim.x);
  __syncthreads();

  const int lanes = lanes_of(shape), lane = threadIdx.x % lanes, mine = threadIdx.x / lanes, d = shape.d;
  const int64_t number = int64_t{blockIdx.x} * (blockDim.x / lanes) + mine;
  const bool exists = number < count;
  const int64_t row = exists ? number : 0;
  float* y = reinterpret_cast<float*>(dynamic) + mine * generic_words(d);
  uint32_t* words = reinterpret_cast<uint32_t*>(y + generic_stride(d));  // and room to read past a row
  copy_bytes(packed + row * row_bytes, reinterpret_cast<uint8_t*>(words), row_bytes, lane, lanes);
  const float s = __half2float(__ushort_as_half(scale[row]));
  __syncwarp();
  for (int o = lane; 8 * o < d; o += lanes) {
    put_generic_octet(y, d, o, read_octet(words, o * format::num_bits(width), width), width, table, s);
  }
  if constexpr (ROOM > 0) {
    __syncwarp();
    store_from_lanes<ROOM>(y, shape, signs, channels, out, dtype, row * d, exists, lane);
  } else {
    store_generic(y, shape, signs, channels, out, dtype, row * d, exists, lane);
  }
}

// The vectors as [tokens, heads, d], if their leading dimensions merge into two or fewer.
EncodeShape shape_of(const Rows& rows, int d, Dtype dtype, const Codebook& book) {
  const int64_t size = element_size(dtype);
  EncodeShape shape{.head_dim = d,
                    .dtype = dtype,
                    .merges = rows.dims <= 2,
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

  const AlignedRows in(x, word_bytes(std::min(8, split.block), x.element_size()));
  const Constant s(signs), constants(center);
  const format::Channels channels = channels_of(center, constants.data(), 1, d);
  const Launch launch(x);
  const EncodeShape shape = shape_of(in.rows(), static_cast<int>(d), dtype_of(x), book);
  auto* codes = static_cast<uint8_t*>(packed.data_ptr());
  auto* scales = static_cast<uint16_t*>(scale.data_ptr());
  if (choose_encode(shape, current_device().facts).kernel == CodecKernel::kBulk) {
    EncodeArguments a{};
    a.source[0] = {.data = static_cast<const uint8_t*>(in.data()),
                   .token_stride = shape.source.token_stride,
                   .head_stride = shape.source.head_stride,
                   .book = book,
                   .signs = s.data(),
                   .channels = channels,
                   .channel_stride = 0};
    a.sources = 1;
    a.tokens = shape.tokens, a.heads = static_cast<int>(shape.heads);
    a.dtype = shape.dtype;
    a.constants = EncodeConstants::of(split);
    a.packed = codes, a.scale = scales, a.row_bytes = row_bytes;
    launch_encode_bulk(a, shape.head_dim, launch.stream());
    launch.check("encode");
    return {packed, scale};
  }
  with_vector_shape(split, in.rows().count, [&](const auto& of, auto room) {
    const VectorBlock block(of.d, lanes_of(of), kMostWarps);
    // A block that encodes several times fills its tables once.
    const int64_t most = int64_t{kEncodeBlocks} * current_device().facts.multiprocessors;
    const auto blocks = static_cast<unsigned>(std::min(int64_t{num_blocks(in.rows().count, block.vectors)}, most));
    encode_kernel<room><<<blocks, lanes_of(of) * block.vectors, block.shared_bytes, launch.stream()>>>(
        in.data(), in.rows(), dtype_of(x), of, s.data(), channels, book, EncodeConstants::of(split), row_bytes, codes,
        scales);
  });
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

  const Constant s(signs), constants(center);
  const format::Channels channels = channels_of(center, constants.data(), 1, vectors.d);
  const Launch launch(packed);
  const DecodeShape shape{.head_dim = static_cast<int>(vectors.d),
                          .dtype = dtype_of(dtype),
                          .vectors = vectors.count,
                          .aligned = aligned(packed.data_ptr(), 8)};
  const auto* scales = static_cast<const uint16_t*>(scale.data_ptr());
  if (choose_decode(shape, current_device().facts).kernel == CodecKernel::kBulk) {
    DecodeArguments a{};
    a.source[0] = {format::as_width(bits), levels_data(levels), s.data(), channels, out.data_ptr()};
    a.sources = a.heads = 1;
    a.dtype = shape.dtype;
    a.seqs = 1, a.max_length = vectors.count;
    a.packed = bytes_of(packed), a.scale = scales, a.row_bytes = vectors.row_bytes;
    launch_decode_bulk(a, shape.head_dim, launch.stream());
    launch.check("decode");
    return out;
  }
  with_vector_shape(vectors.split, vectors.count, [&](const auto& of, auto room) {
    const VectorBlock block(of.d, lanes_of(of), kMostWarps);
    const unsigned blocks = num_blocks(vectors.count, block.vectors);
    decode_kernel<room><<<blocks, lanes_of(of) * block.vectors, block.shared_bytes, launch.stream()>>>(
        bytes_of(packed), scales, vectors.count, vectors.row_bytes, of, s.data(), levels_data(levels),
        format::as_width(bits), channels, dtype_of(dtype), out.data_ptr());
  });
  launch.check("decode");
  return out;
}

}  // namespace
}  // namespace turboquant::cuda

STABLE_TORCH_LIBRARY_IMPL(turboquant, CUDA, m) {
  m.impl("encode", TORCH_BOX(&turboquant::cuda::encode));
  m.impl("decode", TORCH_BOX(&turboquant::cuda::decode));
}
