// cache_store, cache_load: paged, packed keys and values (docs/format.md section 8) and the exact tail (section 9).
#include "cache.h"

namespace turboquant::cpu {
namespace {

// Where the call's tokens go: pages by slot, tail rows by sequence and position. Everything is checked before anything is written.
struct Destinations {
  std::vector<int64_t> slot;      // [tokens], page * page_size + offset, -1 none
  std::vector<int64_t> sequence;  // [tokens], -1 when the token does not enter the tail
  std::vector<int64_t> position;  // [tokens]
};

Destinations checked_destinations(const Tensor& slot_mapping, const Tensor& k, int64_t num_slots) {
  const int64_t tokens = k.size(0);
  check_constant(slot_mapping, k, "slot_mapping", ScalarType::Long, {tokens});
  const int64_t* p = static_cast<const int64_t*>(slot_mapping.data_ptr());
  for (int64_t i = 0; i < tokens; ++i) {
    STD_TORCH_CHECK(p[i] >= -1 && p[i] < num_slots, "slot_mapping holds ", p[i], ", supported: -1 to ", num_slots - 1);
  }
  return {{p, p + tokens}, std::vector<int64_t>(tokens, -1), std::vector<int64_t>(tokens, -1)};
}

// Marks the tokens that enter the tail: sinks, and the last `ring` of each sequence.
void place_in_tail(Destinations& to, const Batch& batch, const TailView& tail) {
  for (int64_t s = 0; s < batch.count; ++s) {
    if (tail.slots[s] < 0) continue;
    for (int64_t i = 0; i < batch.queries(s); ++i) {
      const int64_t token = batch.query_begin[s] + i, position = batch.position(s, i);
      const bool kept = format::tail_keeps(position, batch.length[s], tail.sink_tokens, tail.ring);
      if (position < 0 || to.slot[token] < 0 || !kept) continue;
      to.sequence[token] = s;
      to.position[token] = position;
    }
  }
}

// k, v: [tokens, kv_heads, d]; cache: uint8 [num_pages, kv_heads, record_bytes], written; slot_mapping: int64 [tokens];
// center: float32 [kv_heads, d] or [3, kv_heads, d]; tail: [max_seqs, kv_heads, rows, 2, d], written
void cache_store(const Tensor& k, const Tensor& v, const Tensor& cache, const Tensor& slot_mapping,
                 const Tensor& key_signs, const Tensor& value_signs, const OptionalTensor& key_levels,
                 const OptionalTensor& value_levels, const Tensor& key_steps, const Tensor& value_steps,
                 const OptionalTensor& center, int64_t page_size, int64_t key_bits, int64_t value_bits,
                 int64_t key_scale_mode, int64_t value_scale_mode, const OptionalTensor& tail,
                 const OptionalTensor& tail_slots, const OptionalTensor& seq_lens, const OptionalTensor& cu_seqlens_q,
                 int64_t sink_tokens) {
  check_kv(k, v);
  const int64_t tokens = k.size(0), kv_heads = k.size(1), d = k.size(2);
  const format::Record record = check_record(d, page_size, key_bits, value_bits);
  check_cache(cache, k, record);
  STD_TORCH_CHECK(cache.size(1) == kv_heads, "cache has ", cache.size(1), " KV heads but k has ", kv_heads);
  check_constant(key_signs, k, "key_signs", ScalarType::Float, {d});
  check_constant(value_signs, k, "value_signs", ScalarType::Float, {d});
  check_center(center, k, kv_heads, d);
  check_scale_mode(key_scale_mode, "key_scale_mode");
  check_scale_mode(value_scale_mode, "value_scale_mode");
  const Codebook key_book = checked_codebook(k, key_levels, key_steps, key_bits, "key_levels", "key_steps");
  const Codebook value_book = checked_codebook(k, value_levels, value_steps, value_bits, "value_levels", "value_steps");
  Destinations to = checked_destinations(slot_mapping, k, cache.size(0) * page_size);
  std::optional<TailView> ring;
  if (tail) {
    STD_TORCH_CHECK(seq_lens.has_value(), "tail needs seq_lens");
    const Batch batch = checked_batch(*seq_lens, cu_seqlens_q, k, tokens);
    ring = checked_tail(*tail, tail_slots, k, batch.count, kv_heads, d, sink_tokens);
    place_in_tail(to, batch, *ring);
  }

  const StoredTokens stored{record,
                            {k.data_ptr(), k.stride(0), k.stride(1), static_cast<const float*>(key_signs.data_ptr()),
                             key_book.quantiser(d, key_scale_mode)},
                            {v.data_ptr(), v.stride(0), v.stride(1), static_cast<const float*>(value_signs.data_ptr()),
                             value_book.quantiser(d, value_scale_mode)},
                            channels_of(center, floats_of(center), kv_heads, d),
                            dtype_index(k.scalar_type()),
                            static_cast<uint8_t*>(cache.data_ptr()),
                            kv_heads,
                            to.slot.data()};
  const auto copy_to_tail = [&](int64_t token, int64_t head) {
    const int64_t sequence = to.sequence[token];
    if (sequence < 0) return;
    const auto copy = [&](const Tensor& x, int kind) {
      const int64_t row = ring->offset(ring->slots[sequence], head, to.position[token], kind);
      std::memcpy(element(ring->tensor, row), element(x, token * x.stride(0) + head * x.stride(1)),
                  d * k.element_size());
    };
    copy(k, 0);
    copy(v, 1);
  };
  parallel_for(tokens * kv_heads, row_grain(d, 32), [&](int64_t begin, int64_t end) {
    kernels().store_tokens(stored, begin, end);
    for (int64_t item = begin; ring && item < end; ++item) copy_to_tail(item / kv_heads, item % kv_heads);
  });
}

// cache: uint8 [num_pages, kv_heads, record_bytes], block_table: int32 [seqs, max_pages], seq_lens: int32 [seqs]
// -> k, v: [seqs, max_seq_len, kv_heads, head_dim] of `dtype`, zero from seq_len on
std::tuple<Tensor, Tensor> cache_load(const Tensor& cache, const Tensor& block_table, const Tensor& seq_lens,
                                      const Tensor& key_signs, const Tensor& value_signs,
                                      const OptionalTensor& key_levels, const OptionalTensor& value_levels,
                                      const OptionalTensor& center, int64_t head_dim, int64_t page_size,
                                      int64_t key_bits, int64_t value_bits, int64_t max_seq_len, ScalarType dtype) {
  const format::Record record = check_record(head_dim, page_size, key_bits, value_bits);
  check_cache(cache, cache, record);
  check_output_dtype(dtype);
  const int64_t kv_heads = cache.size(1), d = head_dim;
  check_constant(key_signs, cache, "key_signs", ScalarType::Float, {d});
  check_constant(value_signs, cache, "value_signs", ScalarType::Float, {d});
  check_center(center, cache, kv_heads, d);
  STD_TORCH_CHECK(max_seq_len >= 0, "max_seq_len is ", max_seq_len, ", supported: 0 and more");
  const std::vector<int64_t> lengths = checked_seq_lens(seq_lens, cache);
  const int64_t seqs = seq_lens.size(0);
  check_constant(block_table, cache, "block_table", ScalarType::Int, {seqs, -1});
  const int32_t* table = static_cast<const int32_t*>(block_table.data_ptr());
  const int64_t max_pages = block_table.size(1);
  for (int64_t s = 0; s < seqs; ++s) {
    STD_TORCH_CHECK(lengths[s] <= max_seq_len, "sequence ", s, " has ", lengths[s], " tokens, more than max_seq_len ",
                    max_seq_len);
    check_pages(table, max_pages, cache.size(0), record.page_size, s, 0, lengths[s]);
  }
  const Levels key_table(record.key_bits, checked_levels(key_levels, cache, key_bits, "key_levels"));
  const Levels value_table(record.value_bits, checked_levels(value_levels, cache, value_bits, "value_levels"));

  Tensor k = empty_like_shape(cache, {seqs, max_seq_len, kv_heads, d}, dtype);
  Tensor v = empty_like_shape(cache, {seqs, max_seq_len, kv_heads, d}, dtype);
  const LoadedTokens loaded{record,
                            static_cast<const uint8_t*>(cache.data_ptr()),
                            table,
                            lengths.data(),
                            kv_heads,
                            max_pages,
                            max_seq_len,
                            key_table.of,
                            value_table.of,
                            static_cast<const float*>(key_signs.data_ptr()),
                            static_cast<const float*>(value_signs.data_ptr()),
                            channels_of(center, floats_of(center), kv_heads, d),
                            dtype_index(dtype)};
  parallel_for(seqs * max_seq_len * kv_heads, row_grain(d, 8), [&](int64_t begin, int64_t end) {
    kernels().load_tokens(loaded, begin, end, k.data_ptr(), v.data_ptr());
  });
  return {k, v};
}

}  // namespace
}  // namespace turboquant::cpu

STABLE_TORCH_LIBRARY_IMPL(turboquant, CPU, m) {
  m.impl("cache_store", TORCH_BOX(&turboquant::cpu::cache_store));
  m.impl("cache_load", TORCH_BOX(&turboquant::cpu::cache_load));
}
