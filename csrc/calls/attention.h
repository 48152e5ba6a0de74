// A call of paged_attention: its arguments, their checks, and the two ops that a backend makes of its `attend`.
#pragma once

#include <functional>
#include <tuple>

#include "calls/boxed.h"
#include "checks.h"
#include "memory.h"

namespace turboquant {

// The arguments of paged_attention in the order of its schema (csrc/ops.cpp).
struct AttentionCall {
  Tensor q;                                 // [tokens, q_heads, d], stride 1 in d
  Tensor cache;                             // uint8 [num_pages, kv_heads, record_bytes], any stride of pages
  Tensor block_table;                       // int32 [seqs, max_pages], stride 1 in a row
  Tensor seq_lens;                          // int32 [seqs], new tokens included
  Tensor key_signs, value_signs;            // float32 [d]
  OptionalTensor key_levels, value_levels;  // int8 [2^bits]; absent: the uniform grid
  OptionalTensor center;                    // float32 [kv_heads, d] or [3, kv_heads, d]
  int64_t page_size, key_bits, value_bits;
  double softmax_scale;
  OptionalTensor cu_seqlens_q;  // int32 [seqs + 1]; absent: one query per sequence
  int64_t max_q_len;
  OptionalTensor tail;        // [max_seqs, kv_heads, sink_tokens + ring, 2, d] of q's dtype, any stride of entries
  OptionalTensor tail_slots;  // int32 or int64 [seqs], any stride, -1: this sequence has none
  OptionalTensor tail_valid;  // int32 [max_seqs, 2]
  int64_t sink_tokens, recent_window, sliding_window;
  double soft_cap;
  OptionalTensor sink_logits;   // float32 [q_heads]
  OptionalTensor k_new, v_new;  // [tokens, kv_heads, d] of q's dtype, stride 1 in d; both or neither

