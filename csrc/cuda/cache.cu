// cache_store, cache_load: paged, packed keys and values (docs/format.md section 8) and the exact tail (section 9).
//
// The kernels are in codec/; here are the ops, which ask choices/codec.h which of them takes the call.
#include "cuda/cache.cuh"

#include "calls/load.h"
#include "choices/codec.h"
#include "cuda/codec/arguments.cuh"
#include "cuda/codec/bulk.cuh"
#include "cuda/common/device_facts.cuh"

namespace turboquant::cuda {
namespace {

constexpr int64_t kMaxGridY = 65535;

EncodeSource source_of(const HeadRows& x, const Codebook& book, const Constant<float>& signs,
                       const format::Channels& channels) {
  const int64_t size = static_cast<int64_t>(x.tensor.element_size());
  return {static_cast<const uint8_t*>(x.tensor.data_ptr()),
          x.rows.token_stride * size,
          x.rows.head_stride * size,
          book,
          signs.data(),
          channels,
          x.rows.d};
}

// k or v with rows that kernels can read by eight elements.
HeadRows aligned_rows(const Tensor& x) { return {x, word_bytes(8, static_cast<int>(x.element_size()))}; }

template <typename Call>
Tail checked_tail(const Tensor& tail, const Call& call, const Tensor& k, const TokenRows& rows) {
  const int64_t seqs = check_batch(*call.seq_lens, call.cu_seqlens_q, k, rows.tokens);
  check_tail(tail, call.tail_slots, k, seqs, rows.heads, rows.d, call.sink_tokens);
  return tail_of(tail, call, tail.size(2));
}

// A layer's keys and values, checked, with all arguments of their kernel.
class LayerStore {
 public:
  template <typename Call>
  LayerStore(const StoreLayer& layer, const Call& call)
      : record_(check_store_record(layer, call)), keys_(aligned_rows(layer.k)), values_(aligned_rows(layer.v)),
        key_signs_(layer.key_signs), value_signs_(layer.value_signs), center_(layer.center) {
    const Tensor& k = layer.k;
    const TokenRows rows(k);
    check_store(layer, call, record_, rows);
    const Pages pages = pages_of(layer.cache, layer.cache.size(1));
    STD_TORCH_CHECK(rows.heads <= kMaxGridY, "k has ", rows.heads, " KV heads, supported: up to ", kMaxGridY);
    const Codebook key_book = checked_codebook(k, call.key_levels, call.key_steps, call.key_bits, call.key_scale_mode,
                                               "key_levels", "key_steps");
    const Codebook value_book = checked_codebook(k, call.value_levels, call.value_steps, call.value_bits,
                                                 call.value_scale_mode, "value_levels", "value_steps");
    const Tail tail = layer.tail ? checked_tail(*layer.tail, call, k, rows) : Tail{};
    const format::Channels channels = channels_of(layer.center, center_.data(), rows.heads, rows.d);
    arguments_ = {.source = {source_of(keys_, key_book, key_signs_, channels),
                             source_of(values_, value_book, value_signs_, {})},
                  .sources = 2,
                  .first = 0,
                  .tokens = rows.tokens,
                  .heads = static_cast<int>(rows.heads),
                  .dtype = dtype_of(k),
                  .constants = EncodeConstants::of(format::split_dim(record_.head_dim)),
                  .pages = pages,
                  .layout = RecordLayout(record_),
                  .slots = slots_of(call.slot_mapping),
                  .tail = tail,
                  .packed = nullptr,
                  .scale = nullptr,
                  .row_bytes = 0};
  }

  static void run(const std::vector<LayerStore>& layers, const char* op) {
    const Launch launch(layers[0].keys_.tensor);
    for (const LayerStore& layer : layers) layer.start(launch.stream());
    launch.check(op);
  }

