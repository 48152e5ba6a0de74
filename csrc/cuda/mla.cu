// mla_store, mla_load: latents in packed pages (docs/format.md section 12) and their exact tail, by the codec's generic
// kernels; mla/store_step.cuh stores few tokens. mla_attention: describes a call for its kernels (mla/call.cuh).
// choices/mla.h chooses among the kernels of both.
#include "calls/mla.h"

#include <algorithm>
#include <optional>

#include "choices/mla.h"
#include "cuda/attention/arguments.cuh"
#include "cuda/codec/arguments.cuh"
#include "cuda/codec/generic.cuh"
#include "cuda/codec/lanes.cuh"
#include "cuda/common/device_facts.cuh"
#include "cuda/mla/launch.cuh"
#include "cuda/mla/store_step.cuh"

namespace turboquant::cuda {
namespace {

// ---- Records and tails ---------------------------------------------------------------------------------------------

// Latents have 128, 256 or 512 channels.
using LatentLanes = LaneShape<32, false>;
using LatentVector = LaneVector<32, false>;

// A record of latents as the codec sees it: one head of keys, and raw channels where values would be.
RecordLayout layout_of(const format::LatentRecord& r) {
  RecordLayout x{};
  x.head_dim = r.latent_dim, x.octets = r.latent_dim / 8, x.key_bits = r.bits;
  x.page_shift = format::log2_of(r.page_size), x.tile_shift = format::log2_of(format::LatentRecord::kTileTokens);
  x.record_bytes = r.record_bytes(), x.tile_bytes = r.tile_bytes();
  x.key_row_bytes = r.row_bytes(), x.key_plane_bytes = r.plane_bytes();
  x.key_planes = r.planes(), x.value_blocks = r.ropes(), x.key_scales = r.scales();
  return x;
}

// Stores a latent's codes from its row of octets. A warp calls it.
__device__ __forceinline__ void store_codes(const uint32_t* row, const Token& to, const RecordLayout& r, int lane) {
  uint4* out = reinterpret_cast<uint4*>(to.key_row(r));
  const int words = r.key_row_bytes / format::kLatentWord;
  for (int w = lane; w < words; w += 32) {
    uint32_t x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = key_word(row, r.octets, r.key_width(), 4 * w + i);
    out[format::swapped_word(words, to.number, w)] = make_uint4(x[0], x[1], x[2], x[3]);
  }
  store_plane(row, to, r, lane, 32);
}
// Loads them, as load_key does.
__device__ __forceinline__ void load_codes(uint32_t* row, const Token& from, const RecordLayout& r, int lane) {
  const uint4* in = reinterpret_cast<const uint4*>(from.key_row(r));
  const int words = r.key_row_bytes / format::kLatentWord;
  for (int w = lane; w < words; w += 32) {
    const uint4 x = in[format::swapped_word(words, from.number, w)];
    row[4 * w] = x.x, row[4 * w + 1] = x.y, row[4 * w + 2] = x.z, row[4 * w + 3] = x.w;
  }
  load_plane(row, from, r, lane, 32);
}

// Rows of a matrix: the tensor itself, or a copy if rows do not start at multiples of `bytes`.
class MatrixRows {
 public:
  MatrixRows(const Tensor& t, int64_t bytes) : rows_(t, bytes) {
    stride_ = rows_.data() != t.data_ptr() || t.size(0) <= 1 ? t.size(1) : t.stride(0);
  }
  const void* data() const { return rows_.data(); }
  int64_t stride() const { return stride_; }  // in elements

