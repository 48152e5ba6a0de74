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

inline Pages pages_of(const Tensor& cache, int64_t kv_heads) {
  STD_TORCH_CHECK(aligned(cache.data_ptr(), 16), "cache must start at a multiple of 16 bytes");
  return {static_cast<uint8_t*>(cache.data_ptr()), cache.size(0), checked_stride(cache, "cache"),
          static_cast<int>(kv_heads)};
}

// The checked tail of a call that stores. rows: of each of its entries
template <typename Call>
Tail tail_of(const Tensor& tail, const Call& call, int64_t rows) {
  return {static_cast<uint8_t*>(tail.data_ptr()),
          checked_stride(tail, "tail"),
          slots_of(*call.tail_slots),
          entry_stride(*call.tail_slots),
          integers(call.seq_lens),
          integers(call.cu_seqlens_q),
          call.seq_lens->size(0),
          checked_int(tail.size(0), "the number of tails"),
          checked_int(rows, "the rows of a tail"),
          static_cast<int>(call.sink_tokens)};
}

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
