// weight_decode, weight_unpack: what blocks of a weight hold (docs/format.md section 13).
#include "cuda/linear/decode.cuh"

#include "cuda/codec/arguments.cuh"
#include "cuda/common/torch.cuh"
#include "cuda/linear/blocks.cuh"

namespace turboquant::cuda {
namespace {

struct WeightDecoder {
  WeightBlocks blocks;
  const int8_t* levels;          // [2^bits], null for the uniform grid
  const float* signs;            // [group]
  const float* channel_inverse;  // [k], or null
  Dtype dtype;                   // of the output
  GenericShape shape;
};

// Copies this thread block's block to shared memory and takes it apart.
__device__ __forceinline__ void load_block(const WeightBlocks& blocks, const uint8_t* packed, uint8_t* bytes,
                                           SharedRows& rows) {
  const int size = blocks.block.block_bytes();
  copy_bytes(packed + int64_t{blockIdx.x} * size, bytes, size, threadIdx.x, kBlockThreads);
  __syncthreads();
  take_rows(rows, blocks.block, bytes, threadIdx.x);
  __syncthreads();
}

__global__ void __launch_bounds__(kBlockThreads)
    weight_decode_kernel(const __grid_constant__ WeightDecoder w, const uint8_t* packed, void* out) {
  __shared__ SharedRows rows;
  __shared__ alignas(16) float vectors[kBlockWarps][generic_stride(kMostGroup)];
  __shared__ alignas(16) uint8_t bytes[kMostBlockBytes];
  const format::WeightBlock& b = w.blocks.block;
  load_block(w.blocks, packed, bytes, rows);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float* y = vectors[warp];
  const int64_t k = int64_t{w.blocks.groups} * b.group, first = int64_t{w.blocks.group()} * b.group;
  const format::Channels channels{nullptr, nullptr, w.channel_inverse ? w.channel_inverse + first : nullptr};
#pragma unroll 1
  for (int row = warp; row < format::kWeightRows && w.blocks.row(row) < w.blocks.n; row += kBlockWarps) {
    const float unit = __fmul_rn(__half2float(__ushort_as_half(rows.scale[row])), format::kLevelUnit);
    for (int i = lane; i < b.group; i += 32) {
      const int level = format::level_of_code(b.width(), w.levels, rows.codes[row][i]);
      const int m = b.sub ? rows.multipliers[row][i / format::kSubChannels] : 0;
      const float by = __fmul_rn(static_cast<float>(format::multiplier(m)), format::kMultiplierUnit);
      y[i] = __fmul_rn(b.sub ? __fmul_rn(unit, by) : unit, static_cast<float>(level));
    }
    store_generic(y, w.shape, w.signs, channels, out, w.dtype, w.blocks.row(row) * k + first, true, lane);
    __syncwarp();  // before y is written again
  }
}

__global__ void __launch_bounds__(kBlockThreads)
    weight_unpack_kernel(const __grid_constant__ WeightBlocks blocks, const uint8_t* packed, uint8_t* codes,
                         uint16_t* scale, uint8_t* multipliers) {
  __shared__ SharedRows rows;
  __shared__ alignas(16) uint8_t bytes[kMostBlockBytes];
  const format::WeightBlock& b = blocks.block;
  load_block(blocks, packed, bytes, rows);
  for (int i = threadIdx.x; i < format::kWeightRows * b.group; i += kBlockThreads) {
    const int row = i / b.group, c = i % b.group;
    if (blocks.row(row) < blocks.n) codes[blocks.vector(row) * b.group + c] = rows.codes[row][c];
  }
  const int row = threadIdx.x;
  if (row >= format::kWeightRows || blocks.row(row) >= blocks.n) return;
  scale[blocks.vector(row)] = rows.scale[row];
  for (int s = 0; s < b.subs(); ++s) multipliers[blocks.vector(row) * b.subs() + s] = rows.multipliers[row][s];
}

// ---- Ops ------------------------------------------------------------------------------------------------------------

WeightBlocks blocks_of(const WeightShape& shape) { return {shape.block, shape.n, static_cast<int>(shape.groups())}; }

std::tuple<Tensor, Tensor, Tensor> weight_unpack(const WeightUnpackCall& c) {
  const WeightShape shape = check_weight_unpack(c);
  auto result = new_unpacked_weight(c.packed, shape);
  if (shape.n == 0) return result;
  const Launch launch(c.packed);
  const unsigned blocks = num_blocks(shape.tiles() * shape.groups(), 1);
  weight_unpack_kernel<<<blocks, kBlockThreads, 0, launch.stream()>>>(
      blocks_of(shape), bytes_of(c.packed), static_cast<uint8_t*>(std::get<0>(result).data_ptr()),
      static_cast<uint16_t*>(std::get<1>(result).data_ptr()), static_cast<uint8_t*>(std::get<2>(result).data_ptr()));
  launch.check("weight_unpack");
  return result;
}

}  // namespace

Tensor weight_decode(const WeightDecodeCall& c) {
  const WeightShape shape = check_weight_decode(c);
  check_levels(c.levels, c.packed, c.bits, "levels");
  Tensor w = new_tensor(c.packed, {shape.n, shape.k}, c.dtype, "a decoded weight");
  if (w.numel() == 0) return w;
  const Constant signs(c.signs), inverse(c.channel_inverse);
  const Launch launch(c.packed);
  const WeightDecoder decoder{.blocks = blocks_of(shape),
                              .levels = levels_data(c.levels),
                              .signs = signs.data(),
                              .channel_inverse = inverse.data(),
                              .dtype = dtype_of(c.dtype),
                              .shape = GenericShape(format::Split{1, shape.block.group})};
  const unsigned blocks = num_blocks(shape.tiles() * shape.groups(), 1);
  weight_decode_kernel<<<blocks, kBlockThreads, 0, launch.stream()>>>(decoder, bytes_of(c.packed), w.data_ptr());
  launch.check("weight_decode");
  return w;
}

}  // namespace turboquant::cuda

STABLE_TORCH_LIBRARY_IMPL(turboquant, CUDA, m) {
  using namespace turboquant;
  m.impl("weight_decode", boxed<&turboquant::cuda::weight_decode>);
  m.impl("weight_unpack", boxed<&turboquant::cuda::weight_unpack>);
}
