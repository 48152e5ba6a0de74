// A call of store_and_attend: a step of decoding, which stores the keys and values of its own tokens, then attends to
// them and to older ones. Its queries read their own sequence's new tokens from k_new and v_new; but a sequence may
// share pages with another one whose new tokens the same step stores.
#pragma once

#include <memory>

#include "calls/attention.h"
#include "calls/store.h"

namespace turboquant {

// The arguments of store_and_attend in the order of its schema (csrc/ops.cpp): those of paged_attention, with k_new and
// v_new, and what only storing needs.
struct StepCall {
  AttentionCall attention;
  Tensor slot_mapping;            // int32 or int64 [tokens]
  Tensor key_steps, value_steps;  // float32 [S]
  int64_t key_scale_mode, value_scale_mode;
};

// Checks the arguments of cache_store and returns what stores them.
using PrepareStore = Store(const StoreLayer& layer, const StoreCall& call);

// A PrepareStore of a backend's LayerStore (calls/store.h).
template <typename LayerStore>
Store prepared(const StoreLayer& layer, const StoreCall& call) {
  auto stores = std::make_shared<std::vector<LayerStore>>();
  stores->emplace_back(layer, call);
  return [stores] { LayerStore::run(*stores, "store_and_attend"); };
}

template <Attend* attend, PrepareStore* prepare_store>
void store_and_attend(const StepCall& step, const Tensor& out, const OptionalTensor& lse) {
  const AttentionCall& c = step.attention;
  STD_TORCH_CHECK(c.k_new && c.v_new, "store_and_attend needs k_new and v_new");
  const format::Record record = check_attention(c);
  const StoreCall store{.k = *c.k_new,
                        .v = *c.v_new,
                        .cache = c.cache,
                        .slot_mapping = step.slot_mapping,
                        .key_signs = c.key_signs,
                        .value_signs = c.value_signs,
                        .key_levels = c.key_levels,
                        .value_levels = c.value_levels,
                        .key_steps = step.key_steps,
                        .value_steps = step.value_steps,
                        .center = c.center,
                        .page_size = c.page_size,
                        .key_bits = c.key_bits,
                        .value_bits = c.value_bits,
                        .key_scale_mode = step.key_scale_mode,
                        .value_scale_mode = step.value_scale_mode,
                        .tail = c.tail,
                        .tail_slots = c.tail_slots,
                        .seq_lens = c.seq_lens,
                        .cu_seqlens_q = c.cu_seqlens_q,
                        .sink_tokens = c.sink_tokens};
  const StoreLayer layer = layer_of(store);
  const Store stores = prepare_store(layer, store);
  check_out_and_lse(out, lse, c.q, 4);
  Arguments memory;
  add_shared(memory, store);
  add_layer(memory, layer);
  add_attention(memory, c, out, lse);
  memory.check();
  attend(c, record, out, lse ? *lse : new_lse(c), stores);
}

}  // namespace turboquant
