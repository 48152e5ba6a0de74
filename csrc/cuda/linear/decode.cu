// weight_decode, weight_unpack: what blocks of a weight hold (docs/format.md section 13).
#include "cuda/linear/decode.cuh"

#include <algorithm>

#include "cuda/codec/arguments.cuh"
#include "cuda/common/device_facts.cuh"
#include "cuda/common/torch.cuh"
#include "cuda/linear/blocks.cuh"
#include "cuda/linear/decode_kernel.cuh"

namespace turboquant::cuda {
namespace {

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

Tensor weight_decode(const WeightDecodeCall& c) { return decode_weight(c, false); }

}  // namespace

Tensor decode_weight(const WeightDecodeCall& c, bool reads_early) {
  const WeightShape shape = check_weight_decode(c);
  check_levels(c.levels, c.packed, c.bits, "levels");
  Tensor w = new_tensor(c.packed, {shape.n, shape.k}, c.dtype, "a decoded weight");
  if (w.numel() == 0) return w;
  const Tensor packed = aligned(c.packed.data_ptr(), 16) ? c.packed : new_copy(c.packed);
  const Constant<float> signs(c.signs), inverse(c.channel_inverse);
  const Constant<int8_t> levels(c.levels);
  const Launch launch(c.packed);
  const format::WeightBlock& b = shape.block;
  const linear::WeightDecoder decoder{.packed = bytes_of(packed),
                                      .levels = levels.data(),
                                      .signs = signs.data(),
                                      .channel_inverse = inverse.data(),
                                      .out = w.data_ptr(),
                                      .dtype = dtype_of(c.dtype),
                                      .n = shape.n,
                                      .units = num_blocks(shape.tiles() * shape.groups(), 1),
                                      .groups = static_cast<int>(shape.groups()),
                                      .group = b.group,
                                      .sub = b.sub > 0,
                                      .unit_bytes = b.block_bytes(),
                                      .scales_at = b.scales(),
                                      .multipliers_at = b.multipliers(),
                                      .early = reads_early && packed.data_ptr() == c.packed.data_ptr()};
  const DeviceFacts& device = device_of(c.packed.get_device_index()).facts;
  const int64_t most = int64_t{2} * device.multiprocessors;
  const auto blocks = static_cast<unsigned>(std::min(linear::WarpDecoder::blocks(decoder), most));
  const bool bytes = format::levels_are_codes(b.width());
  const auto kernel = bytes ? &linear::weight_decode_kernel<true> : &linear::weight_decode_kernel<false>;
  void* arguments[] = {const_cast<linear::WeightDecoder*>(&decoder)};
  check_cuda(launch_early(reinterpret_cast<const void*>(kernel), blocks, linear::WarpDecoder::kThreads, 0, arguments,
                          launch.stream(), device.major),
             "weight_decode");
  return w;
}

}  // namespace turboquant::cuda

STABLE_TORCH_LIBRARY_IMPL(turboquant, CUDA, m) {
  using namespace turboquant;
  m.impl("weight_decode", boxed<&turboquant::cuda::weight_decode>);
  m.impl("weight_unpack", boxed<&turboquant::cuda::weight_unpack>);
}
