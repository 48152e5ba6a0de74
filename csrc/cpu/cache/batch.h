// A batch of sequences, their pages and their exact tail, with checks of their values. The cache and the attention ops
// share it.
#pragma once

#include <vector>

#include "cpu/common/torch.h"

namespace turboquant::cpu {

// The sequences of a call: where their queries (new tokens) are, and the length of each sequence with them.
struct Batch {
  int64_t count = 0;
  std::vector<int64_t> query_begin;  // [count + 1], offsets into the call's tokens
  std::vector<int64_t> length;       // [count], all tokens including the new ones

  int64_t queries(int64_t s) const { return query_begin[s + 1] - query_begin[s]; }
  // Position in the sequence of its query i; negative for the padding of an empty sequence.
  int64_t position(int64_t s, int64_t i) const { return length[s] - queries(s) + i; }
};

inline std::vector<int64_t> checked_seq_lens(const Tensor& seq_lens, const Tensor& first) {
  check_constant(seq_lens, first, "seq_lens", ScalarType::Int, {-1});
  const int32_t* p = data_of<int32_t>(seq_lens);
  std::vector<int64_t> lengths(p, p + seq_lens.size(0));
  for (int64_t n : lengths) STD_TORCH_CHECK(n >= 0, "seq_lens holds ", n, ", supported: 0 and more");
  return lengths;
}

// seq_lens: int32 [seqs], cu_seqlens_q: int32 [seqs + 1] or absent (one new token per sequence)
inline Batch checked_batch(const Tensor& seq_lens, const OptionalTensor& cu_seqlens_q, const Tensor& first,
                           int64_t tokens) {
  Batch batch;
  batch.count = check_batch(seq_lens, cu_seqlens_q, first, tokens);
  batch.length = checked_seq_lens(seq_lens, first);
  if (!cu_seqlens_q) {
    for (int64_t s = 0; s <= batch.count; ++s) batch.query_begin.push_back(s);
    return batch;
  }
  const int32_t* cu = data_of<int32_t>(*cu_seqlens_q);
  batch.query_begin.assign(cu, cu + batch.count + 1);
  STD_TORCH_CHECK(cu[0] == 0 && cu[batch.count] <= tokens, "cu_seqlens_q must start at 0 and end at no more than the ",
                  tokens, " tokens of the call");
  for (int64_t s = 0; s < batch.count; ++s) {
    STD_TORCH_CHECK(batch.queries(s) >= 0, "cu_seqlens_q must not decrease");
    STD_TORCH_CHECK(batch.length[s] == 0 || batch.queries(s) <= batch.length[s], "sequence ", s, " has ",
                    batch.queries(s), " new tokens but a length of ", batch.length[s],
                    ": seq_lens counts the new tokens too");
  }
  return batch;
}

// The exact tail (docs/format.md section 9).
struct TailView {
  Tensor tensor;                               // [max_seqs, kv_heads, sink_tokens + ring, 2, d]
  std::vector<int64_t> slots;                  // [seqs], slot of each sequence, -1: it has no tail
  int64_t stride, rows, ring, sink_tokens, d;  // stride: from entry to entry, in elements

  // The key (kind 0) or value (1) of a row.
  void* vector(int64_t slot, int64_t head, int64_t row, int kind) const {
    return element(tensor, format::tail_offset(slot, stride, head, row, rows, d, kind));
  }
  int64_t row_of(int64_t position) const { return format::tail_row(position, sink_tokens, ring); }
};

// The slots in a checked tensor of int32 or int64, whose values are `stride` apart: -1 or below num_slots.
inline std::vector<int64_t> checked_slots(const Tensor& t, int64_t stride, const char* name, int64_t num_slots) {
  std::vector<int64_t> slots(static_cast<size_t>(t.numel()));
  const bool wide = t.scalar_type() == ScalarType::Long;
  const void* data = t.data_ptr();
  for (size_t i = 0; i < slots.size(); ++i) {
    const int64_t at = static_cast<int64_t>(i) * stride;
    slots[i] = wide ? static_cast<const int64_t*>(data)[at] : static_cast<const int32_t*>(data)[at];
    STD_TORCH_CHECK(slots[i] >= -1 && slots[i] < num_slots, name, " holds ", slots[i],
                    ", supported: ", range_text(-1, num_slots - 1));
  }
  return slots;
}

inline std::vector<int64_t> checked_tail_slots(const Tensor& tail_slots, int64_t max_seqs) {
  return checked_slots(tail_slots, entry_stride(tail_slots), "tail_slots", max_seqs);
}

inline TailView checked_tail(const Tensor& tail, const OptionalTensor& tail_slots, const Tensor& first, int64_t seqs,
                             int64_t kv_heads, int64_t d, int64_t sink_tokens) {
  check_tail(tail, tail_slots, first, seqs, kv_heads, d, sink_tokens);
  return {.tensor = tail,
          .slots = checked_tail_slots(*tail_slots, tail.size(0)),
          .stride = entry_stride(tail),
          .rows = tail.size(2),
          .ring = tail.size(2) - sink_tokens,
          .sink_tokens = sink_tokens,
          .d = d};
}

// Checks the page ids that keys [first_key, end_key) of sequence s are read from, which may be none. table: its row of
// max_pages ids
inline void check_pages(const int32_t* table, int64_t max_pages, int64_t num_pages, int page_size, int64_t s,
                        int64_t first_key, int64_t end_key) {
  STD_TORCH_CHECK(end_key <= max_pages * page_size, "sequence ", s, " has ", end_key,
                  " tokens but block_table has room for ", max_pages * page_size);
  for (int64_t p = first_key / page_size; first_key < end_key && p * page_size < end_key; ++p) {
    STD_TORCH_CHECK(table[p] >= 0 && table[p] < num_pages, "block_table names page ", table[p], " for sequence ", s,
                    ", supported: ", range_text(0, num_pages - 1));
  }
}

// The lengths of the sequences that a call loads, and checks of them and of their pages.
template <typename Call>
std::vector<int64_t> checked_loads(const Call& c, int page_size) {
  std::vector<int64_t> lengths = checked_seq_lens(c.seq_lens, c.cache);
  for (int64_t s = 0; s < c.seqs(); ++s) {
    STD_TORCH_CHECK(lengths[s] <= c.max_seq_len, "sequence ", s, " has ", lengths[s], " tokens, more than max_seq_len ",
                    c.max_seq_len);
    check_pages(data_of<int32_t>(c.block_table) + s * c.block_table.stride(0), c.max_pages(), c.cache.size(0),
                page_size, s, 0, lengths[s]);
  }
  return lengths;
}

}  // namespace turboquant::cpu
