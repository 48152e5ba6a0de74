// mla_store, mla_load, mla_attention: latent attention straight from packed pages (docs/format.md section 12).
//
// A latent is key and value of every query head, so a call is attention with one KV head whose values are its keys.
// With R the rotation and s the scales of channels, q . latent = (R (q / s)) . (scale / 32 * levels) + q . center, and
// a sum of latents is the sum in the rotated space, rotated back and divided by s once, plus the center times the
// weights.
// The raw channels are scored beside the codes. Absent signs leave R out of both.
#include "calls/mla.h"

#include <optional>

#include "cpu/attention/panels.h"
#include "cpu/attention/spans.h"
#include "cpu/cache/batch.h"
#include "cpu/cache/destinations.h"
#include "cpu/codec/codebook.h"
#include "cpu/common/torch.h"
#include "cpu/common/vector.h"

namespace turboquant::cpu {
namespace {

const float* signs_of(const OptionalTensor& signs) { return signs ? checked_signs(*signs, "signs") : nullptr; }

// The exact tail of a cache of latents.
struct LatentTail {
  Tensor tensor;               // [max_seqs, rows, latent_dim + rope_dim]
  std::vector<int64_t> slots;  // [seqs], -1: it has no tail
  int64_t stride, row_size;    // of an entry, of a row, in elements
  int64_t ring, sink_tokens;

  // tensor and slots have been checked but for the values of the latter
  LatentTail(const Tensor& tail, const Tensor& tail_slots, int64_t sinks)
      : tensor(tail), slots(checked_tail_slots(tail_slots, tail.size(0))), stride(entry_stride(tail)),
        row_size(tail.size(2)), ring(tail.size(1) - sinks), sink_tokens(sinks) {}
  uint8_t* row(int64_t slot, int64_t row) const {
    return static_cast<uint8_t*>(element(tensor, format::latent_tail_offset(slot, stride, row, row_size)));
  }
};

// ---- mla_store, mla_load --------------------------------------------------------------------------------------------

// Writes the tokens that enter the tail: as they are, or in the rotated space.
void write_tail(const MlaStoreCall& c, const Destinations& to, const LatentTail& tail, const format::Channels& channels,
                const float* signs) {
  const int64_t r = c.latent_dim(), dr = c.rope_dim(), size = static_cast<int64_t>(c.latent.element_size());
  const format::Split split = format::split_dim(r);
  const int64_t latent_stride = c.latent.stride(0), rope_stride = c.rope.stride(0);
  parallel_for(c.tokens(), row_grain(r, 8), [&](int64_t begin, int64_t end) {
    std::vector<float> y(r);
    for (int64_t token = begin; token < end; ++token) {
      if (to.sequence[token] < 0) continue;
      const int64_t row = format::tail_row(to.position[token], tail.sink_tokens, tail.ring);
      uint8_t* out = tail.row(tail.slots[to.sequence[token]], row);
      std::memcpy(out + r * size, element(c.rope, token * rope_stride), dr * size);
      if (!c.rotated_tail) {
        std::memcpy(out, element(c.latent, token * latent_stride), r * size);
        continue;
      }
      to_float(c.latent, token * latent_stride, r, y.data());
      if (channels.scale) multiply(y.data(), channels.scale, r);
      if (signs) rotate(y.data(), signs, split);
      kernels().from_float(y.data(), dtype_of(c.latent), r, out);
    }
  });
}

void store(const MlaStoreCall& c, const format::LatentRecord& record) {
  const Codebook book = checked_codebook(c.latent, c.levels, c.steps, c.bits, "levels", "steps");
  const float* signs = signs_of(c.signs);
  const int64_t pages = std::min(c.cache.size(0), INT64_MAX / c.page_size);
  Destinations to = checked_destinations(c.slot_mapping, c.tokens(), pages * c.page_size);
  std::optional<LatentTail> tail;
  if (c.tail) {
    const Batch batch = checked_batch(*c.seq_lens, c.cu_seqlens_q, c.latent, c.tokens());
    tail.emplace(*c.tail, *c.tail_slots, c.sink_tokens);
    enter_tail(to, batch, tail->slots, tail->sink_tokens, tail->ring);
  }
  const int64_t r = c.latent_dim();
  const StoredLatents stored{.record = record,
                             .latent = c.latent.data_ptr(),
                             .rope = c.rope.data_ptr(),
                             .latent_stride = c.latent.stride(0),
                             .rope_stride = c.rope.stride(0),
                             .dtype = dtype_of(c.latent),
                             .rope_dtype = dtype_of(c.rope_dtype),
                             .signs = signs,
                             .quantiser = book.quantiser(r, static_cast<format::ScaleMode>(c.scale_mode)),
                             .channels = channels_of(c.center, data_of<float>(c.center), 1, r),
                             .pages = data_of<uint8_t>(c.cache),
                             .page_stride = entry_stride(c.cache),
                             .slots = to.slot.data()};
  parallel_for(c.tokens(), row_grain(r, 4 + 4 * stored.quantiser.num_steps),
               [&](int64_t begin, int64_t end) { kernels().store_latents(stored, begin, end); });
  if (tail) write_tail(c, to, *tail, stored.channels, signs);
}

void load(const MlaLoadCall& c, const format::LatentRecord& record, const Tensor& latent, const Tensor& rope) {
  const std::vector<int64_t> lengths = checked_loads(c, record.page_size);
  const Levels levels(record.width(), checked_levels(c.levels, c.cache, c.bits, "levels"));
  const LoadedLatents loaded{.record = record,
                             .pages = data_of<uint8_t>(c.cache),
                             .page_stride = entry_stride(c.cache),
                             .block_table = data_of<int32_t>(c.block_table),
                             .table_stride = c.block_table.stride(0),
                             .lengths = lengths.data(),
                             .max_seq_len = c.max_seq_len,
                             .levels = levels.of,
                             .signs = signs_of(c.signs),
                             .channels = channels_of(c.center, data_of<float>(c.center), 1, c.latent_dim),
                             .rope_dtype = dtype_of(c.rope_dtype),
                             .dtype = dtype_of(c.dtype)};
  parallel_for(c.seqs() * c.max_seq_len, row_grain(c.latent_dim, 8), [&](int64_t begin, int64_t end) {
    kernels().load_latents(loaded, begin, end, latent.data_ptr(), rope.data_ptr());
  });
}

// ---- mla_attention --------------------------------------------------------------------------------------------------

// The panels of 128, 256 and 512 channels, made once per process.
const LatentPanelMap& latent_panels(int latent_dim) {
  static const LatentPanelMap small(128), middle(256), large(512);
  return latent_dim == 128 ? small : latent_dim == 256 ? middle : large;
}

// A checked call, as SpanAttention takes it.
struct LatentAttention {
  const MlaAttentionCall& call;
  Windows windows;
  int64_t q_heads, kv_heads = 1, key_dim, value_dim;
  format::Split split;
  const float* signs;         // [latent_dim] or null
  format::Channels channels;  // [latent_dim]
  const float* sink_logits = nullptr;
  std::optional<LatentTail> tail;
  std::vector<uint8_t> own;  // the call's own tokens, [tokens, key_dim]
  LatentKeys latents;
  AttendedKeys& keys = latents.attended;
  Layout layout;
  int max_key_level;
  float softmax_scale;

