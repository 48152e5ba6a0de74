// Calls of cache_store and cache_store_layers: their arguments and their checks. Everything is checked before anything
// is written.
#pragma once

#include "calls/boxed.h"
#include "checks.h"
#include "memory.h"

namespace turboquant {

// The arguments of the two ops in the order of their schemas (csrc/ops.cpp). They differ in what every layer has for
// itself: one tensor, or a list with a tensor per layer.
template <typename Tensors, typename OptionalTensors>
struct StoreArguments {
  Tensors k, v;                             // [tokens, kv_heads, d], of several layers [batch, kv_heads, new, d]
  Tensors cache;                            // uint8 [num_pages, kv_heads, record_bytes], any stride of pages, written
  Tensor slot_mapping;                      // int32 or int64 [tokens]
  Tensors key_signs, value_signs;           // float32 [d]
  OptionalTensor key_levels, value_levels;  // int8 [2^bits]; absent: the uniform grid
  Tensor key_steps, value_steps;            // float32 [S]
  OptionalTensors center;                   // float32 [kv_heads, d] or [3, kv_heads, d]
  int64_t page_size, key_bits, value_bits, key_scale_mode, value_scale_mode;
  OptionalTensors tail;                   // [max_seqs, kv_heads, rows, 2, d], any stride of entries, written
  OptionalTensor tail_slots;              // int32 or int64 [seqs], any stride
  OptionalTensor seq_lens, cu_seqlens_q;  // int32 [seqs], int32 [seqs + 1]
  int64_t sink_tokens;
};
using StoreCall = StoreArguments<Tensor, OptionalTensor>;
using StoreLayersCall =
    StoreArguments<std::vector<Tensor>, std::vector<Tensor>>;  // centers, tails: of all layers or none

// One layer of a call, as a backend sees it.
struct StoreLayer {
  const Tensor &k, &v;
  bool of_batch;  // whether they are [batch, kv_heads, new, d]
  const Tensor &cache, &key_signs, &value_signs;
  OptionalTensor center, tail;
};

// k or v, [tokens, heads, d] or [batch, heads, new, d]: the tensor itself, or a copy if tokens lie at unequal distances
// or rows do not start at multiples of `alignment` bytes.
struct HeadRows {
  Tensor tensor;
  TokenRows rows;

