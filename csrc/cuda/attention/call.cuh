// A call of paged_attention as kernels take it: plain pointers and numbers, and the rules that say which keys a query
// sees.
//
// The host never synchronises with the device, so kernels check the values of seq_lens, block_table, cu_seqlens_q and
// tail_slots where they read them: a page id out of range holds no keys, and a sequence without queries or with a
// length of 0 has no work.
#pragma once

#include "cuda/common/device.cuh"
#include "format.h"

namespace turboquant::cuda {

struct Attention {
  // Queries and results
  const void* q;                          // [tokens, q_heads, d] of `dtype`, stride 1 in d
  int64_t q_token_stride, q_head_stride;  // in elements
  void* out;                              // [tokens, q_heads, d] of `dtype`, contiguous
  float* lse;                             // [tokens, q_heads]
  Dtype dtype;
  int tokens, q_heads, kv_heads, group;  // group = q_heads / kv_heads
  float softmax_scale, soft_cap;         // soft_cap 0: none
  const float* sink_logits;              // [q_heads] or null

  // Sequences
  const int32_t* seq_lens;     // [seqs], new tokens included; 0: padding
  const int32_t* query_begin;  // cu_seqlens_q [seqs + 1]; null: one query per sequence
  const int32_t* block_table;  // [seqs, max_pages]
  int seqs, max_pages, max_q_len;
  int sliding_window;  // 0: none

  // Pages and their constants
  const uint8_t* pages;  // [num_pages, kv_heads, record_bytes]
  int64_t num_pages;
  format::Record record;
  const float* key_signs;      // [d]
  const float* value_signs;    // [d]
  const int8_t* key_levels;    // [2^key_bits]; null: the uniform grid
  const int8_t* value_levels;  // [2^value_bits]; null: the uniform grid
  format::Channels channels;   // [kv_heads, d]

  // The exact tail (docs/format.md section 9)
  const void* tail;           // [max_seqs, kv_heads, sink_tokens + ring, 2, d] of `dtype`; null: none
  const int64_t* tail_slots;  // [seqs], -1: this sequence has none
  const int32_t* tail_valid;  // [max_seqs, 2] (sinks held, first position held by the ring); null: everything
  int max_seqs, sink_tokens, ring, recent_window;

  // This call's own tokens, exact
  const void* new_keys;    // [tokens, kv_heads, d] of `dtype`; null: none
  const void* new_values;  // likewise
  int64_t new_key_token_stride, new_key_head_stride, new_value_token_stride, new_value_head_stride;  // in elements

  // early: the previous kernel may still be writing `from`. The load then bypasses the L1 cache, which would keep the
  // old value.
  template <typename T>
  static __device__ __forceinline__ T read(const T* from, bool early) {
    return early ? __ldcg(from) : *from;
  }

  // The queries of sequence s are tokens [first_query(s), first_query(s) + num_queries(s)).
  __device__ __forceinline__ int first_query(int s, bool early = false) const {
    return query_begin ? min(max(read(query_begin + s, early), 0), tokens) : s;
  }
  __device__ __forceinline__ int num_queries(int s, bool early = false) const {
    if (!query_begin) return 1;
    return min(max(min(read(query_begin + s + 1, early), tokens) - first_query(s, early), 0), max_q_len);
  }
  // The number of tokens of sequence s, limited to those that block_table has room for.
  __device__ __forceinline__ int length(int s, bool early = false) const {
    const int64_t room = int64_t{max_pages} * record.page_size;
    return static_cast<int>(min(static_cast<int64_t>(max(read(seq_lens + s, early), 0)), room));
  }
  // Query i of sequence s stands at length(s) - num_queries(s) + i and sees keys [first_visible(p), p].
  __device__ __forceinline__ int first_visible(int position) const {
    return sliding_window > 0 ? max(0, position - sliding_window + 1) : 0;
  }

  // The positions of a sequence that the exact tail holds.
  struct Tail {
    bool any;          // false: none
    int sinks, first;  // [0, sinks), and all from `first` on
  };
  __device__ __forceinline__ Tail tail_of(int s, bool early = false) const {
    const int64_t slot = tail ? read(tail_slots + s, early) : -1;
    if (slot < 0 || slot >= max_seqs) return {false, 0, 0};
    if (!tail_valid) return {true, sink_tokens, sink_tokens};
    return {true, max(min(sink_tokens, read(tail_valid + 2 * slot, early)), 0),
            max(sink_tokens, read(tail_valid + 2 * slot + 1, early))};
  }
  // A query reads keys [0, tail.sinks) and [recent, position] from the tail, and the keys between them from codes.
  __device__ __forceinline__ int recent(const Tail& tail, int position) const {
    return tail.any ? min(max(position - recent_window + 1, tail.first), position + 1) : position + 1;
  }
};

}  // namespace turboquant::cuda
