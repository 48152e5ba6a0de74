// cache_store, cache_load: paged, packed keys and values (docs/format.md section 8) and the exact tail (section 9).
#include "cpu/cache.h"

#include <optional>

#include "calls/load.h"
#include "cpu/cache/batch.h"
#include "cpu/cache/destinations.h"
#include "cpu/codec/codebook.h"
#include "cpu/common/torch.h"

namespace turboquant::cpu {
namespace {

// The keys and values of a layer, checked, and their destinations.
class LayerStore {
 public:
  template <typename Call>
  LayerStore(const StoreLayer& layer, const Call& call)
      : record_(check_store_record(layer, call)), keys_(layer.k, 1), values_(layer.v, 1), cache_(layer.cache),
        key_signs_(layer.key_signs), value_signs_(layer.value_signs), center_(layer.center),
        key_mode_(static_cast<format::ScaleMode>(call.key_scale_mode)),
        value_mode_(static_cast<format::ScaleMode>(call.value_scale_mode)),
        key_book_(checked_codebook(layer.k, call.key_levels, call.key_steps, call.key_bits, "key_levels", "key_steps")),
        value_book_(checked_codebook(layer.k, call.value_levels, call.value_steps, call.value_bits, "value_levels",
                                     "value_steps")) {
    const TokenRows& rows = keys_.rows;
    check_store(layer, call, record_, rows);
    checked_signs(key_signs_, "key_signs");
    checked_signs(value_signs_, "value_signs");
    const int64_t pages = std::min(cache_.size(0), INT64_MAX / call.page_size);  // of no heads there can be many
    to_ = checked_destinations(call.slot_mapping, rows.tokens, pages * call.page_size);
    if (!layer.tail) return;
    const Batch batch = checked_batch(*call.seq_lens, call.cu_seqlens_q, layer.k, rows.tokens);
    tail_ = checked_tail(*layer.tail, call.tail_slots, layer.k, batch.count, rows.heads, rows.d, call.sink_tokens);
    enter_tail(to_, batch, tail_->slots, tail_->sink_tokens, tail_->ring);
  }

  // On torch's threads, one layer after the other.
  static void run(const std::vector<LayerStore>& layers, const char*) {
    for (const LayerStore& layer : layers) layer.run();
  }

 private:
  void run() const {
    const int64_t kv_heads = keys_.rows.heads, d = keys_.rows.d, bytes = d * keys_.tensor.element_size();
    const StoredTokens stored{.record = record_,
                              .keys = vectors(keys_, key_signs_, key_book_.quantiser(d, key_mode_)),
                              .values = vectors(values_, value_signs_, value_book_.quantiser(d, value_mode_)),
                              .channels = channels_of(center_, data_of<float>(center_), kv_heads, d),
                              .dtype = dtype_of(keys_.tensor),
                              .pages = data_of<uint8_t>(cache_),
                              .page_stride = entry_stride(cache_),
                              .kv_heads = kv_heads,
                              .slots = to_.slot.data()};
    const auto copy_to_tail = [&](int64_t token, int64_t head) {
      const int64_t sequence = to_.sequence[token];
      if (sequence < 0) return;
      const int64_t slot = tail_->slots[sequence], row = tail_->row_of(to_.position[token]);
      std::memcpy(tail_->vector(slot, head, row, 0), vector(keys_, token, head), bytes);
      std::memcpy(tail_->vector(slot, head, row, 1), vector(values_, token, head), bytes);
    };
    const int64_t work = 8 + 4 * (stored.keys.quantiser.num_steps + stored.values.quantiser.num_steps);
    parallel_for(keys_.rows.tokens * kv_heads, row_grain(d, work), [&](int64_t begin, int64_t end) {
      kernels().store_tokens(stored, begin, end);
      for (int64_t item = begin; tail_ && item < end; ++item) copy_to_tail(item / kv_heads, item % kv_heads);
    });
  }

  static StoredTokens::Kind vectors(const HeadRows& x, const Tensor& signs, const Quantiser& quantiser) {
    return {.x = x.tensor.data_ptr(),
            .token_stride = x.rows.token_stride,
            .head_stride = x.rows.head_stride,
            .signs = data_of<float>(signs),
            .quantiser = quantiser};
  }
  static const void* vector(const HeadRows& x, int64_t token, int64_t head) {
    return element(x.tensor, token * x.rows.token_stride + head * x.rows.head_stride);
  }

  format::Record record_;
  HeadRows keys_, values_;
  Tensor cache_, key_signs_, value_signs_;
  OptionalTensor center_;
  format::ScaleMode key_mode_, value_mode_;
  Codebook key_book_, value_book_;
  Destinations to_;
  std::optional<TailView> tail_;
};

// -> k, v: [seqs, max_seq_len, kv_heads, head_dim], zero from seq_len on
std::tuple<Tensor, Tensor> cache_load(const LoadCall& c) {
  const format::Record record = check_load(c);
  const std::vector<int64_t> lengths = checked_loads(c, record.page_size);
  const Levels key_levels(record.key_width(), checked_levels(c.key_levels, c.cache, c.key_bits, "key_levels"));
  const Levels value_levels(record.value_width(),
                            checked_levels(c.value_levels, c.cache, c.value_bits, "value_levels"));

  Tensor k = c.new_result(), v = c.new_result();
  const int64_t kv_heads = c.kv_heads(), d = c.head_dim;
  const LoadedTokens loaded{.record = record,
                            .pages = data_of<uint8_t>(c.cache),
                            .page_stride = entry_stride(c.cache),
                            .block_table = data_of<int32_t>(c.block_table),
                            .table_stride = c.block_table.stride(0),
                            .lengths = lengths.data(),
                            .kv_heads = kv_heads,
                            .max_seq_len = c.max_seq_len,
                            .key_levels = key_levels.of,
                            .value_levels = value_levels.of,
                            .key_signs = checked_signs(c.key_signs, "key_signs"),
                            .value_signs = checked_signs(c.value_signs, "value_signs"),
                            .channels = channels_of(c.center, data_of<float>(c.center), kv_heads, d),
                            .dtype = dtype_of(c.dtype)};
  parallel_for(k.numel() / d, row_grain(d, 8), [&](int64_t begin, int64_t end) {
    kernels().load_tokens(loaded, begin, end, k.data_ptr(), v.data_ptr());
  });
  return {k, v};
}

}  // namespace

Store prepare_store(const StoreLayer& layer, const StoreCall& call) { return prepared<LayerStore>(layer, call); }

}  // namespace turboquant::cpu

STABLE_TORCH_LIBRARY_IMPL(turboquant, CPU, m) {
  using namespace turboquant;
  m.impl("cache_store", boxed<&cache_store<cpu::LayerStore>, kCacheStore>);
  m.impl("cache_store_layers", boxed<&cache_store_layers<cpu::LayerStore>, kCacheStoreLayers>);
  m.impl("cache_load", boxed<&cpu::cache_load>);
}
