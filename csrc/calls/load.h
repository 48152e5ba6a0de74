// A call of cache_load: its arguments and their checks, which both backends share.
#pragma once

#include "calls/boxed.h"
#include "checks.h"
#include "memory.h"

namespace turboquant {

// The arguments of cache_load in the order of its schema (csrc/ops.cpp).
struct LoadCall {
  Tensor cache;                             // uint8 [num_pages, kv_heads, record_bytes], any stride of pages
  Tensor block_table;                       // int32 [seqs, max_pages], stride 1 in a row
  Tensor seq_lens;                          // int32 [seqs]
  Tensor key_signs, value_signs;            // float32 [head_dim]
  OptionalTensor key_levels, value_levels;  // int8 [2^bits]; absent: the uniform grid
  OptionalTensor center;                    // float32 [kv_heads, head_dim] or [3, kv_heads, head_dim]
  int64_t head_dim, page_size, key_bits, value_bits, max_seq_len;
  ScalarType dtype;  // of the results

  int64_t kv_heads() const { return cache.size(1); }
  int64_t seqs() const { return seq_lens.size(0); }
  int64_t max_pages() const { return block_table.size(1); }
  // Keys and values, each: [seqs, max_seq_len, kv_heads, head_dim]
  Tensor new_result() const {
    return new_tensor(cache, {seqs(), max_seq_len, kv_heads(), head_dim}, dtype,
                      "keys or values of max_seq_len = " + std::to_string(max_seq_len));
  }
};

// Checks everything that can be checked without reading values. Returns the geometry of the cache's records.
inline format::Record check_load(const LoadCall& c) {
  const Tensor& cache = c.cache;
  const format::Record record = check_record(c.head_dim, c.page_size, c.key_bits, c.value_bits);
  check_cache(cache, cache, record);
  check_output_dtype(c.dtype);
  check_constant(c.key_signs, cache, "key_signs", ScalarType::Float, {c.head_dim});
  check_constant(c.value_signs, cache, "value_signs", ScalarType::Float, {c.head_dim});
  check_center(c.center, cache, c.kv_heads(), c.head_dim);
  check_levels(c.key_levels, cache, c.key_bits, "key_levels");
  check_levels(c.value_levels, cache, c.value_bits, "value_levels");
  STD_TORCH_CHECK(c.max_seq_len >= 0, "max_seq_len is ", c.max_seq_len, ", supported: 0 and more");
  check_constant(c.seq_lens, cache, "seq_lens", ScalarType::Int, {-1});
  check_block_table(c.block_table, cache, c.seqs());
  return record;
}

}  // namespace turboquant
