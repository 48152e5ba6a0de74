// A call of paged_attention as kernels take it: plain pointers and numbers, and the rules that say which keys a query
// sees.
//
// The host never synchronises with the device, so kernels check the values of seq_lens, block_table, cu_seqlens_q and
// tail_slots where they read them: a page id out of range is not read, and a sequence without queries or with a length
// of 0 has no work. What stands for the keys of such a page is up to the kernel: row tiles and key tiles leave them
// out, split-KV takes what its memory held before, and kernels of latents (mla) take zeros, which a row's denominator
// counts.
#pragma once

#include "cuda/common/device.cuh"
#include "format.h"

namespace turboquant::cuda {

struct Attention {
  // Queries and results
  const void* q;                          // [tokens, q_heads, d] of `dtype`; rows begin at multiples of 16 bytes
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
  const int32_t* block_table;  // [seqs, max_pages], stride 1 in a sequence's row
  int64_t table_stride;        // from one row of block_table to the next, in elements
  int seqs, max_pages, max_q_len;
  int room;  // tokens that a row of block_table has pages for
  // split-KV and key tiles leave sequences with more queries, or with fewer, to another launch
  int most_queries, least_queries;
  int sliding_window;  // 0: none

  // Pages and their constants
  const uint8_t* pages;  // [num_pages, kv_heads, record_bytes], records of a page contiguous
  int64_t num_pages;
  int64_t page_stride;  // from one page to the next, in bytes
  format::Record record;
  const float* key_signs;      // [d]
  const float* value_signs;    // [d]
  const int8_t* key_levels;    // [2^key_bits]; null: the uniform grid
  const int8_t* value_levels;  // [2^value_bits]; null: the uniform grid
  format::Channels channels;   // [kv_heads, d]

  // The exact tail (docs/format.md section 9)
  const void* tail;           // [max_seqs, kv_heads, sink_tokens + ring, 2, d] of `dtype`; null: none
  int64_t tail_stride;        // from one of the max_seqs entries to the next, in elements; an entry is contiguous
  const int32_t* tail_slots;  // [seqs], -1: this sequence has none
  int64_t slot_stride;        // from one of tail_slots to the next, in words of 32 bits
  bool wide_slots;            // a slot has two words, the lower one first; else one
  const int32_t* tail_valid;  // [max_seqs, 2] (sinks held, first position held by the ring); null: everything
  int max_seqs, sink_tokens, recent_window;
  Divisor ring;  // of rows

  // The exact keys and values of this call's own tokens, which stand at positions new_begin(..) and later. Rows start
  // at multiples of 16 bytes.
  const void* new_keys;  // [tokens, kv_heads, d] of `dtype`; null: none
  const void* new_values;
  int64_t new_key_token_stride, new_key_head_stride, new_value_token_stride, new_value_head_stride;  // in elements

  // early: the previous kernel may still be writing `from`. The load then bypasses the L1 cache, which would keep the
  // old value.
  template <typename T>
  static __device__ __forceinline__ T read(const T* from, bool early) {
    return early ? __ldcg(from) : *from;
  }

  // The queries of a sequence are tokens [first, first + count).
  struct Queries {
    int first, count;
  };
  __device__ __forceinline__ Queries queries_of(int s, bool early = false) const {
    if (!query_begin) return {s, 1};
    const int first = min(max(read(query_begin + s, early), 0), tokens);
    return {first, min(min(max(read(query_begin + s + 1, early), first), tokens) - first, max_q_len)};
  }
  // Whether a launch of split-KV or of key tiles takes a sequence with so many queries.
  __device__ __forceinline__ bool takes(int queries) const {
    return queries <= most_queries && queries >= least_queries;
  }
  __device__ __forceinline__ int first_query(int s) const { return queries_of(s).first; }
  __device__ __forceinline__ int num_queries(int s) const { return queries_of(s).count; }
  // The number of tokens of sequence s, which has so many queries, limited to those that block_table has room for;
  // new_keys need no room.
  __device__ __forceinline__ int length(int s, int queries, bool early = false) const {
    const unsigned most = static_cast<unsigned>(room) + (new_keys ? queries : 0);  // in 32 bits
    return static_cast<int>(min(static_cast<unsigned>(max(read(seq_lens + s, early), 0)), most));
  }
  __device__ __forceinline__ int length(int s) const { return length(s, num_queries(s)); }
  // Query i of sequence s stands at length(s) - num_queries(s) + i and sees keys [first_visible(p), p].
  __device__ __forceinline__ int first_visible(int position) const {
    return sliding_window > 0 ? max(0, position - sliding_window + 1) : 0;
  }

  // The first position of a sequence that new_keys and new_values hold; without them its end. It is negative where the
  // sequence has more queries than tokens.
  __device__ __forceinline__ int new_begin(int length, int queries) const {
    return new_keys ? length - queries : length;
  }
  // The key or the value of one of this call's tokens.
  __device__ __forceinline__ const void* new_row(int token, int kv_head, bool is_value) const {
    const int64_t offset = is_value
                               ? offset_of(token, new_value_token_stride) + offset_of(kv_head, new_value_head_stride)
                               : offset_of(token, new_key_token_stride) + offset_of(kv_head, new_key_head_stride);
    return static_cast<const uint8_t*>(is_value ? new_values : new_keys) + offset * element_size(dtype);
  }

  // The positions of a sequence that the exact tail holds.
  struct Tail {
    int slot;          // its entry of the tail, -1: it has none
    int sinks, first;  // [0, sinks), and all from `first` on

    __device__ __forceinline__ bool any() const { return slot >= 0; }
  };
  __device__ __forceinline__ int tail_slot(int s, bool early = false) const {
    if (!tail) return -1;
    const int32_t* word = tail_slots + offset_of(s, slot_stride);
    const int slot = read(word, early), high = wide_slots ? read(word + 1, early) : 0;
    return high == 0 && static_cast<unsigned>(slot) < static_cast<unsigned>(max_seqs) ? slot : -1;
  }
  // Beside new_keys, the new tokens may have been stored or not. Without tail_valid, only those rows of the ring are
  // used that hold the same tokens before the new ones are stored and after.
  __device__ __forceinline__ Tail tail_of(int s, int length, bool early = false) const {
    const int slot = tail_slot(s, early);
    if (slot < 0) return {-1, 0, 0};
    int sinks = sink_tokens, first = new_keys ? length - ring : 0;
    if (tail_valid) {
      const int32_t* valid = tail_valid + offset_of(slot, 2);
      sinks = read(valid, early), first = read(valid + 1, early);
    }
    return {slot, max(min(sink_tokens, sinks), 0), max(sink_tokens, first)};
  }
  // A query has exact keys [0, tail.sinks) and [recent, position], and the keys between them in codes. Of the exact
  // keys those from new_begin on are in new_keys, and the others in the tail.
  __device__ __forceinline__ int recent(const Tail& tail, int position, int new_begin) const {
    const int first = tail.any() ? max(position - recent_window + 1, tail.first) : position + 1;
    return min(max(min(first, new_begin), tail.sinks), position + 1);
  }
};

}  // namespace turboquant::cuda
