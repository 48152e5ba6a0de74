// hadamard: the signed orthonormal Walsh-Hadamard transform of the last dimension (docs/format.md section 2).
//
// Memory bound: every vector is read once and written once, 16 bytes at a time, and lives in registers in between.
#include "hadamard.cuh"

#include <algorithm>
#include <vector>

#include "launch.cuh"

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

  std::vector<int64_t> shape;
  for (int64_t i = 0; i < x.dim(); ++i) shape.push_back(x.size(i));
  Tensor out = torch::stable::new_empty(x, shape, x.scalar_type());
  if (x.numel() == 0) return out;

  const int vec = std::min(8, split.block);
  const Tensor in = readable(x, word_bytes(vec, x.element_size())), s = readable(signs, word_bytes(vec, 4));
  const Launch launch(x);
  const Rows rows = rows_of(in);
  dispatch_dim(split, [&](auto traits) {
    using Traits = decltype(traits);
    hadamard_kernel<Traits><<<num_blocks(rows.count, kThreads / Traits::kLanes), kThreads, 0, launch.stream()>>>(
        in.data_ptr(), rows, static_cast<const float*>(s.data_ptr()), inverse, x.scalar_type(), out.data_ptr());
    launch.check("hadamard");
  });
  return out;
}

}  // namespace
}  // namespace turboquant::cuda

STABLE_TORCH_LIBRARY_IMPL(turboquant, CUDA, m) { m.impl("hadamard", TORCH_BOX(&turboquant::cuda::hadamard)); }
