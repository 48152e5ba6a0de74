// cache_store, cache_load: paged, packed keys and values (docs/format.md section 8) and the exact tail (section 9).
#include "cpu/common/batch.h"

#include "calls/cache.h"

namespace turboquant::cpu {
namespace {

// Where the call's tokens go: pages by slot, tail rows by sequence and position. Everything is checked before anything is written.
struct Destinations {
  std::vector<int64_t> slot;      // [tokens], page * page_size + offset, -1 none
  std::vector<int64_t> sequence;  // [tokens], -1 when the token does not enter the tail
  std::vector<int64_t> position;  // [tokens]
};

Destinations checked_destinations(const Tensor& slot_mapping, const Tensor& k, int64_t tokens, int64_t num_slots) {
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

// k or v, [tokens, heads, d] or [batch, heads, new, d]: itself, or a copy whose tokens lie at equal distances.
struct HeadRows {
  Tensor tensor;
  TokenRows rows;

  explicit HeadRows(const Tensor& t) : tensor(t), rows(t) {
    if (rows.even) return;
    const Tensor by_token = torch::stable::transpose(t, 1, 2);
    tensor = empty_like_shape(t, leading_shape(by_token, 0, {}), t.scalar_type());
    torch::stable::copy_(tensor, by_token);
    rows.token_stride = rows.heads * rows.d, rows.head_stride = rows.d;
  }
  const void* of(int64_t token, int64_t head) const {
    return element(tensor, token * rows.token_stride + head * rows.head_stride);
  }
  StoredTokens::Kind vectors(const Tensor& signs, const Quantiser& quantiser) const {
    return {tensor.data_ptr(), rows.token_stride, rows.head_stride, static_cast<const float*>(signs.data_ptr()),
            quantiser};
  }
};

// A layer's keys and values, checked, and where they go.
class LayerStore {
 public:
  LayerStore(const StoreLayer& layer, const StoreCall& call)
      : record_(layer.record(call)), keys_(layer.k), values_(layer.v), cache_(layer.cache), key_signs_(layer.key_signs),
        value_signs_(layer.value_signs), center_(layer.center), call_(call),
        key_book_(checked_codebook(layer.k, call.key_levels, call.key_steps, call.key_bits, "key_levels", "key_steps")),
        value_book_(checked_codebook(layer.k, call.value_levels, call.value_steps, call.value_bits, "value_levels",
                                     "value_steps")) {
    const TokenRows& rows = keys_.rows;
    check_cache(cache_, layer.k, record_);
    layer.check(call, rows);
    to_ = checked_destinations(call.slot_mapping, layer.k, rows.tokens, cache_.size(0) * call.page_size);
    if (!layer.tail) return;
    const Batch batch = checked_batch(*call.seq_lens, call.cu_seqlens_q, layer.k, rows.tokens);
    ring_ = checked_tail(*layer.tail, call.tail_slots, layer.k, batch.count, rows.heads, rows.d, call.sink_tokens);
    place_in_tail(to_, batch, *ring_);
  }

  // On torch's threads, one layer after the other.
  static void run(const std::vector<LayerStore>& layers, const char*) {
    for (const LayerStore& layer : layers) layer.run();
  }

 private:
  void run() const {
    const int64_t kv_heads = keys_.rows.heads, d = keys_.rows.d, bytes = d * keys_.tensor.element_size();
    const StoredTokens stored{record_,
                              keys_.vectors(key_signs_, key_book_.quantiser(d, call_.key_scale_mode)),
                              values_.vectors(value_signs_, value_book_.quantiser(d, call_.value_scale_mode)),
                              channels_of(center_, floats_of(center_), kv_heads, d),
                              dtype_index(keys_.tensor.scalar_type()),
                              static_cast<uint8_t*>(cache_.data_ptr()),
                              kv_heads,
                              to_.slot.data()};
    const auto copy_to_tail = [&](int64_t token, int64_t head) {
      const int64_t sequence = to_.sequence[token];
      if (sequence < 0) return;
      const auto row = [&](int kind) {
        return element(ring_->tensor, ring_->offset(ring_->slots[sequence], head, to_.position[token], kind));
      };
      std::memcpy(row(0), keys_.of(token, head), bytes);
      std::memcpy(row(1), values_.of(token, head), bytes);
    };
    parallel_for(keys_.rows.tokens * kv_heads, row_grain(d, 32), [&](int64_t begin, int64_t end) {
      kernels().store_tokens(stored, begin, end);
      for (int64_t item = begin; ring_ && item < end; ++item) copy_to_tail(item / kv_heads, item % kv_heads);
    });
  }

  format::Record record_;
  HeadRows keys_, values_;
  Tensor cache_, key_signs_, value_signs_;
  OptionalTensor center_;
  const StoreCall& call_;
  Codebook key_book_, value_book_;
  Destinations to_;
  std::optional<TailView> ring_;
};

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
  m.impl("cache_store", TORCH_BOX(&turboquant::cache_store<turboquant::cpu::LayerStore>));
  m.impl("cache_store_layers", TORCH_BOX(&turboquant::cache_store_layers<turboquant::cpu::LayerStore>));
  m.impl("cache_load", TORCH_BOX(&turboquant::cpu::cache_load));
}
