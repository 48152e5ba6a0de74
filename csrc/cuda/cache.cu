// cache_store, cache_load: paged, packed keys and values (docs/format.md section 8) and the exact tail (section 9).
//
// One launch does keys and values of all heads. Here are the kernels for every length, dtype and width
// (codec/lanes.cuh, codec/generic.cuh), and the ops, which ask choices/codec.h which kernel takes the call: one of
// these, the bulk kernels (codec/encode_bulk.cu, codec/decode_bulk.cu) or the step kernel (codec/encode_step.cu).
#include "cuda/cache.cuh"

#include <algorithm>

#include "calls/load.h"
#include "choices/codec.h"
#include "cuda/codec/arguments.cuh"
#include "cuda/codec/bulk.cuh"
#include "cuda/codec/generic.cuh"
#include "cuda/codec/lanes.cuh"
#include "cuda/common/device_facts.cuh"

namespace turboquant::cuda {
namespace {

constexpr int kKeys = 0;                           // blockIdx.z of keys; values are 1
constexpr int kBlockTokens = format::kValueGroup;  // tokens of a value block
constexpr int64_t kMaxGridY = 65535;
constexpr int kStoreBlocks = 16;  // per multiprocessor, at most: more of them store one after the other

// ---- Store ----------------------------------------------------------------------------------------------------------

// Words between the vectors of a block; the padding lets gather_block read their rows of octets from different banks.
__host__ __device__ constexpr int store_stride(int d) { return generic_words(d) + 4; }

// Stores keys or values of one head, a token at a time for each group of lanes, or (ROOM 0, codec/lanes.cuh) for each
// warp.
template <int ROOM, typename Shape>
__global__ void __launch_bounds__((ROOM ? kVectorLanes : 32) * kBlockTokens)
    store_kernel(const __grid_constant__ EncodeArguments a, const __grid_constant__ Shape shape) {
  let_next_kernel_begin();  // the next kernel is usually paged_attention's
  extern __shared__ uint4 dynamic[];
  __shared__ SharedCodebook shared;
  __shared__ Token tokens[kBlockTokens];
  const int kind = blockIdx.z, head = blockIdx.y, lanes = lanes_of(shape);
  const int lane = threadIdx.x % lanes, mine = threadIdx.x / lanes, count = blockDim.x / lanes;
  const RecordLayout& layout = a.layout;
  const EncodeSource& source = a.source[kind];
  const Codebook& book = source.book;
  const format::Channels channels = source.channels.of_head(head, source.channel_stride);
  const int d = shape.d, stride = store_stride(d);
  uint32_t* rows = reinterpret_cast<uint32_t*>(dynamic);
  uint32_t* row = rows + mine * stride;
  float* y = reinterpret_cast<float*>(row);
  shared.fill(book, threadIdx.x, blockDim.x);

  for (int64_t first = int64_t{blockIdx.x} * count; first < a.tokens; first += int64_t{gridDim.x} * count) {
    const int64_t token = first + mine;
    const int64_t slot = token < a.tokens ? a.slots[token] : -1;
    const uint8_t* from =
        source.data + (token < a.tokens ? token : 0) * source.token_stride + head * source.head_stride;
    const Token to = a.pages.token(slot, head, layout);
    if (lane == 0) tokens[mine] = to;
    uint16_t scale;
    const auto write_octets = [&](auto&& octet) {
      for (int o = lane; o < layout.octets; o += lanes) {
        write_octet(row, layout.octets, book.width, o, octet(o));
      }
    };
    if constexpr (ROOM > 0) {
      const auto load = [&](auto& v) { v.load(shape, from, a.dtype, 0, source.signs, channels, lane); };
      LaneVector<ROOM> v;
      load(v);
      __syncthreads();
      const ByteCodes codes = encode_in_lanes(v, load, shape, lane, shared, book, a.constants,
                                              reinterpret_cast<uint8_t*>(y + generic_stride(d)));
      __syncwarp();
      write_octets([&](int o) { return codes.octet(o, book.width); });
      scale = codes.scale;
    } else {
      load_generic(y, d, from, a.dtype, 0, source.signs, channels, lane);
      __syncthreads();
      const GenericCodes codes = encode_generic(y, y + generic_stride(d), shape, lane, shared, book, a.constants);
      write_octets([&](int o) { return codes.octet(o, d, shared, book.width); });
      scale = codes.scale;
    }

    if (a.tail.data && to.tile) {
      const int64_t kept = a.tail.row(token);
      const int bytes = d * (element_size(a.dtype));
      if (kept >= 0) copy_bytes(from, a.tail.at(kept, head, kind, bytes), bytes, lane, lanes);
    }
    __syncwarp();
    if (kind == kKeys) {
      if (to.tile) {
        store_key(row, to, layout, lane, lanes);
        if (lane == 0) *to.key_scale(layout) = scale;
      }
    } else {
      // The 16 tokens of a whole value block are put together before they are stored; otherwise every token stores the
      // bytes that it owns.
      const bool together = to.tile && to.tile == tokens[0].tile && to.number == tokens[0].number + mine;
      if (to.tile && lane == 0) *to.value_scale(layout) = scale;
      if (__syncthreads_and(together && count == kBlockTokens && tokens[0].number % kBlockTokens == 0)) {
        uint32_t* image = rows + kBlockTokens * stride;
        gather_block(rows, stride, image, {d, book.width}, threadIdx.x, blockDim.x);
        __syncthreads();
        copy_bytes(reinterpret_cast<const uint8_t*>(image), tokens[0].value_block(layout), layout.value_block_bytes,
                   threadIdx.x, blockDim.x);
      } else if (to.tile) {
        store_value(row, to, layout, lane, lanes);
      }
    }
    __syncthreads();  // before rows and tokens are written again
  }
}

// ---- Load -----------------------------------------------------------------------------------------------------------

struct LoadArguments {
  Pages pages;
  RecordLayout layout;
  const int32_t* table;    // [seqs, max_pages]
  const int32_t* lengths;  // [seqs]
  int64_t seqs, table_stride, max_pages, max_length;
  const float* signs[2];
  const int8_t* levels[2];
  format::Channels channels;  // [kv_heads, d] of keys
  void* out[2];               // [seqs, max_length, kv_heads, d]
  Dtype dtype;
};

constexpr int kLoadWarps = 4;  // of a block, at most

// Loads keys or values of one head, a token for each group of lanes. ROOM: as in store_kernel.
template <int ROOM, typename Shape>
__global__ void __launch_bounds__(32 * kLoadWarps)
    load_kernel(const __grid_constant__ LoadArguments a, const __grid_constant__ Shape shape) {
  extern __shared__ uint4 dynamic[];
  __shared__ float table[32];
  const int kind = blockIdx.z, head = blockIdx.y, lanes = lanes_of(shape);
  const int lane = threadIdx.x % lanes, mine = threadIdx.x / lanes, count = blockDim.x / lanes;
  const RecordLayout& layout = a.layout;
  const Width width = kind == kKeys ? layout.key_width() : layout.value_width();
  const int d = shape.d;
  fill_levels(table, a.levels[kind], width, threadIdx.x, blockDim.x);

  const int64_t number = int64_t{blockIdx.x} * count + mine, sequence = number / a.max_length,
                position = number % a.max_length;
  const bool exists = sequence < a.seqs;
  Token from{nullptr, 0};
  const int64_t page = position >> layout.page_shift;
  if (exists && position < a.lengths[sequence] && page < a.max_pages) {
    from = a.pages.token(a.table[sequence * a.table_stride + page], position & ((1 << layout.page_shift) - 1), head,
                         layout);
  }
  __syncthreads();

  float* y = reinterpret_cast<float*>(dynamic) + mine * generic_words(d);
  uint32_t* row = reinterpret_cast<uint32_t*>(y) + generic_stride(d);
  float scale = 0;
  if (from.tile) {
    if (kind == kKeys) {
      load_key(row, from, layout, lane, lanes);
    } else {
      load_value(row, from, layout, lane, lanes);
    }
    scale = __half2float(__ushort_as_half(*(kind == kKeys ? from.key_scale(layout) : from.value_scale(layout))));
  }
  __syncwarp();
  for (int o = lane; o < layout.octets; o += lanes) {
    const Octet octet = !from.tile      ? Octet{0, 0}
                        : kind == kKeys ? key_octet(row, row + layout.key_row_bytes / 4, layout.octets, width, o)
                                        : ValueLayout{d, width}.octet(row, o);
    put_generic_octet(y, d, o, octet, width, table, scale);
  }
  const int64_t at = (number * a.pages.kv_heads + head) * d;
  const format::Channels channels = kind == kKeys ? a.channels.of_head(head, d) : format::Channels{};
  if constexpr (ROOM > 0) {
    __syncwarp();
    store_from_lanes<ROOM>(y, shape, a.signs[kind], channels, a.out[kind], a.dtype, at, from.tile, lane);
  } else if (from.tile) {
    store_generic(y, shape, a.signs[kind], channels, a.out[kind], a.dtype, at, true, lane);
  }
  if (exists && !from.tile) {
    const float zeros[2] = {};
    for (int i = 2 * lane; i < d; i += 2 * lanes) store_floats_as<2>(zeros, a.out[kind], a.dtype, at + i);
  }
}

// ---- Host side ------------------------------------------------------------------------------------------------------

EncodeSource source_of(const HeadRows& x, const Codebook& book, const Constant& signs,
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
      case CodecKernel::kGeneric: return launch_generic(stream);
    }
  }

