// Checks the arguments of the codec's ops and converts them for kernels. Host only.
#pragma once

#include "cuda/codec/codebook.cuh"
#include "cuda/codec/record.cuh"
#include "cuda/common/torch.cuh"

namespace turboquant::cuda {

inline const int8_t* levels_data(const OptionalTensor& levels) {
  return levels ? static_cast<const int8_t*>(levels->data_ptr()) : nullptr;
}

inline Codebook checked_codebook(const Tensor& first, const OptionalTensor& levels, const Tensor& steps, int64_t bits,
                                 int64_t scale_mode, const char* levels_name, const char* steps_name) {
  check_levels(levels, first, bits, levels_name);
  check_steps(steps, first, steps_name);
  return {levels_data(levels), static_cast<const float*>(steps.data_ptr()), format::as_width(bits),
          static_cast<int>(steps.size(0)), static_cast<ScaleMode>(scale_mode)};
}

// The distance in bytes between the entries of a checked cache or tail. Kernels take them 16 bytes at a time.
inline uint32_t checked_stride(const Tensor& t, const char* name) {
  if (t.numel() == 0) return 16;
  const int64_t stride = entry_stride(t) * static_cast<int64_t>(t.element_size());
  STD_TORCH_CHECK(stride % 16 == 0 && stride <= UINT32_MAX, name, " has ", stride,
                  " bytes from an entry to the next, supported on CUDA: multiples of 16 below 2^32");
  return static_cast<uint32_t>(stride);
}

inline Slots slots_of(const Tensor& t) { return {t.data_ptr(), t.scalar_type() == ScalarType::Long}; }

// Packed standalone vectors: a row of codes and a scale for each, one rotation for all. d is the length of signs.
struct DenseVectors {
  format::Split split;
  int64_t count, d;
  int row_bytes;
};

// packed: uint8 [..., row_bytes], scale: float16 [...], both contiguous
inline DenseVectors checked_dense_vectors(const Tensor& packed, const Tensor& scale, const Tensor& signs,
                                          const OptionalTensor& levels, int64_t bits) {
  const int64_t d = check_dense_vectors(packed, scale, signs, bits);
  const int64_t row_bytes = format::dense_row_bytes(d, static_cast<int>(bits));
  check_levels(levels, packed, bits, "levels");
  return {format::split_dim(d), packed.numel() / row_bytes, d, static_cast<int>(row_bytes)};
}

}  // namespace turboquant::cuda
