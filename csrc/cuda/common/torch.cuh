// The seam between the host side of an op and torch: device and stream of a launch, its error check, and tensors as
// kernels take them. A header with device code does not include this one.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <string>

#include "checks.h"
#include "cuda/common/device.cuh"
#include "memory.h"

namespace turboquant::cuda {

// ---- Launching ----------------------------------------------------------------------------------------------------

// CUDA's reason, and for the reasons that depend on the machine what to do about them.
inline void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::string advice;
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorUnsupportedPtxVersion) {
    advice = "; this build holds kernels for the architectures " TURBOQUANT_CUDA_ARCHITECTURES
             ": build the wheel with the device's own in TORCH_CUDA_ARCH_LIST";
  } else if (error == cudaErrorInsufficientDriver) {
    advice = "; this build needs a driver for CUDA " + std::to_string(CUDART_VERSION / 1000) +
             ": update the driver, or build the wheel with an older nvcc";
  }
  STD_TORCH_CHECK(false, what, ": ", cudaGetErrorString(error), advice);
}

// Makes the device of a tensor current for its lifetime, and knows torch's stream there.
class Launch {
 public:
  explicit Launch(const Tensor& t) : guard_(t.get_device_index()) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }
  cudaStream_t stream() const { return stream_; }

  // After every kernel launch.
  void check(const char* kernel) const { check_cuda(cudaGetLastError(), kernel); }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

// Whether what is launched on a stream becomes a part of a CUDA graph.
inline bool is_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status;
  check_cuda(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

// A launch that may begin before the previous kernel has ended (from compute capability 9.0 on; elsewhere an ordinary
// launch). The kernel must call wait_for_previous_kernel or have an Overlap. cluster: neighbours in x that are a
// cluster, from 9.0 on.
inline cudaError_t launch_early(const void* kernel, dim3 grid, int threads, int shared_bytes, void** arguments,
                                cudaStream_t stream, int compute_major, int cluster = 1) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = dim3(threads), config.dynamicSmemBytes = shared_bytes;
  config.stream = stream, config.attrs = attributes;
  config.numAttrs = compute_major < 9 ? 0 : cluster == 1 ? 1 : 2;
  return cudaLaunchKernelExC(&config, kernel, arguments);
}

// Lets a kernel have this much dynamic shared memory on a device, which is current. CUDA is asked only for more than
// any thread has asked for. fully: multiprocessors that run it give shared memory all that they can. Otherwise they
// give it little more than the kernel needs, which may leave no room for a small block beside it.
void allow_shared_memory(const void* kernel, int device, int bytes, bool fully = false);

inline int checked_int(int64_t n, const char* name) {
  STD_TORCH_CHECK(n <= INT32_MAX, name, " is ", n, ", supported on CUDA: up to ", INT32_MAX);
  return static_cast<int>(n);
}

// Blocks of a grid in one dimension.
inline unsigned num_blocks(int64_t work, int64_t per_block) {
  const int64_t blocks = divide_up(work, per_block);
  STD_TORCH_CHECK(blocks >= 0 && blocks <= INT32_MAX, "tensor is too large: ", blocks, " blocks, CUDA allows ",
                  INT32_MAX);
  return static_cast<unsigned>(blocks);
}

// ---- Dtypes -------------------------------------------------------------------------------------------------------

struct ElementTypes {
  using Float32 = float;
  using Float16 = __half;
  using BFloat16 = __nv_bfloat16;
};

// Calls fn(Tag<float | __half | __nv_bfloat16>) for the type of a tensor's elements.
template <typename Fn>
void dispatch_float(Dtype dtype, Fn&& fn) {
  dispatch_dtype<ElementTypes>(dtype, fn);
}

// ---- Tensors ------------------------------------------------------------------------------------------------------

