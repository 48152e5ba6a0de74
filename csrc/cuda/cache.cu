// cache_store, cache_load: paged, packed keys and values (docs/format.md section 8) and the exact tail (section 9).
//
// A block works on neighbouring tokens of one head, its keys or its values: a group of lanes encodes or decodes a vector in
// registers, shared memory turns octets into words of the record and back. One launch does keys and values of all heads.
#include "cache.cuh"

#include <algorithm>

#include "tile_launch.cuh"

namespace turboquant::cuda {
namespace {

constexpr int kKeys = 0;                           // the kind of a block of keys; that of values is 1
constexpr int kBlockTokens = format::kValueGroup;  // tokens of a value block
constexpr int64_t kMaxGridY = 65535;
constexpr int64_t kFewVectors = 2048;  // keys or values of a decode step

// ---- Store ------------------------------------------------------------------------------------------------------------

// k or v: element strides; the last dimension has stride 1.
struct Heads {
  const void* data;
  int64_t token_stride, head_stride;
};

struct StoreArguments {
  Heads heads[2];  // keys, values
  Codebook book[2];
  const float* signs[2];
  format::Channels channels;  // [kv_heads, d] of keys
  const int64_t* slots;
  int64_t tokens;
  Pages pages;
  RecordLayout layout;
  Tail tail;
  EncodeConstants constants;
  ScalarType dtype;
  int element_size;
};

// As many lanes as a vector has octets in a block, up to a warp: for the few tokens of a decode step, the shortest way through.
template <int M, int LOG_N>
using StoreTraits = HadamardTraits<M, LOG_N, (1 << LOG_N) / 8 < 32 ? (1 << LOG_N) / 8 : 32>;

// What a lane reads of a vector, as it is stored: it can be on its way while other things are.
template <typename Traits>
struct StoredChannels {
  static_assert(Traits::kVec == 8);
  static constexpr int kOctets = Traits::kPerLane / 8;
  uint4 word[kOctets][2];  // the second of float32 only

  __device__ __forceinline__ StoredChannels(const void* data, int element_size, int64_t offset, int lane) {
#pragma unroll
    for (int o = 0; o < kOctets; ++o) {
      const auto from = static_cast<const uint8_t*>(data) + (offset + Traits::channel(lane, o)) * element_size;
      word[o][0] = __ldg(reinterpret_cast<const uint4*>(from));
      word[o][1] = element_size == 4 ? __ldg(reinterpret_cast<const uint4*>(from) + 1) : uint4{};
    }
  }
  __device__ __forceinline__ void to_floats(ScalarType dtype, float (&y)[Traits::kPerLane]) const {
#pragma unroll
    for (int o = 0; o < kOctets; ++o) {
      float* to = y + 8 * o;
      const uint32_t w[8] = {word[o][0].x, word[o][0].y, word[o][0].z, word[o][0].w,
                             word[o][1].x, word[o][1].y, word[o][1].z, word[o][1].w};
      if (dtype == ScalarType::BFloat16) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          to[2 * i] = __uint_as_float(w[i] << 16), to[2 * i + 1] = __uint_as_float(w[i] & 0xFFFF0000);
        }
      } else if (dtype == ScalarType::Half) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 pair = __half22float2(reinterpret_cast<const __half2&>(w[i]));
          to[2 * i] = pair.x, to[2 * i + 1] = pair.y;
        }
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) to[i] = __uint_as_float(w[i]);
      }
    }
  }
};

