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

// The dtype is an argument and not a template parameter: it matters to the loads and stores only, and the transforms of 48
// sizes are code enough.
template <typename Traits>
__global__ void __launch_bounds__(kThreads)
    hadamard_kernel(const void* x, const __grid_constant__ Rows rows, const float* signs, bool inverse,
                    ScalarType dtype, void* out) {
  const int lane = threadIdx.x % Traits::kLanes;
  const int64_t row = int64_t{blockIdx.x} * (kThreads / Traits::kLanes) + threadIdx.x / Traits::kLanes;
  const bool active = row < rows.count;  // the others of the last block stay for the shuffles
  const int64_t from = rows(active ? row : 0), to = row * Traits::kDim;

  float y[Traits::kPerLane];
  if (dtype == ScalarType::BFloat16) {
    load<Traits>(static_cast<const __nv_bfloat16*>(x) + from, lane, y);
  } else if (dtype == ScalarType::Half) {
    load<Traits>(static_cast<const __half*>(x) + from, lane, y);
  } else {
    load<Traits>(static_cast<const float*>(x) + from, lane, y);
  }

  if (!inverse) apply_signs<Traits>(y, signs, lane);
  transform<Traits>(y, lane);
  if (inverse) apply_signs<Traits>(y, signs, lane);

  if (!active) return;
  if (dtype == ScalarType::BFloat16) {
    store<Traits>(y, lane, static_cast<__nv_bfloat16*>(out) + to);
  } else if (dtype == ScalarType::Half) {
    store<Traits>(y, lane, static_cast<__half*>(out) + to);
  } else {
    store<Traits>(y, lane, static_cast<float*>(out) + to);
  }
}

// Calls fn(DefaultHadamard<m, log2(n)>) for every d = m * n that the format knows.
template <int M, int LOG_N, typename Fn>
void dispatch_block(format::Split split, Fn&& fn) {
  if constexpr (M << LOG_N <= format::kMaxVectorDim) {
    if (split.block == 1 << LOG_N) return fn(DefaultHadamard<M, LOG_N>{});
    dispatch_block<M, LOG_N + 1>(split, fn);
  }
}

template <typename Fn>
void dispatch_dim(format::Split split, Fn&& fn) {
  switch (split.blocks) {
    case 1: return dispatch_block<1, 1>(split, fn);
    case 3: return dispatch_block<3, 1>(split, fn);
    case 5: return dispatch_block<5, 1>(split, fn);
    case 7: return dispatch_block<7, 1>(split, fn);
    default: return dispatch_block<9, 1>(split, fn);
  }
}

// Whether every row starts at a multiple of `bytes`.
bool aligned(const Tensor& t, const Rows& rows, int64_t bytes) {
  bool ok = reinterpret_cast<uintptr_t>(t.data_ptr()) % bytes == 0;
  for (int k = 0; k < rows.dims; ++k) ok = ok && rows.stride[k] * static_cast<int64_t>(t.element_size()) % bytes == 0;
  return ok;
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

  // Rows at odd addresses, and tensors with more dimensions than a kernel takes, are copied once.
  const int vec = std::min(8, split.block);
  Tensor in = x, s = signs;
  if (rows_of(x).dims == 0 || !aligned(x, rows_of(x), word_bytes(vec, x.element_size()))) {
    in = torch::stable::new_empty(x, shape, x.scalar_type());
    torch::stable::copy_(in, x);
  }
  if (!aligned(signs, Rows{}, word_bytes(vec, 4))) s = torch::stable::clone(signs);

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