// All but the last dimension of t, with neighbouring dimensions merged where their strides allow it. A result with
// dims = 0 says that more than kMaxDims are left.
inline Rows rows_of(const Tensor& t) {
  Rows rows{{}, {}, 0, t.numel() ? 1 : 0};
  if (rows.count == 0) return rows;  // sizes and strides can be anything, and nothing is launched
  for (int64_t i = 0; i + 1 < t.dim(); ++i) {
    const int64_t size = t.size(i), stride = t.stride(i);
    rows.count *= size;
    if (size == 1) continue;
    const int last = rows.dims - 1;
    if (rows.dims && rows.stride[last] == size * stride) {
      rows.size[last] *= size;
      rows.stride[last] = stride;
    } else if (rows.dims < Rows::kMaxDims) {
      rows.size[rows.dims] = size;
      rows.stride[rows.dims++] = stride;
    } else {
      return Rows{{}, {}, 0, rows.count};
    }
  }
  if (rows.dims == 0) rows = Rows{{rows.count}, {0}, 1, rows.count};  // a single row
  return rows;
}

inline bool aligned(const void* p, int64_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }
inline void check_aligned(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(aligned(t.data_ptr(), 16), name, " must start at a multiple of 16 bytes");
}

// The rows of a tensor with stride 1 in its last dimension, each of which starts at a multiple of `bytes`. Any other
// tensor, or one with more dimensions than a kernel takes, is copied once.
class AlignedRows {
 public:
  // fits: what else is asked of the rows; a contiguous tensor's are one dimension, and fit.
  AlignedRows(const Tensor& t, int64_t bytes, bool (*fits)(const Rows&) = nullptr) : tensor_(t), rows_(rows_of(t)) {
    bool good = rows_.dims > 0 && aligned(t.data_ptr(), bytes) && (!fits || fits(rows_));
    for (int k = 0; k < rows_.dims; ++k)
      good = good && rows_.stride[k] * static_cast<int64_t>(t.element_size()) % bytes == 0;
    if (good || t.numel() == 0) return;
    tensor_ = new_copy(t);
    rows_ = rows_of(tensor_);
  }
  const Rows& rows() const { return rows_; }
  const void* data() const { return tensor_.data_ptr(); }

 private:
  Tensor tensor_;  // keeps a copy alive until the kernel is launched
  Rows rows_;
};

// Rows of [tokens, heads, d] with stride 1 in d: the tensor itself, or a copy if rows do not start at multiples of 16
// bytes.
class HeadVectors {
 public:
  explicit HeadVectors(const Tensor& t) : rows_(t, 16) {
    const bool copied = rows_.data() != t.data_ptr();
    const auto stride = [&](int64_t i, int64_t dense) { return copied || t.size(i) <= 1 ? dense : t.stride(i); };
    token_stride_ = stride(0, t.size(1) * t.size(2)), head_stride_ = stride(1, t.size(2));
  }
  const void* data() const { return rows_.data(); }
  int64_t token_stride() const { return token_stride_; }  // in elements
  int64_t head_stride() const { return head_stride_; }    // in elements

 private:
  AlignedRows rows_;
  int64_t token_stride_, head_stride_;
};

// A checked constant of a call, float32 (signs, center) or int8 (levels), that kernels can read 16 bytes at a time. It
// is null where it is absent.
template <typename T>
class Constant {
 public:
  explicit Constant(const OptionalTensor& t) : tensor_(t) {
    if (t && !aligned(t->data_ptr(), 16)) tensor_ = new_copy(*t);
  }
  const T* data() const { return tensor_ ? static_cast<const T*>(tensor_->data_ptr()) : nullptr; }

 private:
  OptionalTensor tensor_;  // keeps a copy alive until the kernel is launched
};

inline const int32_t* integers(const OptionalTensor& t) {
  return t ? static_cast<const int32_t*>(t->data_ptr()) : nullptr;
}
inline const uint8_t* bytes_of(const Tensor& t) { return static_cast<const uint8_t*>(t.data_ptr()); }

}  // namespace turboquant::cuda