 private:
  AlignedRows rows_;
  int64_t stride_;
};

// ---- Store ----------------------------------------------------------------------------------------------------------

// Warps of a block that stores: as many as it has tokens at a time, within these limits. More warps hide more latency,
// which is worth the registers that they spill. Warps without a token help to fill the table.
constexpr int kMostStoreWarps = 32, kLeastStoreWarps = 16;

// A token's row of the tail. A warp calls it.
__device__ __forceinline__ void store_exact(const LatentStore& a, const LatentLanes& shape, int64_t token, uint8_t* to,
                                            int lane) {
  if (!a.rotated_tail) return a.store_exact(token, shape.d, to, lane);
  LatentVector v;
  v.load(shape, a.latent, a.dtype, token * a.latent_stride, a.signs, {nullptr, a.channels.scale, nullptr}, lane);
  v.transform(shape, true, lane);
  v.for_each_pair(shape, [&](int e) {
    const float pair[2] = {v.y[e], v.y[e + 1]};
    store_floats_as<2>(pair, to, a.dtype, v.channel(e, lane));
  });
  a.store_exact_raw(token, shape.d, to, lane);
}

// A warp stores a token. count: tokens that a block has at a time. Its other threads only help to fill the table.
__global__ void __launch_bounds__(32 * kMostStoreWarps)
    store_latents(const __grid_constant__ LatentStore a, const __grid_constant__ LatentLanes shape,
                  const __grid_constant__ int count) {
  let_next_kernel_begin();  // the next kernel is usually mla_attention's
  extern __shared__ uint4 dynamic[];
  __shared__ SharedCodebook shared;
  const int mine = threadIdx.x / 32, lane = threadIdx.x % 32, d = shape.d, octets = a.layout.octets;
  uint32_t* row = reinterpret_cast<uint32_t*>(dynamic) + mine * 2 * octets;
  CandidateTable table(reinterpret_cast<uint32_t*>(dynamic) + count * 2 * octets, d);
  shared.fill(a.book, threadIdx.x, blockDim.x);
  __syncthreads();
  table.fill(shared, a.book, 0, blockDim.x);
  __syncthreads();
  if (mine >= count) return;

#pragma unroll 1
  for (int64_t first = int64_t{blockIdx.x} * count; first < a.tokens; first += int64_t{gridDim.x} * count) {
    const int64_t token = min(first + mine, a.tokens - 1);
    const Token to = first + mine < a.tokens ? a.pages.token(a.slots[token], 0, a.layout) : Token{};
    if (uint8_t* exact = to.tile ? a.exact_row(token, d) : nullptr) store_exact(a, shape, token, exact, lane);
    LatentVector v;
    const auto load = [&](auto& vector) {
      vector.load(shape, a.latent, a.dtype, token * a.latent_stride, a.signs, a.channels, lane);
    };
    load(v);
    const uint16_t scale = encode_in_lanes(v, load, shape, lane, shared, table, 32 * count, a.book, a.constants, row);
    __syncwarp();
    if (to.tile) {
      store_codes(row, to, a.layout, lane);
      if (lane == 0) *to.key_scale(a.layout) = scale;
      a.store_raw(token, to, lane);
    }
    __syncwarp();  // before the row is written again
  }
}

Tail exact_latents(const MlaStoreCall& c) {
  if (!c.tail) return {};
  return tail_of(*c.tail, c, c.tail->size(1));
}

void store_tokens(const MlaStoreCall& c, const format::LatentRecord& record) {
  check_alignment(c);
  const Pages pages = pages_of(c.cache, 1);
  if (c.tokens() == 0) return;
  const Launch launch(c.latent);
  const MatrixRows latent(c.latent, 8), rope(c.rope, 2);
  const Constant<float> signs(c.signs), center(c.center);
  const int d = record.latent_dim;
  const format::Split split = format::split_dim(d);
  LatentLanes shape(split);
  shape.transforms = c.signs.has_value();
  EncodeConstants constants = EncodeConstants::of(split);
  if (!c.signs) constants.norm = 1;
  const LatentStore a{.latent = latent.data(),
                      .rope = rope.data(),
                      .latent_stride = latent.stride(),
                      .rope_stride = rope.stride(),
                      .tokens = c.tokens(),
                      .rope_dim = record.rope_dim,
                      .dtype = dtype_of(c.latent),
                      .rope_dtype = dtype_of(c.rope_dtype),
                      .book = checked_codebook(c.latent, c.levels, c.steps, c.bits, c.scale_mode, "levels", "steps"),
                      .signs = signs.data(),
                      .channels = channels_of(c.center, center.data(), 1, d),
                      .constants = constants,
                      .pages = pages,
                      .layout = layout_of(record),
                      .slots = slots_of(c.slot_mapping),
                      .tail = exact_latents(c),
                      .rotated_tail = c.rotated_tail};
  const Device& device = current_device();
  const LatentStoreShape call{d, a.book.width, a.book.num_steps, a.dtype, shape.transforms, a.rotated_tail, a.tokens};
  if (choose_latent_store(call, device.facts).kernel == LatentStoreKernel::kStep) {
    launch_store_step(a, launch.stream());
    return launch.check("mla_store");
  }
  // A block for each multiprocessor, or fewer: it fills its table once, for all tokens that it stores.
  const int64_t multiprocessors = device.facts.multiprocessors;
  const int64_t each = divide_up(a.tokens, multiprocessors);
  const int count = static_cast<int>(std::min<int64_t>(each, kMostStoreWarps));
  const unsigned blocks = static_cast<unsigned>(std::min(divide_up(a.tokens, count), multiprocessors));
  const int words = count * 2 * a.layout.octets + CandidateTable::room(d);
  const int threads = 32 * std::max(count, kLeastStoreWarps);
  store_latents<<<blocks, threads, 4 * words, launch.stream()>>>(a, shape, count);
  launch.check("mla_store");
}

// ---- Load -----------------------------------------------------------------------------------------------------------

struct LatentLoad {
  Pages pages;
  RecordLayout layout;
  const int32_t *table, *lengths;  // [seqs, max_pages], [seqs]
  int64_t seqs, table_stride, max_pages, max_length;
  const float* signs;         // [r]; null: no transform
  const int8_t* levels;       // [2^bits]; null: uniform grid
  format::Channels channels;  // [r]
  void *latent, *rope;        // [seqs, max_length, r], [seqs, max_length, dr] of `dtype`
  int rope_dim;
  Dtype dtype, rope_dtype;
};

constexpr int kLoadWarps = 4;  // of a block

// A warp loads a token.
__global__ void __launch_bounds__(32 * kLoadWarps)
    load_latents(const __grid_constant__ LatentLoad a, const __grid_constant__ LatentLanes shape) {
  extern __shared__ uint4 dynamic[];
  __shared__ float table[32];
  const int lane = threadIdx.x % 32, mine = threadIdx.x / 32, d = shape.d;
  const Width width = a.layout.key_width();
  fill_levels(table, a.levels, width, threadIdx.x, blockDim.x);
  __syncthreads();
  const int64_t number = int64_t{blockIdx.x} * kLoadWarps + mine, sequence = number / a.max_length,
                position = number % a.max_length, page = position >> a.layout.page_shift;
  if (sequence >= a.seqs) return;
  Token from{nullptr, 0};
  if (position < a.lengths[sequence] && page < a.max_pages) {
    from = a.pages.token(a.table[sequence * a.table_stride + page], position & ((1 << a.layout.page_shift) - 1), 0,
                         a.layout);
  }
  const int64_t at = number * d, rope_at = number * a.rope_dim;
  if (!from.tile) {
    for (int i = lane; i < d; i += 32) store_float(a.latent, a.dtype, at + i, 0);
    for (int i = lane; i < a.rope_dim; i += 32) store_float(a.rope, a.dtype, rope_at + i, 0);
    return;
  }
  float* y = reinterpret_cast<float*>(dynamic) + mine * generic_words(d);
  uint32_t* row = reinterpret_cast<uint32_t*>(y) + generic_stride(d);
  load_codes(row, from, a.layout, lane);
  const float scale = __half2float(__ushort_as_half(*from.key_scale(a.layout)));
  __syncwarp();
  for (int o = lane; o < a.layout.octets; o += 32) {
    const Octet octet = key_octet(row, row + a.layout.key_row_bytes / 4, a.layout.octets, width, o);
    put_generic_octet(y, d, o, octet, width, table, scale);
  }
  __syncwarp();
  store_from_lanes(y, shape, a.signs, a.channels, a.latent, a.dtype, at, true, lane);
  const uint8_t* rope = rope_of(from, a.layout, a.rope_dim);
  for (int i = lane; i < a.rope_dim; i += 32) {
    store_float(a.rope, a.dtype, rope_at + i, load_float(rope, a.rope_dtype, place_of_raw(from, a.rope_dim, i)));
  }
}

void load_tokens(const MlaLoadCall& c, const format::LatentRecord& record, const Tensor& latent, const Tensor& rope) {
  const Pages pages = pages_of(c.cache, 1);
  if (latent.numel() == 0) return;
  const Launch launch(c.cache);
  const Constant<float> signs(c.signs), center(c.center);
  const int d = record.latent_dim;
  LatentLanes shape(format::split_dim(d));
  shape.transforms = c.signs.has_value();
  const LatentLoad a{.pages = pages,
                     .layout = layout_of(record),
                     .table = static_cast<const int32_t*>(c.block_table.data_ptr()),
                     .lengths = static_cast<const int32_t*>(c.seq_lens.data_ptr()),
                     .seqs = c.seqs(),
                     .table_stride = c.block_table.stride(0),
                     .max_pages = c.max_pages(),
                     .max_length = c.max_seq_len,
                     .signs = signs.data(),
                     .levels = levels_data(c.levels),
                     .channels = channels_of(c.center, center.data(), 1, d),
                     .latent = latent.data_ptr(),
                     .rope = rope.data_ptr(),
                     .rope_dim = record.rope_dim,
                     .dtype = dtype_of(c.dtype),
                     .rope_dtype = dtype_of(c.rope_dtype)};
  load_latents<<<num_blocks(a.seqs * a.max_length, kLoadWarps), 32 * kLoadWarps, 4 * kLoadWarps * generic_words(d),
                 launch.stream()>>>(a, shape);
  launch.check("mla_load");
}

// ---- Attention ------------------------------------------------------------------------------------------------------

void start(const mla::Latents& x, const Tensor& q, const Device& device, cudaStream_t stream) {
  const LatentShape shape{.latent_dim = x.record.latent_dim,
                          .codes = {x.record.width(), x.levels ? format::Grid::kLevels : format::Grid::kUniform},
                          .dtype = x.a.dtype,
                          .rope_dtype = x.rope_dtype,
                          .rows = x.most_rows()};
  const LatentKernel kernel = choose_latents(shape, device.facts).kernel;
  // The other kernels divide their blocks among the sequences, so they need one.
  if (kernel == LatentKernel::kGeneral || x.a.seqs == 0) return mla::attend_general(x, stream);
  mla::LatentLaunch launch(x, kernel, device);
  const Tensor workspace = new_tensor(q, {launch.workspace_bytes()}, ScalarType::Byte, "the work space");
  launch.run(workspace.data_ptr(), stream);
}

void attend(const MlaAttentionCall& c, const format::LatentRecord& record, const Tensor& out, const Tensor& lse) {
  check_alignment(c);
  const Pages pages = pages_of(c.cache, 1);
  if (out.numel() == 0) return;
  const Launch launch(c.q_latent);
  const HeadVectors q(c.q_latent), q_rope(c.q_rope);
  const Constant<float> signs(c.signs), center(c.center);

  mla::Latents x{};
  x.record = record;
  x.q_rope = q_rope.data(), x.rope_token_stride = q_rope.token_stride(), x.rope_head_stride = q_rope.head_stride();
  x.rope_dtype = dtype_of(c.rope_dtype);
  x.signs = signs.data(), x.levels = levels_data(c.levels);

  Attention& a = x.a;
  a.q = q.data(), a.q_token_stride = q.token_stride(), a.q_head_stride = q.head_stride();
  a.out = out.data_ptr(), a.lse = static_cast<float*>(lse.data_ptr());
  a.dtype = dtype_of(c.q_latent);
  a.q_heads = a.group = checked_int(c.q_heads(), "the number of query heads");
  a.kv_heads = 1;
  a.softmax_scale = static_cast<float>(c.softmax_scale);
  add_sequences(a, c, record.page_size);
  a.most_queries = INT32_MAX;
  a.pages = pages.data, a.num_pages = pages.num_pages, a.page_stride = pages.page_stride;
  a.record = {record.latent_dim, record.page_size, record.bits, 0};
  a.channels = channels_of(c.center, center.data(), 1, record.latent_dim);

  if (c.tail) add_tail(a, c, c.tail->size(1));
  std::optional<MatrixRows> latent_new, rope_new;
  if (c.latent_new) {
    latent_new.emplace(*c.latent_new, 16), rope_new.emplace(*c.rope_new, 16);
    a.new_keys = latent_new->data(), a.new_values = rope_new->data();
    a.new_key_token_stride = latent_new->stride(), a.new_value_token_stride = rope_new->stride();
  }
  start(x, c.q_latent, device_of(c.q_latent.get_device_index()), launch.stream());
}

}  // namespace
}  // namespace turboquant::cuda

STABLE_TORCH_LIBRARY_IMPL(turboquant, CUDA, m) {
  using namespace turboquant;
  m.impl("mla_store", boxed<&mla_store<turboquant::cuda::store_tokens>, kMlaStore>);
  m.impl("mla_load", boxed<&mla_load<turboquant::cuda::load_tokens>>);
  m.impl("mla_attention", boxed<&mla_attention<turboquant::cuda::attend>, kMlaAttention>);
  m.impl("mla_attention_out", boxed<&mla_attention_out<turboquant::cuda::attend>, kMlaAttentionOut>);
}
