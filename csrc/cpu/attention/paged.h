// A call over packed pages: its queries, its exact keys, and where its codes are.
#pragma once

#include <optional>

#include "calls/attention.h"
#include "cpu/attention/panels.h"
#include "cpu/attention/spans.h"
#include "cpu/cache/batch.h"
#include "cpu/codec/codebook.h"
#include "cpu/common/torch.h"
#include "cpu/common/vector.h"

namespace turboquant::cpu {

// A checked call, as PreparedRows and SpanAttention take it (spans.h). It cannot be copied: `keys` is part of `paged`.
struct PagedAttention {
  const AttentionCall& call;
  Windows windows;
  int64_t q_heads, kv_heads, key_dim, value_dim;
  format::Split split;
  const float* key_signs;     // [d]
  const float* value_signs;   // [d]
  format::Channels channels;  // [kv_heads, d]
  const float* sink_logits;   // [q_heads] or null
  std::optional<TailView> tail;
  PagedKeys paged;
  AttendedKeys& keys = paged.attended;
  Layout layout;
  int max_key_level;
  float softmax_scale;

  PagedAttention(const AttentionCall& c, const format::Record& record)
      : call(c), q_heads(c.q_heads()), kv_heads(c.kv_heads()), key_dim(c.head_dim()), value_dim(c.head_dim()),
        split(format::split_dim(c.head_dim())), layout(key_layout(record)),
        softmax_scale(static_cast<float>(c.softmax_scale)) {
    windows.batch = checked_batch(c.seq_lens, c.cu_seqlens_q, c.q, c.tokens());
    check_max_q_len(windows.batch, c.max_q_len);
    if (c.tail) {
      tail = checked_tail(*c.tail, c.tail_slots, c.q, windows.batch.count, kv_heads, value_dim, c.sink_tokens);
      windows.tail_slots = tail->slots;
      windows.tail_ring = tail->ring;
      windows.sink_tokens = tail->sink_tokens;
      windows.tail_valid = data_of<int32_t>(c.tail_valid);
    }
    windows.recent_window = c.recent_window;
    windows.sliding_window = std::min<int64_t>(c.sliding_window, INT32_MAX);  // no sequence is longer
    windows.own = c.k_new.has_value();
    key_signs = checked_signs(c.key_signs, "key_signs");
    value_signs = checked_signs(c.value_signs, "value_signs");
    channels = channels_of(c.center, data_of<float>(c.center), kv_heads, value_dim);
    sink_logits = data_of<float>(c.sink_logits);
    const Levels key_levels(record.key_width(), checked_levels(c.key_levels, c.q, c.key_bits, "key_levels"));
    const Levels value_levels(record.value_width(), checked_levels(c.value_levels, c.q, c.value_bits, "value_levels"));
    max_key_level = greatest_level(record.key_width(), key_levels.of);
    paged.record = record;
    paged.pages = data_of<uint8_t>(c.cache);
    paged.page_stride = entry_stride(c.cache);
    keys.head_dim = record.head_dim;
    keys.panels = panel_map(record).get();
    std::copy_n(key_levels.of, kTableLevels, keys.key_levels);
    std::copy_n(value_levels.of, kTableLevels, keys.value_levels);
    keys.soft_cap = static_cast<float>(c.soft_cap);
    keys.rope_dim = 0;
    keys.rope_factor = 0;
    check_pages_of(windows, data_of<int32_t>(c.block_table), c.block_table.stride(0), c.block_table.size(1),
                   c.cache.size(0), record.page_size);
  }
  PagedAttention(const PagedAttention&) = delete;

  void load_query(int64_t token, int64_t head, float* to) const {
    const Tensor& q = call.q;
    to_float(q, token * q.stride(0) + head * q.stride(1), value_dim, to);
  }
  float rotate_query(int64_t kv_head, const float* query, float* to) const {
    const format::Channels of_head = channels.of_head(kv_head, value_dim);
    std::copy_n(query, value_dim, to);
    if (of_head.inverse) multiply(to, of_head.inverse, value_dim);
    rotate(to, key_signs, split);
    return of_head.center ? dot(query, of_head.center, value_dim) : 0;
  }

  int64_t scratch_bytes() const { return kernels().attend_scratch_bytes(paged); }
  void attend(int64_t sequence, int64_t kv_head, int64_t begin, int64_t end, const QueryRows& rows,
              const PartialRows& out, void* scratch) const {
    const int32_t* table = data_of<int32_t>(call.block_table) + sequence * call.block_table.stride(0);
    kernels().attend_pages(paged, table, kv_head, begin, end, rows, out, scratch);
  }

  ExactKeys exact_keys(int64_t sequence, int64_t kv_head) const {
    ExactKeys exact{};
    exact.tail_row = 2 * value_dim, exact.tail_value_at = value_dim;
    exact.new_begin = windows.new_begin(sequence);
    exact.dtype = dtype_of(call.q);
    exact.key_dim = exact.value_dim = value_dim;
    exact.ring = 1;
    if (windows.has_tail(sequence)) {
      exact.tail = tail->vector(tail->slots[sequence], kv_head, 0, 0);
      exact.sink_tokens = tail->sink_tokens, exact.ring = tail->ring;
    }
    if (windows.own) {
      const Tensor &k = *call.k_new, &v = *call.v_new;
      const int64_t token = windows.batch.query_begin[sequence];
      exact.new_keys = element(k, token * k.stride(0) + kv_head * k.stride(1));
      exact.new_values = element(v, token * v.stride(0) + kv_head * v.stride(1));
      exact.new_key_stride = k.stride(0), exact.new_value_stride = v.stride(0);
    }
    return exact;
  }
  void rotate_sum(float, float* sum) const { rotate_back(sum, value_signs, split); }
};

}  // namespace turboquant::cpu