template <typename Traits>
__global__ void __launch_bounds__(kBlockTokens* Traits::kLanes) store_kernel(const __grid_constant__ StoreArguments a) {
  let_next_kernel_begin();  // that is paged_attention
  extern __shared__ uint4 staged[];
  __shared__ SharedCodebook shared;
  __shared__ Token tokens[kBlockTokens];
  const int kind = blockIdx.z, head = blockIdx.y;
  const int lane = threadIdx.x % Traits::kLanes, mine = threadIdx.x / Traits::kLanes,
            count = blockDim.x / Traits::kLanes;
  const int64_t first = int64_t{blockIdx.x} * count, token = first + mine;
  const RecordLayout& layout = a.layout;
  const Codebook& book = a.book[kind];

  // All loads are under way before the first of them is waited for.
  const int64_t from = (token < a.tokens ? token : 0) * a.heads[kind].token_stride + head * a.heads[kind].head_stride;
  const StoredChannels<Traits> stored(a.heads[kind].data, a.element_size, from, lane);
  const int64_t slot = token < a.tokens ? a.slots[token] : -1;
  float signs[Traits::kPerLane], y[Traits::kPerLane];
  load<Traits>(a.signs[kind], lane, signs);
  shared.fill(book, threadIdx.x, blockDim.x);
  const Token to = a.pages.token(slot, head, layout);
  if (lane == 0) tokens[mine] = to;
  stored.to_floats(a.dtype, y);
  if (kind == kKeys) to_centered<Traits>(y, a.channels.of_head(head, Traits::kDim), lane);
#pragma unroll
  for (int i = 0; i < Traits::kPerLane; ++i) y[i] = __fmul_rn(y[i], signs[i]);
  __syncthreads();

  Octet octet[Octets<Traits>::kCount];
  const uint16_t scale = encode_vector<Traits>(y, lane, shared, book, a.constants, octet);
  const int stride = row_stride(row_words(Traits::kDim, book.bits));
  uint32_t* rows = reinterpret_cast<uint32_t*>(staged);
  uint32_t* row = rows + mine * stride;
#pragma unroll
  for (int q = 0; q < Octets<Traits>::kCount; ++q) {
    write_octet(row, layout.octets, book.bits, Octets<Traits>::index(lane, q), octet[q]);
  }

  if (a.tail.data && to.tile) {
    const int64_t kept = a.tail.row(token);
    const int bytes = Traits::kDim * a.element_size;
    const uint8_t* source = static_cast<const uint8_t*>(a.heads[kind].data) + from * a.element_size;
    if (kept >= 0) copy_bytes(source, a.tail.at(kept, head, kind, bytes), bytes, lane, Traits::kLanes);
  }
  if (kind == kKeys) {
    __syncwarp();
    if (!to.tile) return;
    store_key(row, to, layout, lane, Traits::kLanes);
    if (lane == 0) *to.key_scale(layout) = scale;
    return;
  }
  // A block of 16 tokens that is written as a whole is put together first; else every token writes the bytes that it owns.
  const bool together = to.tile && to.tile == tokens[0].tile && to.number == tokens[0].number + mine;
  if (to.tile && lane == 0) *to.value_scale(layout) = scale;
  if (__syncthreads_and(together && count == kBlockTokens && tokens[0].number % kBlockTokens == 0)) {
    uint32_t* image = rows + kBlockTokens * stride;
    gather_block(rows, stride, image, {Traits::kDim, book.bits}, threadIdx.x, kBlockTokens * Traits::kLanes);
    __syncthreads();
    copy_bytes(reinterpret_cast<const uint8_t*>(image), tokens[0].value_block(layout), layout.value_block_bytes,
               threadIdx.x, kBlockTokens * Traits::kLanes);
  } else if (to.tile) {
    store_value(row, to, layout, lane, Traits::kLanes);
  }
}

// ---- Load -------------------------------------------------------------------------------------------------------------

struct LoadArguments {
  Pages pages;
  RecordLayout layout;
  const int32_t* table;    // [seqs, max_pages]
  const int32_t* lengths;  // [seqs]
  int64_t seqs, max_pages, max_length;
  int64_t blocks;  // of 16 tokens in a sequence
  const float* signs[2];
  const int8_t* levels[2];
  format::Channels channels;  // [kv_heads, d] of keys
  void* out[2];               // [seqs, max_length, kv_heads, d]
  ScalarType dtype;
};

