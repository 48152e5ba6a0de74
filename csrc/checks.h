// Argument checks shared by both backends: each says what was given and what is supported. Everything here looks at
// shapes, dtypes and devices only, so it costs no device synchronisation; checks of *values* are made where the CPU kernels
// read them, before anything is written.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "format.h"

namespace turboquant {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

inline const char* dtype_name(ScalarType t) {
  switch (t) {
    case ScalarType::Float: return "float32";
    case ScalarType::Half: return "float16";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Double: return "float64";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Char: return "int8";
    case ScalarType::Short: return "int16";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::Bool: return "bool";
    default: return "another dtype";
  }
}

inline std::string shape_text(const Tensor& t) {
  std::string s = "[";
  for (int64_t i = 0; i < t.dim(); ++i) s += (i ? ", " : "") + std::to_string(t.size(i));
  return s + "]";
}

inline void check_dtype(const Tensor& t, const char* name, std::initializer_list<ScalarType> allowed) {
  std::string names;
  for (ScalarType a : allowed) {
    if (t.scalar_type() == a) return;
    names += (names.empty() ? "" : ", ") + std::string(dtype_name(a));
  }
  STD_TORCH_CHECK(false, name, " has dtype ", dtype_name(t.scalar_type()), ", supported: ", names);
}

inline void check_float(const Tensor& t, const char* name) {
  check_dtype(t, name, {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16});
}

inline void check_output_dtype(ScalarType t) {
  STD_TORCH_CHECK(t == ScalarType::Float || t == ScalarType::Half || t == ScalarType::BFloat16, "dtype is ",
                  dtype_name(t), ", supported: float32, float16, bfloat16");
}

// All tensors of a call live on the device of the first.
inline void check_device(const Tensor& t, const Tensor& first, const char* name) {
  STD_TORCH_CHECK(
      t.is_cpu() == first.is_cpu() && t.get_device_index() == first.get_device_index(), name,
      " is on another device than the first tensor of the call: all tensors of a call must be on one device");
}

// `shape` entries of -1 stand for any size.
inline void check_shape(const Tensor& t, const char* name, std::initializer_list<int64_t> shape) {
  bool same = t.dim() == static_cast<int64_t>(shape.size());
  std::string want;
  int64_t i = 0;
  for (int64_t n : shape) {
    same = same && (n < 0 || t.size(i) == n);
    want += (i++ ? ", " : "") + (n < 0 ? std::string("any") : std::to_string(n));
  }
  STD_TORCH_CHECK(same, name, " has shape ", shape_text(t), ", expected [", want, "]");
}

inline void check_contiguous(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.is_contiguous(), name, " must be contiguous");
}

inline void check_unit_last_stride(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.dim() >= 1 && (t.size(t.dim() - 1) <= 1 || t.stride(t.dim() - 1) == 1), name,
                  " must have stride 1 in its last dimension");
}

// A constant of the call: exact dtype and shape, contiguous, on the call's device.
inline void check_constant(const Tensor& t, const Tensor& first, const char* name, ScalarType dtype,
                           std::initializer_list<int64_t> shape) {
  check_device(t, first, name);
  check_dtype(t, name, {dtype});
  check_shape(t, name, shape);
  check_contiguous(t, name);
}

inline format::Split check_vector_dim(int64_t d, const char* name) {
  const format::Split split = format::split_dim(d);
  STD_TORCH_CHECK(split.valid(), "the last dimension of ", name, " is ", d,
                  ", supported: m * 2^k with m in {1, 3, 5, 7, 9} and k >= 1, up to ", format::kMaxVectorDim);
  return split;
}

inline void check_codec_bits(int64_t bits) {
  STD_TORCH_CHECK((bits >= 1 && bits <= 5) || bits == 8, "bits is ", bits, ", supported: 1, 2, 3, 4, 5, 8");
}

inline void check_scale_mode(int64_t mode, const char* name) {
  STD_TORCH_CHECK(mode >= 0 && mode <= 3, name, " is ", mode,
                  ", supported: 0 (norm), 1 (preserve), 2 (mse), 3 (unbiased)");
}

// `levels`: int8 [2^bits], or absent for the uniform grid (2 bits and more).
inline void check_levels(const OptionalTensor& levels, const Tensor& first, int64_t bits, const char* name) {
  if (!levels) {
    STD_TORCH_CHECK(bits >= 2, name, " is needed at ", bits, " bit: the uniform grid starts at 2 bits");
    return;
  }
  STD_TORCH_CHECK(bits <= 5, name, " must be absent at ", bits, " bits: 8-bit codes are the uniform signed grid");
  check_constant(*levels, first, name, ScalarType::Char, {int64_t{1} << bits});
}

inline void check_steps(const Tensor& steps, const Tensor& first, const char* name) {
  check_constant(steps, first, name, ScalarType::Float, {-1});
  STD_TORCH_CHECK(steps.size(0) >= 1 && steps.size(0) <= 64, name, " has ", steps.size(0),
                  " candidates, supported: 1 to 64");
}

inline format::Record check_record(int64_t head_dim, int64_t page_size, int64_t key_bits, int64_t value_bits) {
  STD_TORCH_CHECK(format::valid_head_dim(head_dim), "head_dim is ", head_dim,
                  ", supported in page records: multiples of 16 up to ", format::kMaxHeadDim,
                  " of the form m * 2^k with m in {1, 3, 5, 7, 9}");
  STD_TORCH_CHECK(format::valid_page_size(page_size), "page_size is ", page_size, ", supported: 16, 32, 64, 128");
  STD_TORCH_CHECK(format::valid_key_bits(key_bits), "key_bits is ", key_bits, ", supported: 2, 3, 4, 5, 8");
  STD_TORCH_CHECK(format::valid_value_bits(value_bits), "value_bits is ", value_bits, ", supported: 2, 3, 4, 8");
  return {static_cast<int>(head_dim), static_cast<int>(page_size), static_cast<int>(key_bits),
          static_cast<int>(value_bits)};
}

// uint8 [num_pages, num_kv_heads, record_bytes]
inline void check_cache(const Tensor& cache, const Tensor& first, const format::Record& record) {
  check_constant(cache, first, "cache", ScalarType::Byte, {-1, -1, record.record_bytes()});
}

inline void check_center(const OptionalTensor& center, const Tensor& first, int64_t kv_heads, int64_t d) {
  if (center) check_constant(*center, first, "center", ScalarType::Float, {kv_heads, d});
}

}  // namespace turboquant
