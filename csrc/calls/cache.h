// cache_store and cache_store_layers, but for what a backend does: their arguments, and that all is checked before anything is
// written.
//
// Layer is a backend's class for the keys and values of one layer. Its constructor checks everything and writes nothing,
// Layer::run(layers, op) stores them.
#pragma once

#include "checks.h"

namespace turboquant {

// What all layers of a call have in common.
struct StoreCall {
  const Tensor& slot_mapping;                       // int64 [tokens]
  const OptionalTensor &key_levels, &value_levels;  // int8 [2^bits]
  const Tensor &key_steps, &value_steps;            // float32 [S]
  int64_t page_size, key_bits, value_bits, key_scale_mode, value_scale_mode;
  const OptionalTensor &tail_slots, &seq_lens, &cu_seqlens_q;  // int64 [seqs], int32 [seqs], int32 [seqs + 1]
  int64_t sink_tokens;
};

// What each layer has for itself.
struct StoreLayer {
  const Tensor &k, &v;                    // [tokens, kv_heads, d], or [batch, kv_heads, new, d]
  bool of_batch;                          // which of the two
  const Tensor& cache;                    // uint8 [num_pages, kv_heads, record_bytes], written
  const Tensor &key_signs, &value_signs;  // float32 [d]
  const OptionalTensor& center;           // float32 [kv_heads, d] or [3, kv_heads, d]
  const OptionalTensor& tail;             // [max_seqs, kv_heads, rows, 2, d], written

  // Checks k and v, too.
  format::Record record(const StoreCall& call) const {
    check_kv(k, v, of_batch);
    return check_record(k.size(k.dim() - 1), call.page_size, call.key_bits, call.value_bits);
  }
  // What both backends look at.
  void check(const StoreCall& call, const TokenRows& rows) const {
    STD_TORCH_CHECK(cache.size(1) == rows.heads, "cache has ", cache.size(1), " KV heads but k has ", rows.heads);
    check_constant(key_signs, k, "key_signs", ScalarType::Float, {rows.d});
    check_constant(value_signs, k, "value_signs", ScalarType::Float, {rows.d});
    check_center(center, k, rows.heads, rows.d);
    check_scale_mode(call.key_scale_mode, "key_scale_mode");
    check_scale_mode(call.value_scale_mode, "value_scale_mode");
    STD_TORCH_CHECK(!tail || call.seq_lens.has_value(), "tail needs seq_lens");
  }
};

template <typename Layer>
void cache_store(const Tensor& k, const Tensor& v, const Tensor& cache, const Tensor& slot_mapping,
                 const Tensor& key_signs, const Tensor& value_signs, const OptionalTensor& key_levels,
                 const OptionalTensor& value_levels, const Tensor& key_steps, const Tensor& value_steps,
                 const OptionalTensor& center, int64_t page_size, int64_t key_bits, int64_t value_bits,
                 int64_t key_scale_mode, int64_t value_scale_mode, const OptionalTensor& tail,
                 const OptionalTensor& tail_slots, const OptionalTensor& seq_lens, const OptionalTensor& cu_seqlens_q,
                 int64_t sink_tokens) {
  const StoreCall call{slot_mapping, key_levels, value_levels, key_steps,      value_steps,
                       page_size,    key_bits,   value_bits,   key_scale_mode, value_scale_mode,
                       tail_slots,   seq_lens,   cu_seqlens_q, sink_tokens};
  std::vector<Layer> layer;
  layer.emplace_back(StoreLayer{k, v, false, cache, key_signs, value_signs, center, tail}, call);
  Layer::run(layer, "cache_store");
}

// centers, tails: of all layers or of none
template <typename Layer>
void cache_store_layers(const std::vector<Tensor>& k, const std::vector<Tensor>& v, const std::vector<Tensor>& caches,
                        const Tensor& slot_mapping, const std::vector<Tensor>& key_signs,
                        const std::vector<Tensor>& value_signs, const OptionalTensor& key_levels,
                        const OptionalTensor& value_levels, const Tensor& key_steps, const Tensor& value_steps,
                        const std::vector<Tensor>& centers, int64_t page_size, int64_t key_bits, int64_t value_bits,
                        int64_t key_scale_mode, int64_t value_scale_mode, const std::vector<Tensor>& tails,
                        const OptionalTensor& tail_slots, const OptionalTensor& seq_lens,
                        const OptionalTensor& cu_seqlens_q, int64_t sink_tokens) {
  const auto check_count = [&](const std::vector<Tensor>& list, const char* name, bool needed) {
    STD_TORCH_CHECK(list.size() == k.size() || (list.empty() && !needed), name, " are of ", list.size(),
                    " layers, k of ", k.size());
  };
  check_count(v, "v", true);
  check_count(caches, "caches", true);
  check_count(key_signs, "key_signs", true);
  check_count(value_signs, "value_signs", true);
  check_count(centers, "centers", false);
  check_count(tails, "tails", false);
  const StoreCall call{slot_mapping, key_levels, value_levels, key_steps,      value_steps,
                       page_size,    key_bits,   value_bits,   key_scale_mode, value_scale_mode,
                       tail_slots,   seq_lens,   cu_seqlens_q, sink_tokens};
  std::vector<Layer> layers;
  layers.reserve(k.size());
  for (size_t i = 0; i < k.size(); ++i) {
    check_device(k[i], k[0], "k");
    const OptionalTensor center = centers.empty() ? OptionalTensor() : OptionalTensor(centers[i]);
    const OptionalTensor tail = tails.empty() ? OptionalTensor() : OptionalTensor(tails[i]);
    layers.emplace_back(StoreLayer{k[i], v[i], true, caches[i], key_signs[i], value_signs[i], center, tail}, call);
  }
  if (!layers.empty()) Layer::run(layers, "cache_store_layers");
}

}  // namespace turboquant
