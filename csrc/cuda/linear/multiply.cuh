// What linear_packed and linear_experts share on the host. With torch.
#pragma once

#include "calls/linear.h"
#include "cuda/common/torch.cuh"

namespace turboquant::cuda::linear {

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

// y = x w^T + bias, as linear_packed: of checked arguments, into y [..., n], contiguous. Defined in cuda/linear.cu.
void multiply(const LinearCall& c, const WeightShape& shape, const Tensor& y);

}  // namespace turboquant::cuda::linear