 private:
  StoreShape shape() const {
    const auto source = [&](const EncodeSource& s) {
      return EncodeSourceShape{s.book.width, s.book.num_steps, s.token_stride, s.head_stride};
    };
    const EncodeArguments& a = arguments_;
    return {.head_dim = record_.head_dim,
            .dtype = a.dtype,
            .tokens = a.tokens,
            .heads = a.heads,
            .keys = source(a.source[0]),
            .values = source(a.source[1]),
            .num_pages = a.pages.num_pages,
            .tile_bytes = a.layout.tile_bytes,
            .has_tail = a.tail.data != nullptr,
            .tail_aligned = aligned(a.tail.data, 8),
            .tail_seqs = a.tail.seqs,
            .tail_max_seqs = a.tail.max_seqs};
  }

  void start(cudaStream_t stream) const {
    if (arguments_.tokens == 0 || arguments_.heads == 0) return;
    switch (choose_store(shape(), current_device().facts).kernel) {
      case CodecKernel::kBulk: return launch_encode_bulk(arguments_, record_.head_dim, stream);
      case CodecKernel::kStep: return launch_encode_step(arguments_, record_.head_dim, stream);
      case CodecKernel::kGeneric: return launch_encode_any(arguments_, format::split_dim(record_.head_dim), stream);
    }
  }

  format::Record record_;
  HeadRows keys_, values_;
  Constant<float> key_signs_, value_signs_, center_;
  EncodeArguments arguments_;
};

// -> k, v: [seqs, max_seq_len, kv_heads, head_dim], zero from seq_len on
std::tuple<Tensor, Tensor> cache_load(const LoadCall& c) {
  const format::Record record = check_load(c);
  const int64_t kv_heads = c.kv_heads(), seqs = c.seqs(), d = c.head_dim;
  STD_TORCH_CHECK(kv_heads <= kMaxGridY, "cache has ", kv_heads, " KV heads, supported: up to ", kMaxGridY);
  const Pages pages = pages_of(c.cache, kv_heads);

  Tensor k = c.new_result(), v = c.new_result();
  if (k.numel() == 0) return {k, v};

  const Constant<float> k_signs(c.key_signs), v_signs(c.value_signs), constants(c.center);
  const format::Channels channels = channels_of(c.center, constants.data(), kv_heads, d);
  const Launch launch(c.cache);
  DecodeArguments a{};
  a.source[0] = {record.key_width(), levels_data(c.key_levels), k_signs.data(), channels, k.data_ptr()};
  a.source[1] = {record.value_width(), levels_data(c.value_levels), v_signs.data(), {}, v.data_ptr()};
  a.sources = 2, a.heads = static_cast<int>(kv_heads);
  a.dtype = dtype_of(c.dtype);
  a.seqs = seqs, a.max_length = c.max_seq_len;
  a.pages = pages, a.layout = RecordLayout(record);
  a.table = integers(c.block_table), a.table_stride = c.block_table.stride(0), a.max_pages = c.max_pages();
  a.lengths = integers(c.seq_lens);
  const LoadShape shape{
      .head_dim = record.head_dim, .dtype = a.dtype, .seqs = seqs, .max_length = c.max_seq_len, .heads = kv_heads};
  if (choose_load(shape, current_device().facts).kernel == CodecKernel::kBulk) {
    launch_decode_bulk(a, record.head_dim, launch.stream());
  } else {
    launch_decode_any(a, format::split_dim(d), launch.stream());
  }
  launch.check("cache_load");
  return {k, v};
}

}  // namespace

Store prepare_store(const StoreLayer& layer, const StoreCall& call) { return prepared<LayerStore>(layer, call); }

}  // namespace turboquant::cuda

STABLE_TORCH_LIBRARY_IMPL(turboquant, CUDA, m) {
  using namespace turboquant;
  m.impl("cache_store", boxed<&cache_store<turboquant::cuda::LayerStore>, kCacheStore>);
  m.impl("cache_store_layers", boxed<&cache_store_layers<turboquant::cuda::LayerStore>, kCacheStoreLayers>);
  m.impl("cache_load", boxed<&turboquant::cuda::cache_load>);
}
