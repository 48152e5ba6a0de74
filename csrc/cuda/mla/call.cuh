// A call of mla_attention as kernels take it: what paged_attention's kernels know of a call (attention/call.cuh), with
// one KV head that all query heads share, and what only latents have.
#pragma once

#include "cuda/attention/call.cuh"

namespace turboquant::cuda::mla {

struct Latents {
  // Of its members, q and new_keys are latents, new_values are rope_new, a tail row is one vector of latent_dim +
  // rope_dim channels, `record` has the sizes of a page only, and signs, levels and channels are those of latents.
  Attention a;
  format::LatentRecord record;
  const void* q_rope;  // [tokens, q_heads, rope_dim] of a.dtype, stride 1 in the last dimension
  int64_t rope_token_stride, rope_head_stride;  // in elements
  Dtype rope_dtype;                             // of the raw channels in pages
  const float* signs;                           // [latent_dim]; null: no transform
  const int8_t* levels;                         // [2^bits]; null: the uniform grid

  __host__ __device__ __forceinline__ int channels() const { return record.latent_dim + record.rope_dim; }
  // Rows that a sequence may have.
  int64_t most_rows() const { return int64_t{a.max_q_len} * a.q_heads; }

  // The entry of a row of the block table that has a token's page, and the token's tile in a page.
  __device__ __forceinline__ int page_of(const int32_t* row, int token) const {
    const int shift = 31 - __clz(record.page_size);
    return __ldcg(row + (token >> shift));
  }
  __device__ __forceinline__ bool exists(int page) const {
    return static_cast<unsigned>(page) < static_cast<unsigned>(a.num_pages);
  }
  __device__ __forceinline__ const uint8_t* tile_of(int page, int token) const {
    return a.pages + int64_t{page} * a.page_stride + record.tile_of(token & (record.page_size - 1));
  }
};

// What one row of queries sees: keys [first, end) from codes, and all others up to `position` as they are.
struct RowSight {
  int position, first, end;
};

// Row `index` of a sequence: query token index / q_heads, head index % q_heads.
struct RowPlace {
  int token, head, position;
};

// What these three need of a sequence is read once, and not for each of its rows and keys.
//   first_query  its first query token
//   tail, slot   what the exact tail holds of it, and where
__device__ __forceinline__ RowPlace place_of_row(const Attention& a, int first_query, int length, int queries,
                                                 int index) {
  const int i = quotient(index, a.q_heads);
  return {first_query + i, index - i * a.q_heads, length - queries + i};
}

__device__ __forceinline__ RowSight sight_of(const Attention& a, const Attention::Tail& tail, int length, int queries,
                                             int position) {
  return {position, tail.sinks, a.recent(tail, position, a.new_begin(length, queries))};
}

// Where exact key `position` of a sequence stands: its latent and its raw channels.
struct ExactKey {
  const uint8_t *latent, *rope;
};
__device__ __forceinline__ ExactKey exact_key(const Latents& x, int first_query, int slot, int length, int queries,
                                              int position) {
  const Attention& a = x.a;
  const int size = element_size(a.dtype), new_begin = a.new_begin(length, queries);
  if (position >= new_begin) {
    const int token = first_query + position - new_begin;
    return {static_cast<const uint8_t*>(a.new_row(token, 0, false)),
            static_cast<const uint8_t*>(a.new_row(token, 0, true))};
  }
  const int row = format::tail_row(position, a.sink_tokens, a.ring);
  const int64_t at = format::latent_tail_offset<int64_t>(slot, a.tail_stride, row, x.channels());
  const uint8_t* vector = static_cast<const uint8_t*>(a.tail) + at * size;
  return {vector, vector + int64_t{x.record.latent_dim} * size};
}

}  // namespace turboquant::cuda::mla
