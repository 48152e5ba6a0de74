// linear_packed for many tokens: rows of the weight are decoded, a slice at a time, and multiplied by torch.
#include <array>

#include "cuda/common/torch.cuh"
#include "cuda/linear/decode.cuh"
#include "cuda/linear/many_tokens.cuh"

namespace turboquant::cuda::linear {
namespace {

// Of a decoded slice: enough rows for a large product of matrices, whatever the size of the weight. Smaller slices,
// some of which the L2 cache would keep, are decoded more slowly.
constexpr int64_t kSliceBytes = int64_t{128} << 20;

using torch::stable::detail::from;

// out = x w^T
void multiply_into(const Tensor& x, const Tensor& w, const Tensor& out) {
  std::array<StableIValue, 3> stack{from(x), from(torch::stable::transpose(w, 0, 1)), from(out)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::mm", "out", stack.data(), TORCH_ABI_VERSION));
  torch::stable::detail::to<Tensor>(stack[0]);  // owns what the stack holds
}

// x w^T + bias
Tensor multiply_and_add(const Tensor& x, const Tensor& w, const Tensor& bias) {
  std::array<StableIValue, 3> stack{from(x), from(w), from(OptionalTensor(bias))};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linear", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

}  // namespace

void multiply_decoded(const LinearCall& c, const WeightShape& shape, const Tensor& y, cudaStream_t stream) {
  // As for few tokens (early() in launch.cu).
  const bool early = is_captured(stream);
  const int64_t row_bytes = shape.k * static_cast<int64_t>(y.element_size());
  const int64_t tiles = std::max<int64_t>(kSliceBytes / row_bytes / format::kWeightRows, 1);
  const Tensor x = torch::stable::reshape(c.x, {-1, shape.k});
  const Tensor out = torch::stable::view(y, {-1, shape.n});
  for (int64_t tile = 0; tile < shape.tiles(); tile += tiles) {
    const int64_t count = std::min(tiles, shape.tiles() - tile), first = tile * format::kWeightRows;
    const int64_t rows = std::min(count * format::kWeightRows, shape.n - first);
    Tensor packed = c.packed, slice = out;
    packed = torch::stable::narrow(packed, 0, tile, count), slice = torch::stable::narrow(slice, 1, first, rows);
    const Tensor w =
        decode_weight({packed, c.signs, c.levels, rows, c.bits, c.sub, y.scalar_type(), c.channel_inverse}, early);
    if (c.bias) {
      Tensor bias = *c.bias;
      torch::stable::copy_(slice, multiply_and_add(x, w, torch::stable::narrow(bias, 0, first, rows)));
    } else {
      multiply_into(x, w, slice);
    }
  }
}

}  // namespace turboquant::cuda::linear