  LatentAttention(const MlaAttentionCall& c, const format::LatentRecord& record)
      : call(c), q_heads(c.q_heads()), key_dim(c.latent_dim() + c.rope_dim()), value_dim(c.latent_dim()),
        split(format::split_dim(c.latent_dim())), signs(signs_of(c.signs)),
        channels(channels_of(c.center, data_of<float>(c.center), 1, c.latent_dim())), layout(row_layout(record.row())),
        softmax_scale(static_cast<float>(c.softmax_scale)) {
    windows.batch = checked_batch(c.seq_lens, c.cu_seqlens_q, c.q_latent, c.tokens());
    check_max_q_len(windows.batch, c.max_q_len);
    if (c.tail) {
      tail.emplace(*c.tail, *c.tail_slots, c.sink_tokens);
      windows.tail_slots = tail->slots;
      windows.tail_ring = tail->ring;
      windows.sink_tokens = tail->sink_tokens;
      windows.tail_valid = data_of<int32_t>(c.tail_valid);
    }
    windows.recent_window = c.recent_window;
    windows.own = c.latent_new.has_value();
    if (windows.own) join_own();
    const Levels levels(record.width(), checked_levels(c.levels, c.q_latent, c.bits, "levels"));
    max_key_level = greatest_level(record.width(), levels.of);
    latents.record = record;
    latents.pages = data_of<uint8_t>(c.cache);
    latents.page_stride = entry_stride(c.cache);
    latents.rope_dtype = dtype_of(c.rope_dtype);
    keys.head_dim = record.latent_dim;
    keys.panels = latent_panels(record.latent_dim).get();
    std::copy_n(levels.of, kTableLevels, keys.key_levels);
    std::copy_n(levels.of, kTableLevels, keys.value_levels);
    keys.soft_cap = 0;
    keys.rope_dim = record.rope_dim;
    keys.rope_factor = softmax_scale;
    check_pages_of(windows, data_of<int32_t>(c.block_table), c.block_table.stride(0), c.block_table.size(1),
                   c.cache.size(0), record.page_size);
  }
  LatentAttention(const LatentAttention&) = delete;

