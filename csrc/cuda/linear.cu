// linear_packed and linear_experts: describe a call for its kernel (linear/call.cuh, linear/tiles/call.cuh) and launch
// it, or have the weight decoded for many tokens (choices/linear.h).
#include "calls/linear.h"

#include "choices/linear.h"
#include "cuda/common/torch.cuh"
#include "cuda/linear/launch.cuh"
#include "cuda/linear/many_tokens.cuh"
#include "cuda/linear/tiles/launch.cuh"

namespace turboquant::cuda {
namespace {

// x as rows with one stride that start at multiples of 16 bytes: the tensor itself, or a copy.
class Activations {
 public:
  explicit Activations(const Tensor& x) : rows_(x, 16) {
    if (rows_.rows().dims != 1) rows_ = AlignedRows(new_copy(x), 16);
  }
  const void* data() const { return rows_.data(); }
  int64_t count() const { return rows_.rows().count; }
  int64_t stride() const { return rows_.rows().stride[0]; }  // in elements

 private:
  AlignedRows rows_;
};

// Runs a launch with the memory that it needs. like: of the call, on the same device
template <typename Work>
void run(Work&& work, const Tensor& like, cudaStream_t stream) {
  const int64_t bytes = work.workspace_bytes();
  if (bytes == 0) return work.run(nullptr, stream);
  const Tensor workspace = new_tensor(like, {bytes}, ScalarType::Byte, "the work space");
  work.run(workspace.data_ptr(), stream);
}

void multiply(const LinearCall& c, const WeightShape& shape, const Tensor& y) {
  if (y.numel() == 0) return;
  const Launch launch(c.x);
  const Device& device = device_of(c.x.get_device_index());
  const LinearKernel kernel = choose_linear({c.x.numel() / shape.k, dtype_of(c.x)}, device.facts).kernel;
  if (kernel == LinearKernel::kDecoded) return linear::multiply_decoded(c, shape, y);
  STD_TORCH_CHECK(aligned(c.packed.data_ptr(), 16), "packed must start at a multiple of 16 bytes");
  const Activations x(c.x);
  const Constant signs(c.signs), inverse(c.channel_inverse), levels(c.levels);
  const int groups = checked_int(shape.groups(), "the number of groups");
  const void* const bias = c.bias ? c.bias->data_ptr() : nullptr;
  if (kernel == LinearKernel::kTiles) {
    const linear::tiles::Call call{.packed = bytes_of(c.packed),
                                   .levels = reinterpret_cast<const int8_t*>(levels.data()),
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
    return run(linear::tiles::TilesLaunch(call, device), c.x, launch.stream());
  }
  const linear::Call call{.x = x.data(),
                          .x_stride = x.stride(),
                          .dtype = dtype_of(c.x),
                          .signs = signs.data(),
                          .channel_inverse = inverse.data(),
                          .levels = reinterpret_cast<const int8_t*>(levels.data()),
                          .bias = bias,
                          .y = y.data_ptr(),
                          .packed = bytes_of(c.packed),
                          .columns = x.count(),
                          .n = shape.n,
                          .groups = groups,
                          .group = shape.block.group};
  run(linear::LinearLaunch(call, shape.block, !c.levels, device), c.x, launch.stream());
}

Tensor linear_packed(const LinearCall& c) {
  const WeightShape shape = check_linear(c);
  check_levels(c.levels, c.x, c.bits, "levels");
  const Tensor y = new_linear_result(c, shape);
  multiply(c, shape, y);
  return y;
}

// Blocks of a grid in its last dimension, and so pairs of a token and an expert of a launch.
constexpr int64_t kMostPairs = 65535;

Tensor linear_experts(const ExpertsCall& c) {
  const ExpertsShape of = check_experts(c);
  const WeightShape& shape = of.weight;
  check_levels(c.levels, c.x, c.bits, "levels");
  STD_TORCH_CHECK(of.choices <= kMostPairs, "experts has ", of.choices, " choices, supported on CUDA: up to ",
                  kMostPairs);
  const Tensor y = new_experts_result(c, of);
  if (y.numel() == 0) return y;
  const Launch launch(c.x);
  const Device& device = device_of(c.x.get_device_index());
  STD_TORCH_CHECK(aligned(c.packed.data_ptr(), 16), "packed must start at a multiple of 16 bytes");
  const Activations x(c.x);
  const Constant signs(c.signs), levels(c.levels);
  const int64_t size = element_size(dtype_of(c.x)), at_once = kMostPairs / of.choices;
  for (int64_t token = 0; token < of.tokens; token += at_once) {
    const int64_t columns = std::min(at_once, of.tokens - token) * of.choices;
    const linear::Call call{.x = static_cast<const uint8_t*>(x.data()) + token * x.stride() * size,
                            .x_stride = x.stride(),
                            .dtype = dtype_of(c.x),
                            .signs = signs.data(),
                            .channel_inverse = nullptr,
                            .levels = reinterpret_cast<const int8_t*>(levels.data()),
                            .bias = c.bias ? c.bias->data_ptr() : nullptr,
                            .y = static_cast<uint8_t*>(y.data_ptr()) + token * of.choices * shape.n * size,
                            .packed = bytes_of(c.packed),
                            .columns = columns,
                            .n = shape.n,
                            .groups = checked_int(shape.groups(), "the number of groups"),
                            .group = shape.block.group};
    const linear::Choice choice{.experts = static_cast<const int64_t*>(c.experts.data_ptr()) + token * of.choices,
                                .weight_bytes = of.weight_bytes(),
                                .count = of.experts,
                                .choices = static_cast<int>(of.choices)};
    run(linear::ExpertsLaunch(call, choice, shape.block, !c.levels, device), c.x, launch.stream());
  }
  return y;
}

}  // namespace
}  // namespace turboquant::cuda

STABLE_TORCH_LIBRARY_IMPL(turboquant, CUDA, m) {
  using namespace turboquant;
  m.impl("linear_packed", boxed<&turboquant::cuda::linear_packed, kLinearPacked>);
  m.impl("linear_experts", boxed<&turboquant::cuda::linear_experts, kLinearExperts>);
}
