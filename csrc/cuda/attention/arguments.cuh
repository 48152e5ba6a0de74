// A checked call as kernels take it (call.cuh). Host only.
#pragma once

#include <algorithm>
#include <optional>

#include "calls/attention.h"
#include "choices/device.h"
#include "cuda/attention/call.cuh"
#include "cuda/codec/arguments.cuh"
#include "cuda/common/torch.cuh"

namespace turboquant::cuda {

// What kernels ask of the addresses of a call with pages and an exact tail, beyond its checks.
template <typename Call>
void check_alignment(const Call& c) {
  check_aligned(c.cache, "cache");
  if (c.tail) check_aligned(*c.tail, "tail");
}

// Where even the smallest shape of a kernel is too large.
[[noreturn]] inline void refuse_head_dim(const char* op, int head_dim, const DeviceFacts& device) {
  STD_TORCH_CHECK(false, op, " of head_dim ", head_dim, " needs more shared memory than the ", device.shared_per_block,
                  " bytes that a block has on this device: supported there are up to 256");
}

// The batch of `c`, a call of attention or of latent attention.
template <typename Call>
void add_sequences(Attention& a, const Call& c, int page_size) {
  a.seq_lens = static_cast<const int32_t*>(c.seq_lens.data_ptr());
  a.query_begin = integers(c.cu_seqlens_q);
  a.block_table = static_cast<const int32_t*>(c.block_table.data_ptr());
  a.table_stride = c.block_table.stride(0);
  a.tokens = checked_int(c.tokens(), "the number of tokens");
  a.seqs = checked_int(c.seqs(), "the number of sequences");
  a.max_pages = checked_int(c.block_table.size(1), "the width of block_table");
  a.room = static_cast<int>(std::min<int64_t>(int64_t{a.max_pages} * page_size, INT32_MAX));  // as many as a length
  a.max_q_len = c.cu_seqlens_q ? static_cast<int>(std::min(c.max_q_len, c.tokens())) : 1;
}

// The exact tail of `c`, a call of either kind; rows: the tokens of a tail, sink_tokens + ring. Needs a.dtype.
template <typename Call>
void add_tail(Attention& a, const Call& c, int64_t rows) {
  a.tail = c.tail->data_ptr();
  a.tail_stride = checked_stride(*c.tail, "tail") / element_size(a.dtype);
  a.tail_slots = static_cast<const int32_t*>(c.tail_slots->data_ptr());
  a.wide_slots = c.tail_slots->scalar_type() == ScalarType::Long;
  a.slot_stride = entry_stride(*c.tail_slots) * (a.wide_slots ? 2 : 1);
  a.tail_valid = integers(c.tail_valid);
  a.max_seqs = checked_int(c.tail->size(0), "the number of tails");
  a.sink_tokens = checked_int(c.sink_tokens, "sink_tokens");
  a.ring = Divisor(checked_int(rows - c.sink_tokens, "the length of a tail"));
  a.recent_window = static_cast<int>(c.recent_window);  // at most one longer than the ring
}

// The device of the call is current. Lives until the kernels are launched: it owns the copies that rows at odd
// addresses need.
class AttentionArguments {
 public:
  AttentionArguments(const AttentionCall& c, const format::Record& record)
      : q_(c.q), key_signs_(c.key_signs), value_signs_(c.value_signs), constants_(c.center) {
    add_queries(c);
    add_sequences(call, c, record.page_size);
    // positions are subtracted from a window, so it is no longer than the longest sequence
    const int64_t room = int64_t{call.max_pages} * record.page_size + (c.k_new ? call.max_q_len : 0);
    call.sliding_window = static_cast<int>(std::min({c.sliding_window, room, int64_t{INT32_MAX}}));
    add_pages(c, record);
    if (c.tail) add_tail(call, c, c.tail->size(2));
    if (c.k_new) add_new_tokens(c);
  }
  AttentionArguments(const AttentionArguments&) = delete;

  Attention call{};  // without results

 private:
  void add_queries(const AttentionCall& c) {
    Attention& a = call;
    a.q = q_.data();
    a.q_token_stride = q_.token_stride(), a.q_head_stride = q_.head_stride();
    a.dtype = dtype_of(c.q);
    a.q_heads = checked_int(c.q_heads(), "the number of query heads");
    a.kv_heads = checked_int(c.kv_heads(), "the number of KV heads");
    a.group = a.q_heads / a.kv_heads;
    a.softmax_scale = static_cast<float>(c.softmax_scale);
    a.soft_cap = static_cast<float>(c.soft_cap);
    a.sink_logits = c.sink_logits ? static_cast<const float*>(c.sink_logits->data_ptr()) : nullptr;
  }

  void add_pages(const AttentionCall& c, const format::Record& record) {
    Attention& a = call;
    a.pages = bytes_of(c.cache);
    a.num_pages = c.cache.size(0);
    a.page_stride = checked_stride(c.cache, "cache");
    a.record = record;
    a.key_signs = key_signs_.data();
    a.value_signs = value_signs_.data();
    a.key_levels = levels_data(c.key_levels);
    a.value_levels = levels_data(c.value_levels);
    a.channels = channels_of(c.center, constants_.data(), c.kv_heads(), c.head_dim());
  }

  void add_new_tokens(const AttentionCall& c) {
    Attention& a = call;
    keys_.emplace(*c.k_new), values_.emplace(*c.v_new);
    a.new_keys = keys_->data(), a.new_values = values_->data();
    a.new_key_token_stride = keys_->token_stride(), a.new_key_head_stride = keys_->head_stride();
    a.new_value_token_stride = values_->token_stride(), a.new_value_head_stride = values_->head_stride();
  }

  HeadVectors q_;
  Constant<float> key_signs_, value_signs_, constants_;
  std::optional<HeadVectors> keys_, values_;
};

}  // namespace turboquant::cuda