  int64_t tokens() const { return q.size(0); }
  int64_t q_heads() const { return q.size(1); }
  int64_t head_dim() const { return q.size(2); }
  int64_t kv_heads() const { return cache.size(1); }
  int64_t seqs() const { return seq_lens.size(0); }
};

constexpr double kMaxSoftCap = 1000;

// The keys and values of the call's own tokens: token t of q is token t of them.
inline void check_new_tokens(const AttentionCall& c) {
  STD_TORCH_CHECK(c.k_new.has_value() == c.v_new.has_value(), "k_new and v_new come together or not at all");
  if (!c.k_new) return;
  const auto check = [&](const Tensor& t, const char* name) {
    check_device(t, c.q, name);
    check_dtype(t, name, {c.q.scalar_type()});
    check_shape(t, name, {c.tokens(), c.kv_heads(), c.head_dim()});
    check_unit_last_stride(t, name);
  };
  check(*c.k_new, "k_new");
  check(*c.v_new, "v_new");
}

// Checks everything that can be checked without reading values. Returns the geometry of the cache's records.
inline format::Record check_attention(const AttentionCall& c) {
  const Tensor& q = c.q;
  check_float(q, "q");
  check_shape(q, "q", {-1, -1, -1});
  check_unit_last_stride(q, "q");
  const int64_t d = c.head_dim();
  const format::Record record = check_record(d, c.page_size, c.key_bits, c.value_bits);
  check_cache(c.cache, q, record);
  const int64_t kv_heads = c.kv_heads();
  STD_TORCH_CHECK(kv_heads > 0 && c.q_heads() % kv_heads == 0, "q has ", c.q_heads(), " heads and the cache ", kv_heads,
                  " KV heads: supported are multiples");
  check_constant(c.key_signs, q, "key_signs", ScalarType::Float, {d});
  check_constant(c.value_signs, q, "value_signs", ScalarType::Float, {d});
  check_levels(c.key_levels, q, c.key_bits, "key_levels");
  check_levels(c.value_levels, q, c.value_bits, "value_levels");
  check_center(c.center, q, kv_heads, d);
  if (c.sink_logits) check_constant(*c.sink_logits, q, "sink_logits", ScalarType::Float, {c.q_heads()});
  STD_TORCH_CHECK(c.max_q_len >= 1, "max_q_len is ", c.max_q_len, ", supported: 1 and more");
  STD_TORCH_CHECK(c.sliding_window >= 0, "sliding_window is ", c.sliding_window, ", supported: 0 (none) and more");
  STD_TORCH_CHECK(c.recent_window >= 0, "recent_window is ", c.recent_window, ", supported: 0 and more");
  // It is used as float32. Kernels divide by the cap, and lose digits where it is far above the scores.
  STD_TORCH_CHECK(c.soft_cap == 0 || (c.soft_cap >= FLT_MIN && c.soft_cap <= kMaxSoftCap), "soft_cap is ", c.soft_cap,
                  ", supported: 0 (none), or ", FLT_MIN, " to ", kMaxSoftCap);
  check_softmax_scale(c.softmax_scale);
  check_new_tokens(c);
  const int64_t seqs = check_batch(c.seq_lens, c.cu_seqlens_q, q, c.tokens());
  check_block_table(c.block_table, q, seqs);
  if (c.tail) {
    check_tail(*c.tail, c.tail_slots, q, seqs, kv_heads, d, c.sink_tokens);
    check_ring(c.tail->size(2) - c.sink_tokens, c.recent_window, c.max_q_len, c.k_new.has_value(), "k_new");
    if (c.tail_valid) check_constant(*c.tail_valid, q, "tail_valid", ScalarType::Int, {c.tail->size(0), 2});
  }
  return record;
}

// Adds what attention reads and storing does not, beside the queries.
inline void add_read(Arguments& memory, const AttentionCall& c) {
  memory.reads(c.block_table, "block_table");
  memory.reads(c.tail_valid, "tail_valid");
  memory.reads(c.sink_logits, "sink_logits");
}

// Adds what both read, or what storing writes.
inline void add_stored(Arguments& memory, const AttentionCall& c) {
  memory.reads(c.cache, "cache");
  memory.reads(c.seq_lens, "seq_lens");
  memory.reads(c.key_signs, "key_signs");
  memory.reads(c.value_signs, "value_signs");
  memory.reads(c.key_levels, "key_levels");
  memory.reads(c.value_levels, "value_levels");
  memory.reads(c.center, "center");
  memory.reads(c.cu_seqlens_q, "cu_seqlens_q");
  memory.reads(c.tail, "tail");
  memory.reads(c.tail_slots, "tail_slots");
  memory.reads(c.k_new, "k_new");
  memory.reads(c.v_new, "v_new");
}

// Adds what attention writes, and what it reads and storing does not.
inline void add_attention(Arguments& memory, const AttentionCall& c, const Tensor& out, const OptionalTensor& lse) {
  memory.writes(out, "out");
  memory.writes(lse, "lse");
  // out may be q: a row of queries has only its own row of out, which is written when nobody reads it any more
  if (out.data_ptr() != c.q.data_ptr() || !c.q.is_contiguous()) memory.reads(c.q, "q");
  add_read(memory, c);
}

// Checks the tensors that the _out variant writes.
inline void check_attention_outputs(const AttentionCall& c, const Tensor& out, const OptionalTensor& lse) {
  check_out_and_lse(out, lse, c.q, 4);
  Arguments memory;
  add_attention(memory, c, out, lse);
  add_stored(memory, c);
  memory.check();
}

// Checks the tensors of paged_mass beside those of the call.
inline void check_mass(const AttentionCall& c, const Tensor& lse, const Tensor& mass) {
  check_constant(lse, c.q, "lse", ScalarType::Float, {c.tokens(), c.q_heads()});
  check_constant(mass, c.q, "mass", ScalarType::Float, {c.seqs(), c.kv_heads(), -1});
  Arguments memory;
  memory.writes(mass, "mass");
  memory.reads(lse, "lse");
  memory.reads(c.q, "q");
  add_read(memory, c);
  add_stored(memory, c);
  memory.check();
}

// Stores the keys and values of a checked call of cache_store; empty: there are none.
using Store = std::function<void()>;

// The ops of a backend, for boxed() (calls/boxed.h): with new tensors for the results, or with given ones.
// attend: gets a checked call; fills out, [tokens, q_heads, d] like q, and lse, float32 [tokens, q_heads], both
// contiguous. Calls `store` first, when nothing can be wrong any more.
using Attend = void(const AttentionCall& call, const format::Record& record, const Tensor& out, const Tensor& lse,
                    const Store& store);

inline Tensor new_lse(const AttentionCall& call) {
  return new_tensor(call.q, {call.tokens(), call.q_heads()}, ScalarType::Float);
}

template <Attend* attend>
std::tuple<Tensor, Tensor> paged_attention(const AttentionCall& call) {
  const format::Record record = check_attention(call);
  Tensor out = new_tensor(call.q, {call.tokens(), call.q_heads(), call.head_dim()}, call.q.scalar_type());
  Tensor lse = new_lse(call);
  attend(call, record, out, lse, {});
  return {out, lse};
}

template <Attend* attend>
void paged_attention_out(const AttentionCall& call, const Tensor& out, const OptionalTensor& lse) {
  const format::Record record = check_attention(call);
  check_attention_outputs(call, out, lse);
  attend(call, record, out, lse ? *lse : new_lse(call), {});
}

// add_mass: gets a checked call; adds the weights that its queries give each key to mass, float32 [seqs, kv_heads,
// keys]. lse: float32 [tokens, q_heads]. Values are not part of it.
using AddMass = void(const AttentionCall& call, const format::Record& record, const Tensor& lse, const Tensor& mass);

template <AddMass* add_mass>
void paged_mass(const AttentionCall& call, const Tensor& lse, const Tensor& mass) {
  const format::Record record = check_attention(call);
  check_mass(call, lse, mass);
  add_mass(call, record, lse, mass);
}

}  // namespace turboquant
