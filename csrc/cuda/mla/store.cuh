// A call of mla_store as its kernels see it (mla.cu, mla/store_step.cuh), and what they store alike: raw channels, and
// exact tokens of the tail.
#pragma once

#include "cuda/codec/generic.cuh"

namespace turboquant::cuda {

// Where a token has its raw channels.
__device__ __forceinline__ uint8_t* rope_of(const Token& token, const RecordLayout& layout, int rope_dim) {
  return token.tile + layout.value_blocks + token.number * rope_dim * format::kRopeBytes;
}
// The place of raw channel c there.
__device__ __forceinline__ int place_of_raw(const Token& token, int rope_dim, int c) {
  return format::swapped_byte(rope_dim * format::kRopeBytes, token.number, c * format::kRopeBytes) / format::kRopeBytes;
}

// The arguments of a kernel.
struct LatentStore {
  const void *latent, *rope;                   // [tokens, r], [tokens, dr]
  int64_t latent_stride, rope_stride, tokens;  // in elements
  int rope_dim;
  Dtype dtype, rope_dtype;  // of the arguments; of the raw channels in pages
  Codebook book;
  const float* signs;         // [r]; null: no transform
  format::Channels channels;  // [r]
  EncodeConstants constants;
  Pages pages;
  RecordLayout layout;
  Slots slots;
  Tail tail;
  bool rotated_tail;

  // A token's row of the tail, null if it keeps none.
  __device__ __forceinline__ uint8_t* exact_row(int64_t token, int latent_dim) const {
    const int64_t kept = tail.data ? tail.row(token) : -1;
    if (kept < 0) return nullptr;
    const int64_t bytes = static_cast<int64_t>(latent_dim + rope_dim) * element_size(dtype);
    return tail.data + format::latent_tail_offset<int64_t>(kept >> 32, tail.stride, static_cast<uint32_t>(kept), bytes);
  }
  // Copies a token to its row of the tail, and its raw channels alone. A warp calls them.
  __device__ __forceinline__ void store_exact(int64_t token, int latent_dim, uint8_t* to, int lane) const {
    const int size = element_size(dtype);
    copy_bytes(static_cast<const uint8_t*>(latent) + token * latent_stride * size, to, latent_dim * size, lane, 32);
    store_exact_raw(token, latent_dim, to, lane);
  }
  __device__ __forceinline__ void store_exact_raw(int64_t token, int latent_dim, uint8_t* to, int lane) const {
    const int size = element_size(dtype);
    copy_bytes(static_cast<const uint8_t*>(rope) + token * rope_stride * size, to + latent_dim * size, rope_dim * size,
               lane, 32);
  }
  // Stores a token's raw channels in its record. A warp calls it.
  __device__ __forceinline__ void store_raw(int64_t token, const Token& to, int lane) const {
    uint8_t* out = rope_of(to, layout, rope_dim);
    for (int c = lane; c < rope_dim; c += 32) {
      const int place = place_of_raw(to, rope_dim, c);
      if (dtype == rope_dtype) {
        reinterpret_cast<uint16_t*>(out)[place] = static_cast<const uint16_t*>(rope)[token * rope_stride + c];
      } else {
        store_float(out, rope_dtype, place, load_float(rope, dtype, token * rope_stride + c));
      }
    }
  }
};

}  // namespace turboquant::cuda
