// Calls of mla_store, mla_load and mla_attention: their arguments, their checks, and the ops that a backend makes of
// its kernels. Latent attention keeps one vector per token (docs/format.md section 12), so that nothing has heads here
// but the queries.
//
// Absent signs: there is no transform, and codes stand for the channels as they are. Queries that somebody has rotated
// are asked for with absent signs, too, and with a center in the rotated space: then no transform is left to do.
#pragma once

#include <string>
#include <tuple>

#include "calls/boxed.h"
#include "checks.h"
#include "memory.h"

namespace turboquant {

// The arguments of mla_store in the order of its schema (csrc/ops.cpp).
struct MlaStoreCall {
  Tensor latent, rope;    // [tokens, r], [tokens, dr] of one dtype, stride 1 in the last dimension
  Tensor cache;           // uint8 [num_pages, record_bytes], any stride of pages, written
  Tensor slot_mapping;    // int32 or int64 [tokens]
  OptionalTensor signs;   // float32 [r]; absent: no transform
  OptionalTensor levels;  // int8 [2^bits]; absent: the uniform grid
  Tensor steps;           // float32 [S]
  OptionalTensor center;  // float32 [r] or [3, r]
  int64_t page_size, bits, scale_mode;
  ScalarType rope_dtype;                  // of the raw channels in the record: bfloat16 or float16
  OptionalTensor tail;                    // [max_seqs, rows, r + dr] of latent's dtype, any stride of entries, written
  OptionalTensor tail_slots;              // int32 or int64 [seqs], any stride
  OptionalTensor seq_lens, cu_seqlens_q;  // int32 [seqs], int32 [seqs + 1]
  int64_t sink_tokens;
  bool rotated_tail;  // the tail gets forward(latent * channel_scale) instead of latent

  int64_t tokens() const { return latent.size(0); }
  int64_t latent_dim() const { return latent.size(1); }
  int64_t rope_dim() const { return rope.size(1); }
};

// The arguments of mla_load in the order of its schema.
struct MlaLoadCall {
  Tensor cache;           // uint8 [num_pages, record_bytes], any stride of pages
  Tensor block_table;     // int32 [seqs, max_pages], stride 1 in a row
  Tensor seq_lens;        // int32 [seqs]
  OptionalTensor signs;   // float32 [r]; absent: no transform
  OptionalTensor levels;  // int8 [2^bits]; absent: the uniform grid
  OptionalTensor center;  // float32 [r] or [3, r]
  int64_t latent_dim, rope_dim, page_size, bits;
  ScalarType rope_dtype;
  int64_t max_seq_len;
  ScalarType dtype;  // of the results

  int64_t seqs() const { return seq_lens.size(0); }
  int64_t max_pages() const { return block_table.size(1); }
  // [seqs, max_seq_len, channels]
  Tensor new_result(int64_t channels) const {
    return new_tensor(cache, {seqs(), max_seq_len, channels}, dtype,
                      "latents of max_seq_len = " + std::to_string(max_seq_len));
  }
};

// The arguments of mla_attention in the order of its schema.
struct MlaAttentionCall {
  Tensor q_latent, q_rope;  // [tokens, q_heads, r], [tokens, q_heads, dr] of one dtype, stride 1 in the last dimension
  Tensor cache;             // uint8 [num_pages, record_bytes], any stride of pages
  Tensor block_table;       // int32 [seqs, max_pages], stride 1 in a row
  Tensor seq_lens;          // int32 [seqs], new tokens included
  OptionalTensor signs;     // float32 [r]; absent: no transform
  OptionalTensor levels;    // int8 [2^bits]; absent: the uniform grid
  OptionalTensor center;    // float32 [r] or [3, r]
  int64_t page_size, bits;
  ScalarType rope_dtype;
  double softmax_scale;
  OptionalTensor cu_seqlens_q;  // int32 [seqs + 1]; absent: one query per sequence
  int64_t max_q_len;
  OptionalTensor tail;        // [max_seqs, sink_tokens + ring, r + dr] of q_latent's dtype, any stride of entries
  OptionalTensor tail_slots;  // int32 or int64 [seqs], any stride, -1: this sequence has none
  OptionalTensor tail_valid;  // int32 [max_seqs, 2]
  int64_t sink_tokens, recent_window;
  OptionalTensor latent_new, rope_new;  // [tokens, r], [tokens, dr] of q_latent's dtype; both or neither