  void launch_generic(cudaStream_t stream) const {
    const int64_t tokens = arguments_.tokens, heads = arguments_.heads;
    // One block puts a value block together; few tokens are stored sooner by smaller blocks on more multiprocessors.
    const int stride = store_stride(record_.head_dim);
    const int at_once = generic_warps(stride, tokens * heads < choices::kFewVectors ? 4 : kBlockTokens);
    const int shared_bytes = 4 * at_once * stride + (at_once == kBlockTokens ? record_.value_block_bytes() : 0);
    // A block that stores several times fills its tables once.
    const int64_t most = int64_t{kStoreBlocks} * current_device().facts.multiprocessors / (2 * heads) + 1;
    const dim3 grid(static_cast<unsigned>(std::min(int64_t{num_blocks(tokens, at_once)}, most)),
                    static_cast<unsigned>(heads), 2);
    with_vector_shape(format::split_dim(record_.head_dim), tokens * heads, [&](const auto& shape, auto room) {
      store_kernel<room><<<grid, lanes_of(shape) * at_once, shared_bytes, stream>>>(arguments_, shape);
    });
  }

  format::Record record_;
  HeadRows keys_, values_;
  Constant key_signs_, value_signs_, center_;
  EncodeArguments arguments_;
};

DecodeArguments bulk_arguments(const LoadArguments& a, const format::Record& record) {
  DecodeArguments bulk{};
  bulk.source[0] = {record.key_width(), a.levels[0], a.signs[0], a.channels, a.out[0]};
  bulk.source[1] = {record.value_width(), a.levels[1], a.signs[1], {}, a.out[1]};
  bulk.sources = 2;
  bulk.heads = a.pages.kv_heads;
  bulk.dtype = a.dtype;
  bulk.seqs = a.seqs, bulk.max_length = a.max_length;
  bulk.table_stride = a.table_stride, bulk.max_pages = a.max_pages;
  bulk.pages = a.pages;
  bulk.layout = a.layout;
  bulk.table = a.table, bulk.lengths = a.lengths;
  return bulk;
}