// Groups of lanes of a block: at least the 16 tokens of a value block, about four warps.
template <typename Traits>
constexpr int load_tokens() {
  return Traits::kLanes < 128 / kBlockTokens ? 128 / Traits::kLanes : kBlockTokens;
}

template <typename Traits>
__global__ void __launch_bounds__(load_tokens<Traits>() * Traits::kLanes)
    load_kernel(const __grid_constant__ LoadArguments a) {
  constexpr int count = load_tokens<Traits>(), threads = count * Traits::kLanes;
  extern __shared__ uint4 staged[];
  __shared__ float table[32];
  __shared__ Token tokens[count];
  const int kind = blockIdx.z, head = blockIdx.y;
  const int lane = threadIdx.x % Traits::kLanes, mine = threadIdx.x / Traits::kLanes;
  const RecordLayout& layout = a.layout;
  const int bits = kind == kKeys ? layout.key_bits : layout.value_bits;
  fill_levels(table, a.levels[kind], bits, threadIdx.x, threads);

  // Where the tokens of the call's blocks of 16 are.
  const int64_t block = int64_t{blockIdx.x} * (count / kBlockTokens) + mine / kBlockTokens;
  const int64_t sequence = block / a.blocks, position = block % a.blocks * kBlockTokens + mine % kBlockTokens;
  Token from{nullptr, 0};
  bool exists = false;
  if (block < a.seqs * a.blocks) {
    exists = position < a.max_length;
    const int64_t page = position >> layout.page_shift;
    if (exists && position < a.lengths[sequence] && page < a.max_pages) {
      from = a.pages.token(a.table[sequence * a.max_pages + page], position & ((1 << layout.page_shift) - 1), head,
                           layout);
    }
  }
  if (lane == 0) tokens[mine] = from;
  __syncthreads();

  const ValueLayout values{Traits::kDim, layout.value_bits};
  uint32_t* rows = reinterpret_cast<uint32_t*>(staged);
  const int stride =
      row_stride(kind == kKeys ? (layout.key_row_bytes + layout.key_plane_bytes) / 4 : values.fragments());
  uint32_t* row = rows + mine * stride;
  if (kind == kKeys) {
    if (from.tile) load_key(row, from, layout, lane, Traits::kLanes);
    __syncwarp();
  } else {
    uint32_t* images = rows + count * stride;
    for (int b = 0; b < count / kBlockTokens; ++b) {
      const Token& first = tokens[b * kBlockTokens];
      if (first.tile) {
        copy_bytes(first.value_block(layout), reinterpret_cast<uint8_t*>(images) + b * layout.value_block_bytes,
                   layout.value_block_bytes, threadIdx.x, threads);
      }
    }
    __syncthreads();
    for (int b = 0; b < count / kBlockTokens; ++b) {
      scatter_block(images + b * layout.value_block_bytes / 4, rows + b * kBlockTokens * stride, stride, values,
                    threadIdx.x, threads);
    }
    __syncthreads();
  }

  float scale = 0;
  if (from.tile)
    scale = __half2float(__ushort_as_half(*(kind == kKeys ? from.key_scale(layout) : from.value_scale(layout))));
  Octet octet[Octets<Traits>::kCount];
#pragma unroll
  for (int q = 0; q < Octets<Traits>::kCount; ++q) {
    const int o = Octets<Traits>::index(lane, q);
    octet[q] =
        kind == kKeys ? key_octet(row, row + layout.key_row_bytes / 4, layout.octets, bits, o) : values.octet(row, o);
  }
  float y[Traits::kPerLane];
  decode_rotated<Traits>(octet, bits, table, scale, y);
  rotate_back<Traits>(y, a.signs[kind], lane);
  if (kind == kKeys) from_centered<Traits>(y, a.channels.of_head(head, Traits::kDim), lane);
  if (!exists) return;
  if (!from.tile) {
#pragma unroll
    for (int i = 0; i < Traits::kPerLane; ++i) y[i] = 0;
  }
  store_as<Traits>(y, lane, a.out[kind], a.dtype,
                   ((sequence * a.max_length + position) * a.pages.kv_heads + head) * Traits::kDim);
}