  int64_t tokens() const { return q_latent.size(0); }
  int64_t q_heads() const { return q_latent.size(1); }
  int64_t latent_dim() const { return q_latent.size(2); }
  int64_t rope_dim() const { return q_rope.size(2); }
  int64_t seqs() const { return seq_lens.size(0); }
};

// ---- checks: shapes, dtypes and devices -----------------------------------------------------------------------------

inline format::LatentRecord check_latent_record(int64_t latent_dim, int64_t rope_dim, int64_t page_size, int64_t bits,
                                                ScalarType rope_dtype) {
  STD_TORCH_CHECK(format::valid_latent_dim(latent_dim), "latent_dim is ", latent_dim, ", supported: 128, 256, 512");
  STD_TORCH_CHECK(format::valid_rope_dim(rope_dim), "rope_dim is ", rope_dim, ", supported: 0, 32, 64");
  STD_TORCH_CHECK(format::valid_latent_page_size(page_size), "page_size is ", page_size,
                  ", supported for latents: 32, 64, 128");
  STD_TORCH_CHECK(format::valid_latent_bits(bits), "bits is ", bits, ", supported for latents: 3, 4, 5, 8");
  STD_TORCH_CHECK(rope_dtype == ScalarType::BFloat16 || rope_dtype == ScalarType::Half, "rope_dtype is ",
                  dtype_name(rope_dtype), ", supported: bfloat16, float16");
  return {static_cast<int>(latent_dim), static_cast<int>(rope_dim), static_cast<int>(page_size),
          static_cast<int>(bits)};
}

// uint8 [num_pages, record_bytes], pages at any distance
inline void check_latent_cache(const Tensor& cache, const Tensor& first, const format::LatentRecord& record) {
  check_device(cache, first, "cache");
  check_dtype(cache, "cache", {ScalarType::Byte});
  check_shape(cache, "cache", {-1, record.record_bytes()});
  check_entries(cache, "cache");
}

// What every op knows of the codes of a cache.
template <typename Call>
void check_latent_codes(const Call& c, const Tensor& first, int64_t latent_dim) {
  if (c.signs) check_constant(*c.signs, first, "signs", ScalarType::Float, {latent_dim});
  check_levels(c.levels, first, c.bits, "levels");
  check_center(c.center, first, latent_dim);
}

// tail: [max_seqs, sink_tokens + ring, r + dr] of the dtype of `first`, entries at any distance
inline void check_latent_tail(const Tensor& tail, const OptionalTensor& tail_slots, const Tensor& first, int64_t seqs,
                              int64_t channels, int64_t sink_tokens) {
  check_device(tail, first, "tail");
  check_dtype(tail, "tail", {first.scalar_type()});
  check_shape(tail, "tail", {-1, -1, channels});
  check_entries(tail, "tail");
  check_sinks(sink_tokens, tail.size(1));
  STD_TORCH_CHECK(tail_slots.has_value(), "tail needs tail_slots");
  check_tail_slots(*tail_slots, first, seqs);
}

// One latent and its raw channels for each of `tokens` tokens; dims of -1 stand for any size.
inline void check_latents(const Tensor& latent, const Tensor& rope, const char* latent_name, const char* rope_name,
                          int64_t tokens, int64_t latent_dim, int64_t rope_dim) {
  check_shape(latent, latent_name, {tokens, latent_dim});
  check_unit_last_stride(latent, latent_name);
  check_device(rope, latent, rope_name);
  check_dtype(rope, rope_name, {latent.scalar_type()});
  check_shape(rope, rope_name, {latent.size(0), rope_dim});
  check_unit_last_stride(rope, rope_name);
}

// Checks everything that can be checked without reading values. Returns the geometry of the cache's records.
inline format::LatentRecord check_mla_store(const MlaStoreCall& c) {
  check_float(c.latent, "latent");
  check_latents(c.latent, c.rope, "latent", "rope", -1, -1, -1);
  const format::LatentRecord record =
      check_latent_record(c.latent_dim(), c.rope_dim(), c.page_size, c.bits, c.rope_dtype);
  check_latent_cache(c.cache, c.latent, record);
  check_latent_codes(c, c.latent, c.latent_dim());
  check_steps(c.steps, c.latent, "steps");
  check_scale_mode(c.scale_mode, "scale_mode");
  check_slots(c.slot_mapping, c.latent, "slot_mapping", c.tokens());
  STD_TORCH_CHECK(c.seq_lens || !(c.tail || c.tail_slots), "tail needs seq_lens");
  if (c.seq_lens) {
    const int64_t seqs = check_batch(*c.seq_lens, c.cu_seqlens_q, c.latent, c.tokens());
    if (c.tail) {
      check_latent_tail(*c.tail, c.tail_slots, c.latent, seqs, c.latent_dim() + c.rope_dim(), c.sink_tokens);
    } else if (c.tail_slots) {
      check_tail_slots(*c.tail_slots, c.latent, seqs);
    }
  } else if (c.cu_seqlens_q) {
    check_constant(*c.cu_seqlens_q, c.latent, "cu_seqlens_q", ScalarType::Int, {-1});
  }
  Arguments memory;
  memory.writes(c.cache, "cache");
  memory.writes(c.tail, "tail");
  memory.reads(c.latent, "latent");
  memory.reads(c.rope, "rope");
  memory.reads(c.slot_mapping, "slot_mapping");
  memory.reads(c.signs, "signs");
  memory.reads(c.levels, "levels");
  memory.reads(c.steps, "steps");
  memory.reads(c.center, "center");
  memory.reads(c.tail_slots, "tail_slots");
  memory.reads(c.seq_lens, "seq_lens");
  memory.reads(c.cu_seqlens_q, "cu_seqlens_q");
  memory.check();
  return record;
}

inline format::LatentRecord check_mla_load(const MlaLoadCall& c) {
  const format::LatentRecord record = check_latent_record(c.latent_dim, c.rope_dim, c.page_size, c.bits, c.rope_dtype);
  check_latent_cache(c.cache, c.cache, record);
  check_output_dtype(c.dtype);
  check_latent_codes(c, c.cache, c.latent_dim);
  STD_TORCH_CHECK(c.max_seq_len >= 0, "max_seq_len is ", c.max_seq_len, ", supported: 0 and more");
  check_constant(c.seq_lens, c.cache, "seq_lens", ScalarType::Int, {-1});
  check_block_table(c.block_table, c.cache, c.seqs());
  return record;
}

inline format::LatentRecord check_mla_attention(const MlaAttentionCall& c) {
  const Tensor& q = c.q_latent;
  check_float(q, "q_latent");
  check_shape(q, "q_latent", {-1, -1, -1});
  check_unit_last_stride(q, "q_latent");
  check_device(c.q_rope, q, "q_rope");
  check_dtype(c.q_rope, "q_rope", {q.scalar_type()});
  check_shape(c.q_rope, "q_rope", {c.tokens(), c.q_heads(), -1});
  check_unit_last_stride(c.q_rope, "q_rope");
  STD_TORCH_CHECK(c.q_heads() >= 1, "q_latent has no heads");
  const format::LatentRecord record =
      check_latent_record(c.latent_dim(), c.rope_dim(), c.page_size, c.bits, c.rope_dtype);
  check_latent_cache(c.cache, q, record);
  check_latent_codes(c, q, c.latent_dim());
  STD_TORCH_CHECK(c.max_q_len >= 1, "max_q_len is ", c.max_q_len, ", supported: 1 and more");
  STD_TORCH_CHECK(c.recent_window >= 0, "recent_window is ", c.recent_window, ", supported: 0 and more");
  check_softmax_scale(c.softmax_scale);
  STD_TORCH_CHECK(c.latent_new.has_value() == c.rope_new.has_value(),
                  "latent_new and rope_new come together or not at all");
  if (c.latent_new) {
    check_device(*c.latent_new, q, "latent_new");
    check_dtype(*c.latent_new, "latent_new", {q.scalar_type()});
    check_latents(*c.latent_new, *c.rope_new, "latent_new", "rope_new", c.tokens(), c.latent_dim(), c.rope_dim());
  }
  const int64_t seqs = check_batch(c.seq_lens, c.cu_seqlens_q, q, c.tokens());
  check_block_table(c.block_table, q, seqs);
  if (c.tail) {
    check_latent_tail(*c.tail, c.tail_slots, q, seqs, c.latent_dim() + c.rope_dim(), c.sink_tokens);
    check_ring(c.tail->size(1) - c.sink_tokens, c.recent_window, c.max_q_len, c.latent_new.has_value(), "latent_new");
    if (c.tail_valid) check_constant(*c.tail_valid, q, "tail_valid", ScalarType::Int, {c.tail->size(0), 2});
  }
  return record;
}

// Checks the tensors that the _out variant writes.
inline void check_mla_outputs(const MlaAttentionCall& c, const Tensor& out, const OptionalTensor& lse) {
  check_out_and_lse(out, lse, c.q_latent, 8);
  Arguments memory;
  memory.writes(out, "out");
  memory.writes(lse, "lse");
  memory.reads(c.q_latent, "q_latent");
  memory.reads(c.q_rope, "q_rope");
  memory.reads(c.cache, "cache");
  memory.reads(c.block_table, "block_table");
  memory.reads(c.seq_lens, "seq_lens");
  memory.reads(c.signs, "signs");
  memory.reads(c.levels, "levels");
  memory.reads(c.center, "center");
  memory.reads(c.cu_seqlens_q, "cu_seqlens_q");
  memory.reads(c.tail, "tail");
  memory.reads(c.tail_slots, "tail_slots");
  memory.reads(c.tail_valid, "tail_valid");
  memory.reads(c.latent_new, "latent_new");
  memory.reads(c.rope_new, "rope_new");
  memory.check();
}

// ---- The ops of a backend, for boxed() (calls/boxed.h) --------------------------------------------------------------

// store: gets a checked call.
using StoreLatents = void(const MlaStoreCall& call, const format::LatentRecord& record);
template <StoreLatents* store>
void mla_store(const MlaStoreCall& call) {
  store(call, check_mla_store(call));
}

// load: gets a checked call; fills latent [seqs, max_seq_len, r] and rope [seqs, max_seq_len, dr].
using LoadLatents = void(const MlaLoadCall& call, const format::LatentRecord& record, const Tensor& latent,
                         const Tensor& rope);
template <LoadLatents* load>
std::tuple<Tensor, Tensor> mla_load(const MlaLoadCall& call) {
  const format::LatentRecord record = check_mla_load(call);
  Tensor latent = call.new_result(call.latent_dim), rope = call.new_result(call.rope_dim);
  load(call, record, latent, rope);
  return {latent, rope};
}

// attend: gets a checked call; fills out, [tokens, q_heads, r] like q_latent, and lse, float32 [tokens, q_heads], both
// contiguous.
using AttendLatents = void(const MlaAttentionCall& call, const format::LatentRecord& record, const Tensor& out,
                           const Tensor& lse);
template <AttendLatents* attend>
std::tuple<Tensor, Tensor> mla_attention(const MlaAttentionCall& call) {
  const format::LatentRecord record = check_mla_attention(call);
  const int64_t tokens = call.tokens(), q_heads = call.q_heads();
  Tensor out = new_tensor(call.q_latent, {tokens, q_heads, call.latent_dim()}, call.q_latent.scalar_type());
  Tensor lse = new_tensor(call.q_latent, {tokens, q_heads}, ScalarType::Float);
  attend(call, record, out, lse);
  return {out, lse};
}

template <AttendLatents* attend>
void mla_attention_out(const MlaAttentionCall& call, const Tensor& out, const OptionalTensor& lse) {
  const format::LatentRecord record = check_mla_attention(call);
  check_mla_outputs(call, out, lse);
  const auto fresh = [&] { return new_tensor(call.q_latent, {call.tokens(), call.q_heads()}, ScalarType::Float); };
  attend(call, record, out, lse ? *lse : fresh());
}

}  // namespace turboquant