  // A key is a latent with its raw channels behind, as in the tail.
  void join_own() {
    const int64_t size = static_cast<int64_t>(call.q_latent.element_size()), tokens = call.tokens();
    own.resize(tokens * key_dim * size);
    for (int64_t t = 0; t < tokens; ++t) {
      uint8_t* to = own.data() + t * key_dim * size;
      std::memcpy(to, element(*call.latent_new, t * call.latent_new->stride(0)), value_dim * size);
      std::memcpy(to + value_dim * size, element(*call.rope_new, t * call.rope_new->stride(0)),
                  (key_dim - value_dim) * size);
    }
  }

  void load_query(int64_t token, int64_t head, float* to) const {
    const Tensor &latent = call.q_latent, &rope = call.q_rope;
    to_float(latent, token * latent.stride(0) + head * latent.stride(1), value_dim, to);
    to_float(rope, token * rope.stride(0) + head * rope.stride(1), key_dim - value_dim, to + value_dim);
  }
  float rotate_query(int64_t, const float* query, float* to) const {
    std::copy_n(query, value_dim, to);
    if (channels.inverse) multiply(to, channels.inverse, value_dim);
    if (signs) rotate(to, signs, split);
    return channels.center ? dot(query, channels.center, value_dim) : 0;
  }

  int64_t scratch_bytes() const { return kernels().attend_latents_scratch_bytes(latents); }
  void attend(int64_t sequence, int64_t, int64_t begin, int64_t end, const QueryRows& rows, const PartialRows& out,
              void* scratch) const {
    const int32_t* table = data_of<int32_t>(call.block_table) + sequence * call.block_table.stride(0);
    kernels().attend_latents(latents, table, begin, end, rows, out, scratch);
  }

  ExactKeys exact_keys(int64_t sequence, int64_t) const {
    ExactKeys exact{};
    exact.tail_row = key_dim;  // a latent's value is the latent: it begins where the key does
    exact.new_begin = windows.new_begin(sequence);
    exact.dtype = dtype_of(call.q_latent);
    exact.key_dim = key_dim, exact.value_dim = value_dim;
    exact.ring = 1;
    if (windows.has_tail(sequence)) {
      exact.tail = tail->row(tail->slots[sequence], 0);
      exact.sink_tokens = tail->sink_tokens, exact.ring = tail->ring;
    }
    if (windows.own) {
      const int64_t size = static_cast<int64_t>(call.q_latent.element_size());
      exact.new_keys = own.data() + windows.batch.query_begin[sequence] * key_dim * size;
      exact.new_values = exact.new_keys;
      exact.new_key_stride = exact.new_value_stride = key_dim;
    }
    return exact;
  }
  void rotate_sum(float weight, float* sum) const {
    if (signs) rotate_back(sum, signs, split);
    if (channels.inverse) multiply(sum, channels.inverse, value_dim);
    for (int64_t c = 0; channels.center && c < value_dim; ++c) sum[c] += weight * channels.center[c];
  }
};

void attend(const MlaAttentionCall& call, const format::LatentRecord& record, const Tensor& out, const Tensor& lse) {
  const LatentAttention a(call, record);
  SpanAttention<LatentAttention>(a).run(out, data_of<float>(lse));
}

}  // namespace
}  // namespace turboquant::cpu

STABLE_TORCH_LIBRARY_IMPL(turboquant, CPU, m) {
  using namespace turboquant;
  m.impl("mla_store", boxed<&mla_store<cpu::store>, kMlaStore>);
  m.impl("mla_load", boxed<&mla_load<cpu::load>>);
  m.impl("mla_attention", boxed<&mla_attention<cpu::attend>, kMlaAttention>);
  m.impl("mla_attention_out", boxed<&mla_attention_out<cpu::attend>, kMlaAttentionOut>);
}
