// cache_store, cache_load: paged, packed keys and values (docs/format.md section 8) and the exact tail (section 9).
//
// One launch does keys and values of all heads. Here are the kernels that know every length, type and width (codec/generic.cuh); those
// that are in use have their own, for many tokens (codec/encode_bulk.cuh) and for few (codec/encode_step.cu).
#include "cuda/codec/record.cuh"

#include "calls/load.h"
#include "calls/store.h"
#include "cuda/codec/arguments.cuh"
#include "cuda/codec/bulk.cuh"
#include "cuda/codec/generic.cuh"

namespace turboquant::cuda {
namespace {

constexpr int kKeys = 0;                           // the kind of a block of keys; that of values is 1
constexpr int kBlockTokens = format::kValueGroup;  // tokens of a value block
constexpr int64_t kMaxGridY = 65535;
constexpr int64_t kFewVectors = 2048;  // keys or values of a decode step

// ---- Store ------------------------------------------------------------------------------------------------------------

// Words between the vectors of a block: gather_block reads rows of octets there, from different banks.
__host__ __device__ constexpr int store_stride(int d) { return any_words(d) + 4; }

// A warp is a token of one head, its key or its value.
__global__ void __launch_bounds__(32 * kBlockTokens)
    store_kernel(const __grid_constant__ TileArguments a, const __grid_constant__ AnyShape shape) {
  let_next_kernel_begin();  // that is paged_attention
  extern __shared__ uint4 dynamic[];
  __shared__ SharedCodebook shared;
  __shared__ Token tokens[kBlockTokens];
  const int kind = blockIdx.z, head = blockIdx.y;
  const int lane = threadIdx.x % 32, mine = threadIdx.x / 32, count = blockDim.x / 32;
  const int64_t token = int64_t{blockIdx.x} * count + mine;
  const RecordLayout& layout = a.layout;
  const TileSource& source = a.source[kind];
  const Codebook& book = source.book;
  const int d = shape.d, stride = store_stride(d);
  uint32_t* rows = reinterpret_cast<uint32_t*>(dynamic);
  uint32_t* row = rows + mine * stride;
  float* y = reinterpret_cast<float*>(row);

  const int64_t slot = token < a.tokens ? a.slots[token] : -1;
  const uint8_t* from = source.data + (token < a.tokens ? token : 0) * source.token_stride + head * source.head_stride;
  const Token to = a.pages.token(slot, head, layout);
  if (lane == 0) tokens[mine] = to;
  shared.fill(book, threadIdx.x, blockDim.x);
  load_any(y, d, from, a.dtype, 0, source.signs, source.channels.of_head(head, source.channel_stride), lane);
  __syncthreads();
  const AnyCodes codes = encode_any(y, y + any_stride(d), shape, lane, shared, book, a.constants);
  for (int o = lane; o < layout.octets; o += 32) {
    write_octet(row, layout.octets, book.bits, o, codes.octet(o, d, shared, book.bits));
  }

  if (a.tail.data && to.tile) {
    const int64_t kept = a.tail.row(token);
    const int bytes = d * (a.dtype == Dtype::kFloat32 ? 4 : 2);
    if (kept >= 0) copy_bytes(from, a.tail.at(kept, head, kind, bytes), bytes, lane, 32);
  }
  __syncwarp();
  if (kind == kKeys) {
    if (!to.tile) return;
    store_key(row, to, layout, lane, 32);
    if (lane == 0) *to.key_scale(layout) = codes.scale;
    return;
  }
  // A block of 16 tokens that is written as a whole is put together first; else every token writes the bytes that it owns.
  const bool together = to.tile && to.tile == tokens[0].tile && to.number == tokens[0].number + mine;
  if (to.tile && lane == 0) *to.value_scale(layout) = codes.scale;
  if (__syncthreads_and(together && count == kBlockTokens && tokens[0].number % kBlockTokens == 0)) {
    uint32_t* image = rows + kBlockTokens * stride;
    gather_block(rows, stride, image, {d, book.bits}, threadIdx.x, 32 * kBlockTokens);
    __syncthreads();
    copy_bytes(reinterpret_cast<const uint8_t*>(image), tokens[0].value_block(layout), layout.value_block_bytes,
               threadIdx.x, 32 * kBlockTokens);
  } else if (to.tile) {
    store_value(row, to, layout, lane, 32);
  }
}

// ---- Load -------------------------------------------------------------------------------------------------------------

struct LoadArguments {
  Pages pages;
  RecordLayout layout;
  const int32_t* table;    // [seqs, max_pages]
  const int32_t* lengths;  // [seqs]
  int64_t seqs, max_pages, max_length;
  const float* signs[2];
  const int8_t* levels[2];
  format::Channels channels;  // [kv_heads, d] of keys
  void* out[2];               // [seqs, max_length, kv_heads, d]
  Dtype dtype;
};

constexpr int kLoadWarps = 4;  // of a block, at most

// A warp is a token of one head, its key or its value.
__global__ void __launch_bounds__(32 * kLoadWarps)
    load_kernel(const __grid_constant__ LoadArguments a, const __grid_constant__ AnyShape shape) {
  extern __shared__ uint4 dynamic[];
  __shared__ float table[32];
  const int kind = blockIdx.z, head = blockIdx.y;
  const int lane = threadIdx.x % 32, mine = threadIdx.x / 32, count = blockDim.x / 32;
  const RecordLayout& layout = a.layout;
  const int bits = kind == kKeys ? layout.key_bits : layout.value_bits, d = shape.d;
  fill_levels(table, a.levels[kind], bits, threadIdx.x, blockDim.x);

  const int64_t number = int64_t{blockIdx.x} * count + mine, sequence = number / a.max_length,
                position = number % a.max_length;
  const bool exists = sequence < a.seqs;
  Token from{nullptr, 0};
  const int64_t page = position >> layout.page_shift;
  if (exists && position < a.lengths[sequence] && page < a.max_pages) {
    from =
        a.pages.token(a.table[sequence * a.max_pages + page], position & ((1 << layout.page_shift) - 1), head, layout);
  }
  __syncthreads();

  float* y = reinterpret_cast<float*>(dynamic) + mine * any_words(d);
  uint32_t* row = reinterpret_cast<uint32_t*>(y) + any_stride(d);
  float scale = 0;
  if (from.tile) {
    if (kind == kKeys) {
      load_key(row, from, layout, lane, 32);
    } else {
      load_value(row, from, layout, lane, 32);
    }
    scale = __half2float(__ushort_as_half(*(kind == kKeys ? from.key_scale(layout) : from.value_scale(layout))));
  }
  __syncwarp();
  for (int o = lane; o < layout.octets; o += 32) {
    const Octet octet = !from.tile      ? Octet{0, 0}
                        : kind == kKeys ? key_octet(row, row + layout.key_row_bytes / 4, layout.octets, bits, o)
                                        : ValueLayout{d, bits}.octet(row, o);
    put_any_octet(y, d, o, octet, bits, table, scale);
  }
  const int64_t at = (number * a.pages.kv_heads + head) * d;
  if (from.tile || !exists) {
    store_any(y, shape, a.signs[kind], kind == kKeys ? a.channels.of_head(head, d) : format::Channels{}, a.out[kind],
              a.dtype, at, exists, lane);
  } else {
    const float zeros[2] = {};
    for (int i = 2 * lane; i < d; i += 64) store_floats_as<2>(zeros, a.out[kind], a.dtype, at + i);
  }
}

// ---- Host side --------------------------------------------------------------------------------------------------------

Pages pages_of(const Tensor& cache) {
  STD_TORCH_CHECK(aligned(cache.data_ptr(), 16), "cache must start at a multiple of 16 bytes");
  return {static_cast<uint8_t*>(cache.data_ptr()), cache.size(0), static_cast<int>(cache.size(1))};
}

TileSource source_of(const HeadRows& x, const Codebook& book, const Constant& signs, const format::Channels& channels) {
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
  return {static_cast<uint8_t*>(tail.data_ptr()),
          static_cast<const int64_t*>(call.tail_slots->data_ptr()),
          static_cast<const int32_t*>(call.seq_lens->data_ptr()),
          call.cu_seqlens_q ? static_cast<const int32_t*>(call.cu_seqlens_q->data_ptr()) : nullptr,
          seqs,
          tail.size(0),
          static_cast<int>(tail.size(2)),
          static_cast<int>(call.sink_tokens),
          static_cast<int>(rows.heads)};
}

// A layer's keys and values, checked, and with them all that their kernel has to know.
class LayerStore {
 public:
  template <typename Call>
  LayerStore(const StoreLayer& layer, const Call& call)
      : record_(check_store_record(layer, call)), split_(format::split_dim(record_.head_dim)),
        keys_(aligned_rows(layer.k)), values_(aligned_rows(layer.v)), key_signs_(layer.key_signs),
        value_signs_(layer.value_signs), center_(layer.center) {
    const Tensor& k = layer.k;
    const TokenRows rows(k);
    check_store(layer, call, record_, rows);
    const Pages pages = pages_of(layer.cache);
    STD_TORCH_CHECK(rows.heads <= kMaxGridY, "k has ", rows.heads, " KV heads, supported: up to ", kMaxGridY);
    const Codebook key_book = checked_codebook(k, call.key_levels, call.key_steps, call.key_bits, call.key_scale_mode,
                                               "key_levels", "key_steps");
    const Codebook value_book = checked_codebook(k, call.value_levels, call.value_steps, call.value_bits,
                                                 call.value_scale_mode, "value_levels", "value_steps");
    const Tail tail = layer.tail ? checked_tail(*layer.tail, call, k, rows) : Tail{};
    const format::Channels channels = channels_of(layer.center, center_.data(), rows.heads, rows.d);
    tiles_ = {{source_of(keys_, key_book, key_signs_, channels), source_of(values_, value_book, value_signs_, {})},
              2,
              rows.tokens,
              static_cast<int>(rows.heads),
              dtype_of(k),
              encode_constants(split_),
              pages,
              RecordLayout(record_),
              static_cast<const int64_t*>(call.slot_mapping.data_ptr()),
              tail,
              nullptr,
              nullptr,
              0};
  }