// ---- Host side --------------------------------------------------------------------------------------------------------

// Calls fn(std::integral_constant<int, m>, std::integral_constant<int, log2(n)>) for every d of a page record.
template <int M, int LOG_N = 4, typename Fn>
void dispatch_block(format::Split split, Fn&& fn) {
  if constexpr (M << LOG_N <= format::kMaxHeadDim) {
    if (split.block == 1 << LOG_N) return fn(std::integral_constant<int, M>{}, std::integral_constant<int, LOG_N>{});
    dispatch_block<M, LOG_N + 1>(split, fn);
  }
}

template <typename Fn>
void dispatch_head_dim(format::Split split, Fn&& fn) {
  switch (split.blocks) {
    case 1: return dispatch_block<1>(split, fn);
    case 3: return dispatch_block<3>(split, fn);
    case 5: return dispatch_block<5>(split, fn);
    case 7: return dispatch_block<7>(split, fn);
    default: return dispatch_block<9>(split, fn);
  }
}

Pages checked_pages(const Tensor& cache, const Tensor& first, const format::Record& record) {
  check_cache(cache, first, record);
  STD_TORCH_CHECK(aligned(cache.data_ptr(), 16), "cache must start at a multiple of 16 bytes");
  return {static_cast<uint8_t*>(cache.data_ptr()), cache.size(0), static_cast<int>(cache.size(1))};
}

// k or v itself, or a copy with aligned rows.
class HeadRows {
 public:
  explicit HeadRows(const Tensor& t) : tensor_(t), rows_(t, word_bytes(8, t.element_size())) {}
  Heads heads() const {
    if (rows_.data() == tensor_.data_ptr()) return {rows_.data(), tensor_.stride(0), tensor_.stride(1)};
    return {rows_.data(), tensor_.size(1) * tensor_.size(2), tensor_.size(2)};
  }

 private:
  Tensor tensor_;
  AlignedRows rows_;
};

TileSource tile_source(const Heads& heads, const Tensor& like, const Codebook& book, const Constant& signs,
                       const format::Channels& channels) {
  const int64_t size = like.element_size();
  return {static_cast<const uint8_t*>(heads.data),
          heads.token_stride * size,
          heads.head_stride * size,
          book,
          signs.data(),
          channels,
          like.size(2)};
}

