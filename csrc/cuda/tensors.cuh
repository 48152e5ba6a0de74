// What the host sides of the ops share: inputs whose rows a kernel can read a word at a time.
#pragma once

#include "launch.cuh"

namespace turboquant::cuda {

inline bool aligned(const void* p, int64_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

// The rows of a tensor with stride 1 in its last dimension, each of them starting at a multiple of `bytes`. A tensor that is
// not like that, or has more dimensions than a kernel takes, is copied once.
class AlignedRows {
 public:
  AlignedRows(const Tensor& t, int64_t bytes) : tensor_(t), rows_(rows_of(t)) {
    bool good = rows_.dims > 0 && aligned(t.data_ptr(), bytes);
    for (int k = 0; k < rows_.dims; ++k)
      good = good && rows_.stride[k] * static_cast<int64_t>(t.element_size()) % bytes == 0;
    if (good || t.numel() == 0) return;
    tensor_ = torch::stable::new_empty(t, leading_shape(t, 0, {}), t.scalar_type());
    torch::stable::copy_(tensor_, t);
    rows_ = rows_of(tensor_);
  }
  const Rows& rows() const { return rows_; }
  const void* data() const { return tensor_.data_ptr(); }

 private:
  Tensor tensor_;  // keeps a copy alive until the kernel is launched
  Rows rows_;
};

inline const uint8_t* bytes_of(const Tensor& t) { return static_cast<const uint8_t*>(t.data_ptr()); }

}  // namespace turboquant::cuda
