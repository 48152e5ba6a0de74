// hadamard: the signed orthonormal Walsh-Hadamard transform of the last dimension (docs/format.md section 2).
//
// Memory bound: every vector is read once and written once, 16 bytes at a time, and lives in registers in between.
#include "hadamard.cuh"

#include <algorithm>

#include "tensors.cuh"

namespace turboquant::cuda {
namespace {

constexpr int kThreads = 128;

template <typename Traits>
__global__ void __launch_bounds__(kThreads)
    hadamard_kernel(const void* x, const __grid_constant__ Rows rows, const float* signs, bool inverse,
                    ScalarType dtype, void* out) {
  const int lane = threadIdx.x % Traits::kLanes;
  const int64_t row = int64_t{blockIdx.x} * (kThreads / Traits::kLanes) + threadIdx.x / Traits::kLanes;
  const bool active = row < rows.count;  // the others of the last block stay for the shuffles
  const int64_t from = rows(active ? row : 0), to = row * Traits::kDim;

  float y[Traits::kPerLane];
  load_as<Traits>(x, dtype, from, lane, y);

  if (!inverse) apply_signs<Traits>(y, signs, lane);
  transform<Traits>(y, lane);
  if (inverse) apply_signs<Traits>(y, signs, lane);

  if (!active) return;
  store_as<Traits>(y, lane, out, dtype, to);
}

// x: [..., d] with stride 1 in the last dimension, signs: float32 [d] -> contiguous [..., d]
Tensor hadamard(const Tensor& x, const Tensor& signs, bool inverse) {
  check_float(x, "x");
  check_unit_last_stride(x, "x");
  const int64_t d = x.size(x.dim() - 1);
  const format::Split split = check_vector_dim(d, "x");
  check_constant(signs, x, "signs", ScalarType::Float, {d});

  Tensor out = torch::stable::new_empty(x, leading_shape(x, 0, {}), x.scalar_type());
  if (x.numel() == 0) return out;

  const int vec = std::min(8, split.block);
  const AlignedRows in(x, word_bytes(vec, x.element_size())), s(signs, word_bytes(vec, 4));
  const Launch launch(x);
  dispatch_dim(split, [&](auto traits) {
    using Traits = decltype(traits);
    hadamard_kernel<Traits><<<num_blocks(in.rows().count, kThreads / Traits::kLanes), kThreads, 0, launch.stream()>>>(
        in.data(), in.rows(), static_cast<const float*>(s.data()), inverse, x.scalar_type(), out.data_ptr());
    launch.check("hadamard");
  });
  return out;
}

}  // namespace
}  // namespace turboquant::cuda

STABLE_TORCH_LIBRARY_IMPL(turboquant, CUDA, m) { m.impl("hadamard", TORCH_BOX(&turboquant::cuda::hadamard)); }
