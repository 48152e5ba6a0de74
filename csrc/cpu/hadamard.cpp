// hadamard: the signed orthonormal Walsh-Hadamard transform of the last dimension (docs/format.md section 2).
#include "cpu/common/torch.h"
#include "cpu/kernels.h"

namespace turboquant::cpu {
namespace {

// x: [..., d] with stride 1 in the last dimension, signs: float32 [d] -> contiguous [..., d]
Tensor hadamard(const Tensor& x, const Tensor& signs, bool inverse) {
  check_float(x, "x");
  check_unit_last_stride(x, "x");
  const int64_t d = x.size(x.dim() - 1);
  const format::Split split = check_vector_dim(d, "x");
  check_constant(signs, x, "signs", ScalarType::Float, {d});

  Tensor out = new_tensor(x, leading_shape(x, 0, {}), x.scalar_type());
  const Rows rows(x);
  const float* s = checked_signs(signs, "signs");
  parallel_for(rows.count(), row_grain(d, 1), [&](int64_t begin, int64_t end) {
    rows.runs(begin, end, [&](int64_t first, int64_t count, int64_t offset, int64_t stride) {
      const HadamardRows some{
          .dtype = dtype_of(x), .count = count, .stride = stride, .split = split, .signs = s, .inverse = inverse};
      kernels().hadamard(element(x, offset), element(out, first * d), some);
    });
  });
  return out;
}

}  // namespace
}  // namespace turboquant::cpu

STABLE_TORCH_LIBRARY_IMPL(turboquant, CPU, m) { m.impl("hadamard", TORCH_BOX(&turboquant::cpu::hadamard)); }