  static void run(const std::vector<LayerStore>& layers, const char* op) {
    const Launch launch(layers[0].keys_.tensor);
    for (const LayerStore& layer : layers) layer.start(launch.stream());
    launch.check(op);
  }

 private:
  void start(cudaStream_t stream) const {
    const int64_t tokens = tiles_.tokens;
    if (tokens == 0 || tiles_.heads == 0) return;
    if (launch_encode_bulk(tiles_, split_, stream) || launch_encode_step(tiles_, split_, stream)) return;

    // A value block is put together by one block of threads; few tokens rather use more multiprocessors.
    const int stride = store_stride(record_.head_dim);
    const int warps = any_warps(stride, tokens * tiles_.heads < kFewVectors ? 4 : kBlockTokens);
    const int shared_bytes = 4 * warps * stride + (warps == kBlockTokens ? record_.value_block_bytes() : 0);
    const dim3 grid(num_blocks(tokens, warps), static_cast<unsigned>(tiles_.heads), 2);
    store_kernel<<<grid, 32 * warps, shared_bytes, stream>>>(tiles_, AnyShape(split_));
  }

  format::Record record_;
  format::Split split_;
  HeadRows keys_, values_;
  Constant key_signs_, value_signs_, center_;
  TileArguments tiles_;
};

// -> k, v: [seqs, max_seq_len, kv_heads, head_dim], zero from seq_len on
std::tuple<Tensor, Tensor> cache_load(const LoadCall& c) {
  const format::Record record = check_load(c);
  const int64_t kv_heads = c.kv_heads(), seqs = c.seqs(), d = c.head_dim;
  STD_TORCH_CHECK(kv_heads <= kMaxGridY, "cache has ", kv_heads, " KV heads, supported: up to ", kMaxGridY);
  const Pages pages = pages_of(c.cache);

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
                                .max_pages = c.max_pages(),
                                .max_length = c.max_seq_len,
                                .signs = {k_signs.data(), v_signs.data()},
                                .levels = {levels_data(c.key_levels), levels_data(c.value_levels)},
                                .channels = channels,
                                .out = {k.data_ptr(), v.data_ptr()},
                                .dtype = dtype_of(c.dtype)};
  LoadTileArguments tiles{};
  for (int s = 0; s < 2; ++s) {
    tiles.source[s] = {s == kKeys ? record.key_bits : record.value_bits, arguments.levels[s], arguments.signs[s],
                       s == kKeys ? channels : format::Channels{}, arguments.out[s]};
  }
  tiles.sources = 2;
  tiles.heads = static_cast<int>(kv_heads);
  tiles.dtype = arguments.dtype;
  tiles.seqs = seqs;
  tiles.max_length = c.max_seq_len;
  tiles.pages = pages;
  tiles.layout = arguments.layout;
  tiles.table = arguments.table;
  tiles.lengths = arguments.lengths;
  tiles.max_pages = arguments.max_pages;
  if (launch_decode_bulk(tiles, format::split_dim(d), launch.stream())) {
    launch.check("cache_load");
    return {k, v};
  }

  const int words = any_words(static_cast<int>(d)), warps = any_warps(words, kLoadWarps);
  const dim3 grid(num_blocks(seqs * c.max_seq_len, warps), static_cast<unsigned>(kv_heads), 2);
  load_kernel<<<grid, 32 * warps, 4 * warps * words, launch.stream()>>>(arguments, AnyShape(format::split_dim(d)));
  launch.check("cache_load");
  return {k, v};
}

}  // namespace
}  // namespace turboquant::cuda

STABLE_TORCH_LIBRARY_IMPL(turboquant, CUDA, m) {
  namespace tq = turboquant;
  m.impl("cache_store", tq::boxed<&tq::cache_store<tq::cuda::LayerStore>>);
  m.impl("cache_store_layers", tq::boxed<&tq::cache_store_layers<tq::cuda::LayerStore>>);
  m.impl("cache_load", tq::boxed<&tq::cuda::cache_load>);
}