  HeadRows(const Tensor& t, int64_t alignment) : tensor(t), rows(t) {
    const int64_t size = static_cast<int64_t>(t.element_size());
    const auto fits = [&](int64_t count, int64_t stride) { return count <= 1 || stride * size % alignment == 0; };
    const bool good = rows.even && reinterpret_cast<uintptr_t>(t.data_ptr()) % alignment == 0 &&
                      fits(rows.tokens, rows.token_stride) && fits(rows.heads, rows.head_stride);
    if (good || t.numel() == 0) return;
    tensor = new_copy(t.dim() == 3 ? t : torch::stable::transpose(t, 1, 2));
    rows.even = true, rows.token_stride = rows.heads * rows.d, rows.head_stride = rows.d;
  }
};

// Checks k, v and the geometry. Returns the latter.
template <typename Call>
format::Record check_store_record(const StoreLayer& layer, const Call& call) {
  check_kv(layer.k, layer.v, layer.of_batch);
  return check_record(layer.k.size(layer.k.dim() - 1), call.page_size, call.key_bits, call.value_bits);
}

// Checks what else can be checked without reading values, except for codebooks and the tail. rows: of k
template <typename Call>
void check_store(const StoreLayer& layer, const Call& call, const format::Record& record, const TokenRows& rows) {
  const Tensor& k = layer.k;
  check_cache(layer.cache, k, record);
  STD_TORCH_CHECK(layer.cache.size(1) == rows.heads, "cache has ", layer.cache.size(1), " KV heads but k has ",
                  rows.heads);
  check_constant(layer.key_signs, k, "key_signs", ScalarType::Float, {rows.d});
  check_constant(layer.value_signs, k, "value_signs", ScalarType::Float, {rows.d});
  check_center(layer.center, k, rows.heads, rows.d);
  check_scale_mode(call.key_scale_mode, "key_scale_mode");
  check_scale_mode(call.value_scale_mode, "value_scale_mode");
  check_slots(call.slot_mapping, k, "slot_mapping", rows.tokens);
  STD_TORCH_CHECK(call.seq_lens || !(layer.tail || call.tail_slots), "tail needs seq_lens");
  // what belongs to a tail is checked without one, too: of another kind it is a mistake of the caller
  if (call.seq_lens) {
    const int64_t seqs = check_batch(*call.seq_lens, call.cu_seqlens_q, k, rows.tokens);
    if (call.tail_slots) check_tail_slots(*call.tail_slots, k, seqs);
  } else if (call.cu_seqlens_q) {
    check_constant(*call.cu_seqlens_q, k, "cu_seqlens_q", ScalarType::Int, {-1});
  }
}

// Adds what all layers of a call read, and what one of them reads and writes.
template <typename Call>
void add_shared(Arguments& memory, const Call& call) {
  memory.reads(call.slot_mapping, "slot_mapping");
  memory.reads(call.key_levels, "key_levels");
  memory.reads(call.value_levels, "value_levels");
  memory.reads(call.key_steps, "key_steps");
  memory.reads(call.value_steps, "value_steps");
  memory.reads(call.tail_slots, "tail_slots");
  memory.reads(call.seq_lens, "seq_lens");
  memory.reads(call.cu_seqlens_q, "cu_seqlens_q");
}
inline void add_layer(Arguments& memory, const StoreLayer& layer) {
  memory.reads(layer.k, "k");
  memory.reads(layer.v, "v");
  memory.reads(layer.key_signs, "key_signs");
  memory.reads(layer.value_signs, "value_signs");
  memory.reads(layer.center, "center");
  memory.writes(layer.cache, "cache");
  memory.writes(layer.tail, "tail");
}

// The ops of a backend, for boxed() (calls/boxed.h). LayerStore is the backend's class for the keys and values of one
// layer: its constructor checks everything and writes nothing, LayerStore::run(layers, op) stores them.
template <typename LayerStore, typename Call>
void store(const Call& call, const std::vector<StoreLayer>& layers, const char* op) {
  std::vector<LayerStore> stores;
  stores.reserve(layers.size());
  for (const StoreLayer& layer : layers) {
    check_device(layer.k, layers[0].k, "k");
    stores.emplace_back(layer, call);
  }
  if (stores.empty()) return;
  Arguments memory;
  add_shared(memory, call);
  for (const StoreLayer& layer : layers) add_layer(memory, layer);
  memory.check();
  LayerStore::run(stores, op);
}

inline StoreLayer layer_of(const StoreCall& c) {
  return {.k = c.k,
          .v = c.v,
          .of_batch = false,
          .cache = c.cache,
          .key_signs = c.key_signs,
          .value_signs = c.value_signs,
          .center = c.center,
          .tail = c.tail};
}

template <typename LayerStore>
void cache_store(const StoreCall& c) {
  store<LayerStore>(c, {layer_of(c)}, "cache_store");
}

template <typename LayerStore>
void cache_store_layers(const StoreLayersCall& c) {
  const auto check_count = [&](const std::vector<Tensor>& list, const char* name, bool needed) {
    STD_TORCH_CHECK(list.size() == c.k.size() || (list.empty() && !needed), name, " are of ", list.size(),
                    " layers, k of ", c.k.size());
  };
  check_count(c.v, "v", true);
  check_count(c.cache, "caches", true);
  check_count(c.key_signs, "key_signs", true);
  check_count(c.value_signs, "value_signs", true);
  check_count(c.center, "centers", false);
  check_count(c.tail, "tails", false);
  const auto optional = [](const std::vector<Tensor>& list, size_t i) {
    return list.empty() ? OptionalTensor() : OptionalTensor(list[i]);
  };
  std::vector<StoreLayer> layers;
  layers.reserve(c.k.size());
  for (size_t i = 0; i < c.k.size(); ++i) {
    layers.push_back({.k = c.k[i],
                      .v = c.v[i],
                      .of_batch = true,
                      .cache = c.cache[i],
                      .key_signs = c.key_signs[i],
                      .value_signs = c.value_signs[i],
                      .center = optional(c.center, i),
                      .tail = optional(c.tail, i)});
  }
  store<LayerStore>(c, layers, "cache_store_layers");
}

}  // namespace turboquant