Tail checked_tail(const Tensor& tail, const OptionalTensor& tail_slots, const OptionalTensor& seq_lens,
                  const OptionalTensor& cu_seqlens_q, const Tensor& k, int64_t sink_tokens) {
  STD_TORCH_CHECK(seq_lens.has_value(), "tail needs seq_lens");
  check_constant(*seq_lens, k, "seq_lens", ScalarType::Int, {-1});
  const int64_t seqs = seq_lens->size(0);
  if (cu_seqlens_q) {
    check_constant(*cu_seqlens_q, k, "cu_seqlens_q", ScalarType::Int, {seqs + 1});
  } else {
    STD_TORCH_CHECK(seqs == k.size(0), "without cu_seqlens_q every sequence has one new token, but there are ", seqs,
                    " sequences and ", k.size(0), " tokens");
  }
  check_constant(tail, k, "tail", k.scalar_type(), {-1, k.size(1), -1, 2, k.size(2)});
  STD_TORCH_CHECK(sink_tokens >= 0 && sink_tokens < tail.size(2), "sink_tokens is ", sink_tokens, " but the tail has ",
                  tail.size(2), " rows: supported are 0 to rows - 1");
  STD_TORCH_CHECK(tail_slots.has_value(), "tail needs tail_slots");
  check_constant(*tail_slots, k, "tail_slots", ScalarType::Long, {seqs});
  return {static_cast<uint8_t*>(tail.data_ptr()),
          static_cast<const int64_t*>(tail_slots->data_ptr()),
          static_cast<const int32_t*>(seq_lens->data_ptr()),
          cu_seqlens_q ? static_cast<const int32_t*>(cu_seqlens_q->data_ptr()) : nullptr,
          seqs,
          tail.size(0),
          static_cast<int>(tail.size(2)),
          static_cast<int>(sink_tokens),
          static_cast<int>(k.size(1))};
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
  const Pages pages = checked_pages(cache, k, record);
  STD_TORCH_CHECK(cache.size(1) == kv_heads, "cache has ", cache.size(1), " KV heads but k has ", kv_heads);
  STD_TORCH_CHECK(kv_heads <= kMaxGridY, "k has ", kv_heads, " KV heads, supported: up to ", kMaxGridY);
  check_constant(key_signs, k, "key_signs", ScalarType::Float, {d});
  check_constant(value_signs, k, "value_signs", ScalarType::Float, {d});
  check_center(center, k, kv_heads, d);
  check_scale_mode(key_scale_mode, "key_scale_mode");
  check_scale_mode(value_scale_mode, "value_scale_mode");
  const Codebook key_book =
      checked_codebook(k, key_levels, key_steps, key_bits, key_scale_mode, "key_levels", "key_steps");
  const Codebook value_book =
      checked_codebook(k, value_levels, value_steps, value_bits, value_scale_mode, "value_levels", "value_steps");
  check_constant(slot_mapping, k, "slot_mapping", ScalarType::Long, {tokens});
  const Tail ring = tail ? checked_tail(*tail, tail_slots, seq_lens, cu_seqlens_q, k, sink_tokens) : Tail{};
  if (tokens == 0 || kv_heads == 0) return;

  const HeadRows keys(k), values(v);
  const Constant k_signs(key_signs), v_signs(value_signs), constants(center);
  const format::Channels channels = channels_of(center, constants.data(), kv_heads, d);
  const Launch launch(k);
  const format::Split split = format::split_dim(d);
  const TileArguments tiles{{tile_source(keys.heads(), k, key_book, k_signs, channels),
                             tile_source(values.heads(), k, value_book, v_signs, {})},
                            2,
                            tokens,
                            static_cast<int>(kv_heads),
                            k.scalar_type(),
                            encode_constants(split),
                            pages,
                            RecordLayout(record),
                            static_cast<const int64_t*>(slot_mapping.data_ptr()),
                            ring,
                            nullptr,
                            nullptr,
                            0};
  if (launch_tiles(tiles, split, launch.stream())) return launch.check("cache_store");

  const StoreArguments arguments{{keys.heads(), values.heads()},
                                 {key_book, value_book},
                                 {k_signs.data(), v_signs.data()},
                                 channels,
                                 static_cast<const int64_t*>(slot_mapping.data_ptr()),
                                 tokens,
                                 pages,
                                 RecordLayout(record),
                                 ring,
                                 encode_constants(split),
                                 k.scalar_type(),
                                 static_cast<int>(k.element_size())};
  dispatch_head_dim(split, [&](auto m, auto log_n) {
    using Traits = StoreTraits<m, log_n>;
    // A value block is put together by one block of threads; few tokens rather use more multiprocessors.
    const bool few = tokens * kv_heads < kFewVectors;
    const int count = few ? std::max(kBlockTokens / 4, 32 / Traits::kLanes) : kBlockTokens;
    const int row_bytes = 4 * row_stride(row_words(Traits::kDim, static_cast<int>(std::max(key_bits, value_bits))));
    const dim3 grid(num_blocks(tokens, count), static_cast<unsigned>(kv_heads), 2);
    store_kernel<Traits>
        <<<grid, count * Traits::kLanes, count * row_bytes + record.value_block_bytes(), launch.stream()>>>(arguments);
    launch.check("cache_store");
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
  const Pages pages = checked_pages(cache, cache, record);
  check_output_dtype(dtype);
  const int64_t kv_heads = cache.size(1), d = head_dim;
  STD_TORCH_CHECK(kv_heads <= kMaxGridY, "cache has ", kv_heads, " KV heads, supported: up to ", kMaxGridY);
  check_constant(key_signs, cache, "key_signs", ScalarType::Float, {d});
  check_constant(value_signs, cache, "value_signs", ScalarType::Float, {d});
  check_center(center, cache, kv_heads, d);
  check_levels(key_levels, cache, key_bits, "key_levels");
  check_levels(value_levels, cache, value_bits, "value_levels");
  STD_TORCH_CHECK(max_seq_len >= 0, "max_seq_len is ", max_seq_len, ", supported: 0 and more");
  check_constant(seq_lens, cache, "seq_lens", ScalarType::Int, {-1});
  const int64_t seqs = seq_lens.size(0);
  check_constant(block_table, cache, "block_table", ScalarType::Int, {seqs, -1});

  Tensor k = torch::stable::new_empty(cache, {seqs, max_seq_len, kv_heads, d}, dtype);
  Tensor v = torch::stable::new_empty(cache, {seqs, max_seq_len, kv_heads, d}, dtype);
  if (k.numel() == 0) return {k, v};

  const Constant k_signs(key_signs), v_signs(value_signs), constants(center);
  const format::Channels channels = channels_of(center, constants.data(), kv_heads, d);
  const Launch launch(cache);
  const LoadArguments arguments{pages,
                                RecordLayout(record),
                                static_cast<const int32_t*>(block_table.data_ptr()),
                                static_cast<const int32_t*>(seq_lens.data_ptr()),
                                seqs,
                                block_table.size(1),
                                max_seq_len,
                                (max_seq_len + kBlockTokens - 1) / kBlockTokens,
                                {k_signs.data(), v_signs.data()},
                                {levels_data(key_levels), levels_data(value_levels)},
                                channels,
                                {k.data_ptr(), v.data_ptr()},
                                dtype};
  LoadTileArguments tiles{};
  for (int s = 0; s < 2; ++s) {
    tiles.source[s] = {s == kKeys ? record.key_bits : record.value_bits, arguments.levels[s], arguments.signs[s],
                       s == kKeys ? channels : format::Channels{}, arguments.out[s]};
  }
  tiles.sources = 2;
  tiles.heads = static_cast<int>(kv_heads);
  tiles.dtype = dtype;
  tiles.seqs = seqs;
  tiles.max_length = max_seq_len;
  tiles.pages = pages;
  tiles.layout = arguments.layout;
  tiles.table = arguments.table;
  tiles.lengths = arguments.lengths;
  tiles.max_pages = arguments.max_pages;
  if (launch_load_tiles(tiles, format::split_dim(d), launch.stream())) {
    launch.check("cache_load");
    return {k, v};
  }

  dispatch_head_dim(format::split_dim(d), [&](auto m, auto log_n) {
    using Traits = DefaultHadamard<m, log_n>;
    constexpr int count = load_tokens<Traits>();
    const int key_bytes = count * 4 * row_stride((record.key_row_bytes() + record.key_plane_bytes()) / 4);
    const int value_bytes = count * 4 * row_stride(ValueLayout{Traits::kDim, record.value_bits}.fragments()) +
                            count / kBlockTokens * record.value_block_bytes();
    const dim3 grid(num_blocks(seqs * arguments.blocks, count / kBlockTokens), static_cast<unsigned>(kv_heads), 2);
    load_kernel<Traits><<<grid, count * Traits::kLanes, std::max(key_bytes, value_bytes), launch.stream()>>>(arguments);
    launch.check("cache_load");
  });
  return {k, v};
}

}  // namespace
}  // namespace turboquant::cuda

STABLE_TORCH_LIBRARY_IMPL(turboquant, CUDA, m) {
  m.impl("cache_store", TORCH_BOX(&turboquant::cuda::cache_store));
  m.impl("cache_load", TORCH_BOX(&turboquant::cuda::cache_load));
}
