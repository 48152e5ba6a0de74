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

// Launches kernels with the memory that they need. like: on their device
template <typename Work>
void launch_with_memory(Work&& work, const Tensor& like, cudaStream_t stream) {
  const int64_t bytes = work.workspace_bytes();
  if (bytes == 0) return work.run(nullptr, stream);
  const Tensor memory = new_tensor(like, {bytes}, ScalarType::Byte, "the work space");
  work.run(memory.data_ptr(), stream);
}

// y = x w^T + bias, as linear_packed: of checked arguments, into y [..., n], contiguous. Defined in cuda/linear.cu.
void multiply(const LinearCall& c, const WeightShape& shape, const Tensor& y);

}  // namespace turboquant::cuda::linear