// -> k, v: [seqs, max_seq_len, kv_heads, head_dim], zero from seq_len on
std::tuple<Tensor, Tensor> cache_load(const LoadCall& c) {
  const format::Record record = check_load(c);
  const int64_t kv_heads = c.kv_heads(), seqs = c.seqs(), d = c.head_dim;
  STD_TORCH_CHECK(kv_heads <= kMaxGridY, "cache has ", kv_heads, " KV heads, supported: up to ", kMaxGridY);
  const Pages pages = pages_of(c.cache, kv_heads);

  Tensor k = c.new_result(), v = c.new_result();
  if (k.numel() == 0) return {k, v};

  const Constant k_signs(c.key_signs), v_signs(c.value_signs), constants(c.center);
  const format::Channels channels = channels_of(c.center, constants.data(), kv_heads, d);
  const Launch launch(c.cache);
  const LoadArguments arguments{.pages = pages,
                                .layout = RecordLayout(record),
                                .table = static_cast<const int32_t*>(c.block_table.data_ptr()),
                                .lengths = static_cast<const int32_t*>(c.seq_lens.data_ptr()),
                                .seqs = seqs,
                                .table_stride = c.block_table.stride(0),
                                .max_pages = c.max_pages(),
                                .max_length = c.max_seq_len,
                                .signs = {k_signs.data(), v_signs.data()},
                                .levels = {levels_data(c.key_levels), levels_data(c.value_levels)},
                                .channels = channels,
                                .out = {k.data_ptr(), v.data_ptr()},
                                .dtype = dtype_of(c.dtype)};
  const LoadShape shape{.head_dim = record.head_dim,
                        .dtype = arguments.dtype,
                        .seqs = seqs,
                        .max_length = c.max_seq_len,
                        .heads = kv_heads,
                        .value_width = record.value_width()};
  if (choose_load(shape, current_device().facts).kernel == CodecKernel::kBulk) {
    launch_decode_bulk(bulk_arguments(arguments, record), record.head_dim, launch.stream());
    launch.check("cache_load");
    return {k, v};
  }

  with_vector_shape(format::split_dim(d), seqs * c.max_seq_len * kv_heads, [&](const auto& shape, auto room) {
    const VectorBlock block(shape.d, lanes_of(shape), kLoadWarps);
    const dim3 grid(num_blocks(seqs * c.max_seq_len, block.vectors), static_cast<unsigned>(kv_heads), 2);
    load_kernel<room><<<grid, lanes_of(shape) * block.vectors, block.shared_bytes, launch.stream()>>>(arguments, shape);
  });
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
