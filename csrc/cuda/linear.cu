// linear_packed: asks choices/linear.h which kernel takes a call, describes the call for it (linear/call.cuh,
// linear/tiles/call.cuh) and launches it, or has the weight decoded for many tokens (linear/many_tokens.cu).
//
// The other ops of the room: weight_encode and weight_pack are in linear/encode.cu, weight_decode and weight_unpack in
// linear/decode.cu. linear_experts is in linear/experts.cu.
#include "calls/linear.h"

#include "choices/linear.h"
#include "cuda/linear/launch.cuh"
#include "cuda/linear/many_tokens.cuh"
#include "cuda/linear/multiply.cuh"
#include "cuda/linear/tiles/launch.cuh"

namespace turboquant::cuda {

void linear::multiply(const LinearCall& c, const WeightShape& shape, const Tensor& y) {
  if (y.numel() == 0) return;
  const Launch launch(c.x);
  const Device& device = device_of(c.x.get_device_index());
  const LinearShape facts{.tokens = c.x.numel() / shape.k, .n = shape.n, .k = shape.k, .dtype = dtype_of(c.x)};
  const LinearKernel kernel = choose_linear(facts, device.facts).kernel;
  if (kernel == LinearKernel::kDecoded) return linear::multiply_decoded(c, shape, y, launch.stream());
  STD_TORCH_CHECK(aligned(c.packed.data_ptr(), 16), "packed must start at a multiple of 16 bytes");
  const linear::Activations x(c.x);
  const Constant<float> signs(c.signs), inverse(c.channel_inverse);
  const Constant<int8_t> levels(c.levels);
  const int groups = checked_int(shape.groups(), "the number of groups");
  const void* const bias = c.bias ? c.bias->data_ptr() : nullptr;
  if (kernel == LinearKernel::kTiles) {
    const linear::tiles::Call call{.packed = bytes_of(c.packed),
                                   .levels = levels.data(),
                                   .x = x.data(),
                                   .x_stride = x.stride(),
                                   .dtype = dtype_of(c.x),
                                   .signs = signs.data(),
                                   .channel_inverse = inverse.data(),
                                   .bias = bias,
                                   .y = y.data_ptr(),
                                   .tokens = x.count(),
                                   .n = shape.n,
                                   .groups = groups,
                                   .block = shape.block};
    return launch_with_memory(linear::tiles::TilesLaunch(call, device), c.x, launch.stream());
  }
  const linear::Call call{.x = x.data(),
                          .x_stride = x.stride(),
                          .dtype = dtype_of(c.x),
                          .signs = signs.data(),
                          .channel_inverse = inverse.data(),
                          .levels = levels.data(),
                          .bias = bias,
                          .y = y.data_ptr(),
                          .packed = bytes_of(c.packed),
                          .columns = x.count(),
                          .n = shape.n,
                          .groups = groups,
                          .group = shape.block.group};
  launch_with_memory(linear::LinearLaunch(call, shape.block, !c.levels, device), c.x, launch.stream());
}

namespace {

Tensor linear_packed(const LinearCall& c) {
  const WeightShape shape = check_linear(c);
  check_levels(c.levels, c.x, c.bits, "levels");
  const Tensor y = new_linear_result(c, shape);
  linear::multiply(c, shape, y);
  return y;
}

}  // namespace
}  // namespace turboquant::cuda

STABLE_TORCH_LIBRARY_IMPL(turboquant, CUDA, m) {
  using namespace turboquant;
  m.impl("linear_packed", boxed<&turboquant::cuda::linear_packed, kLinearPacked>);
}
