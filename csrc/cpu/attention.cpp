// paged_attention, merge_attention: softmax attention straight from packed pages.
//
// Keys are never rotated back: with R the rotation and s the scales of channels, q . key = (R (q / s)) . (scale / 32 * levels) +
// q . center, so the query is rotated once. Values are summed in the rotated space and the sum is rotated back once. Keys of the exact tail (sinks and recent
// window, docs/format.md section 9) are scored and summed unrotated and join in the end.
//
// One piece of work is a span of keys of one (sequence, KV head): all its queries and query heads share every key and value
// that is unpacked (attention.h). The partial results of spans and of the tail are joined in a fixed order.
#include "calls/attention.h"
#include "cpu/common/batch.h"

namespace turboquant::cpu {
namespace {

// Everything a call is about, checked.
struct Attention {
  Tensor q;  // [tokens, q_heads, d]
  int64_t tokens, q_heads, kv_heads, d, group;
  Batch batch;
  const RecordMap* map;
  const uint8_t* pages;  // [num_pages, kv_heads, record_bytes]
  const int32_t* table;  // [seqs, max_pages]
  int64_t max_pages;
  const float* key_signs;
  const float* value_signs;
  format::Channels channels;                     // [kv_heads, d]
  const float* sink_logits;                      // [q_heads] or null
  std::vector<int8_t> key_levels, value_levels;  // [2^bits]; empty for 8 bits
  int max_key_level;
  std::optional<TailView> tail;
  const int32_t* tail_valid;  // [max_seqs, 2] or null
  int64_t recent_window, sliding_window;
  float softmax_scale, soft_cap;

  const uint8_t* record(int64_t s, int64_t head, int64_t key) const {
    const int64_t page = table[s * max_pages + key / map->record.page_size];
    return pages + (page * kv_heads + head) * map->record.record_bytes();
  }
  // Keys [first_visible(p), p] are visible to a query at position p.
  int64_t first_visible(int64_t position) const {
    return sliding_window > 0 ? std::max<int64_t>(0, position - sliding_window + 1) : 0;
  }
  // The two runs of exact keys of a query at `position`: [0, sinks) and [recent, position].
  struct Exact {
    int64_t sinks, recent;
    bool holds(int64_t key) const { return key < sinks || key >= recent; }
  };
  Exact exact(int64_t s, int64_t position) const {
    if (!tail || tail->slots[s] < 0) return {0, position + 1};
    const int32_t* valid = tail_valid ? tail_valid + 2 * tail->slots[s] : nullptr;
    const int64_t sinks = valid ? std::min<int64_t>(valid[0], tail->sink_tokens) : tail->sink_tokens;
    const int64_t recent = std::max(position - recent_window + 1, valid ? std::max<int64_t>(valid[1], 0) : 0);
    return {std::max<int64_t>(sinks, 0), std::min(std::max(recent, tail->sink_tokens), position + 1)};
  }
};

// One query head of one new token.
struct Row {
  int64_t token, head, position;
};

constexpr int64_t kTileRows = 128;     // rows of one piece of work: their sums stay in the cache
constexpr int64_t kSpanTokens = 2048;  // keys of one piece of work; a multiple of kBlockTokens

// Rows that share keys: queries of one sequence, query heads of one KV head; and how their keys are cut into spans. The cut
// depends on lengths only, so results do not depend on the number of threads.
struct Tile {
  int64_t sequence, kv_head;
  int64_t first_row, rows;  // among those of (sequence, KV head), query-major
  int64_t begin, end;       // packed keys that some row sees, begin at a block
  int64_t at;               // index of its first row among all tiles' rows
  int64_t part;             // index of its first partial result
  int64_t spans() const { return (end - begin + kSpanTokens - 1) / kSpanTokens; }
};

// Everything between the queries and the output, one row after the other.
struct Workspace {
  std::vector<float> plain;        // queries, [rows, d]
  Scratch factors{0};              // the same rotated, as integers: [rows, factor_bytes]
  std::vector<float> unit, shift;  // [rows]
  std::vector<int32_t> correction;
  std::vector<int64_t> first, end;                        // packed keys of a row
  std::vector<int64_t> visible, sinks, recent, position;  // and its exact ones
  std::vector<float> max, sum, sums;                      // partial results: [parts], [parts], [parts, d]
};
// The level of every code; 8-bit codes need no list.
std::vector<int8_t> level_list(int bits, const int8_t* levels) {
  std::vector<int8_t> list(bits == 8 ? 0 : 1 << bits);
  for (size_t c = 0; c < list.size(); ++c) list[c] = static_cast<int8_t>(format::level_of_code(bits, levels, c));
  return list;
}

int64_t largest_query_count(const Batch& batch) {
  int64_t most = 0;
  for (int64_t s = 0; s < batch.count; ++s) most = std::max(most, batch.queries(s));
  return most;
}

Attention checked_attention(const AttentionCall& c, const format::Record& record) {
  const Tensor& q = c.q;
  const int64_t tokens = c.tokens(), q_heads = c.q_heads(), kv_heads = c.kv_heads(), d = c.head_dim();
  Batch batch = checked_batch(c.seq_lens, c.cu_seqlens_q, q, tokens);
  STD_TORCH_CHECK(largest_query_count(batch) <= c.max_q_len, "a sequence has ", largest_query_count(batch),
                  " queries, more than max_q_len ", c.max_q_len);
  std::optional<TailView> ring;
  if (c.tail) ring = checked_tail(*c.tail, c.tail_slots, q, batch.count, kv_heads, d, c.sink_tokens);

  Attention a{q,
              tokens,
              q_heads,
              kv_heads,
              d,
              q_heads / kv_heads,
              std::move(batch),
              &record_map(record),
              static_cast<const uint8_t*>(c.cache.data_ptr()),
              static_cast<const int32_t*>(c.block_table.data_ptr()),
              c.block_table.size(1),
              static_cast<const float*>(c.key_signs.data_ptr()),
              static_cast<const float*>(c.value_signs.data_ptr()),
              channels_of(c.center, floats_of(c.center), kv_heads, d),
              c.sink_logits ? static_cast<const float*>(c.sink_logits->data_ptr()) : nullptr,
              level_list(record.key_bits, checked_levels(c.key_levels, q, c.key_bits, "key_levels")),
              level_list(record.value_bits, checked_levels(c.value_levels, q, c.value_bits, "value_levels")),
              0,
              ring,
              c.tail && c.tail_valid ? static_cast<const int32_t*>(c.tail_valid->data_ptr()) : nullptr,
              c.recent_window,
              c.sliding_window,
              static_cast<float>(c.softmax_scale),
              static_cast<float>(c.soft_cap)};
  a.max_key_level = a.key_levels.empty() ? 127 : a.key_levels.back();
  for (int64_t s = 0; s < a.batch.count; ++s) {
    if (a.batch.queries(s) == 0 || a.batch.length[s] == 0) continue;
    const int64_t first = a.first_visible(a.batch.position(s, 0));
    check_pages(a.table, a.max_pages, c.cache.size(0), record.page_size, s, first, a.batch.length[s]);
  }
  return a;
}

// Cuts the work of a call into tiles.
std::vector<Tile> tiles_of(const Attention& a) {
  std::vector<Tile> tiles;
  int64_t at = 0, part = 0;
  for (int64_t s = 0; s < a.batch.count; ++s) {
    const int64_t rows = a.batch.queries(s) * a.group;
    for (int64_t head = 0; head < a.kv_heads; ++head) {
      for (int64_t first = 0; first < rows; first += kTileRows) {
        Tile t{s, head, first, std::min(kTileRows, rows - first), INT64_MAX, 0, at, part};
        for (int64_t i = first / a.group; i <= (first + t.rows - 1) / a.group; ++i) {
          const int64_t position = a.batch.position(s, i);
          const Attention::Exact exact = a.exact(s, position);
          const int64_t from = std::max(a.first_visible(position), exact.sinks),
                        end = std::min(position + 1, exact.recent);
          if (from >= end) continue;
          t.begin = std::min(t.begin, from);
          t.end = std::max(t.end, end);
        }
        t.begin = t.end == 0 ? 0 : t.begin / kBlockTokens * kBlockTokens;
        at += t.rows;
        part += (t.spans() + 1) * t.rows;  // the exact keys come after the spans
        tiles.push_back(t);
      }
    }
  }
  return tiles;
}

class PagedAttention {
 public:
  explicit PagedAttention(const Attention& a) : a_(a), tiles_(tiles_of(a)), split_(format::split_dim(a.d)) {
    keys_.record = a.map->record;
    keys_.panels = a.map->panels.get();
    keys_.pages = a.pages;
    keys_.kv_heads = a.kv_heads;
    keys_.soft_cap = a.soft_cap;
    std::copy(a.key_levels.begin(), a.key_levels.end(), keys_.key_levels);
    std::copy(a.value_levels.begin(), a.value_levels.end(), keys_.value_levels);
    key_layout_ = kernels().key_layout(keys_.record);
    factor_bytes_ = kernels().query_factor_bytes(static_cast<int>(a.d), key_layout_);
    for (const Tile& t : tiles_) {
      for (int64_t i = 0; i < t.spans(); ++i) spans_.push_back({&t - tiles_.data(), i});
      if (has_tail(t)) spans_.push_back({&t - tiles_.data(), t.spans()});
      rows_ = t.at + t.rows;
      most_rows_ = std::max(most_rows_, t.rows);
      parts_ = t.part + (t.spans() + 1) * t.rows;
    }
  }

  // out: [tokens, q_heads, d] like q, lse: float32 [tokens, q_heads], both contiguous
  template <typename T>
  void run(T* out, float* lse) {
    allocate();
    parallel_for(tiles_.size(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) prepare(tiles_[t]);
    });
    parallel_for(spans_.size(), 1, [&](int64_t begin, int64_t end) {
      Scratch scratch(kernels().attend_scratch_bytes(keys_)), sums(4 * std::max(most_rows_ * slots(), 32 * a_.d));
      for (int64_t i = begin; i < end; ++i) {
        const Tile& t = tiles_[spans_[i].tile];
        if (spans_[i].span < t.spans()) {
          attend_span(t, spans_[i].span, scratch, sums);
        } else {
          attend_tail(t, sums.as<float>());
        }
      }
    });
    parallel_for(tiles_.size(), 1, [&](int64_t begin, int64_t end) {
      std::vector<float> coded(a_.d), exact(a_.d);
      for (int64_t t = begin; t < end; ++t) {
        for (int64_t r = 0; r < tiles_[t].rows; ++r) finish(tiles_[t], r, coded.data(), exact.data(), out, lse);
      }
    });
  }

 private:
  struct Span {
    int64_t tile, span;
  };

  bool has_tail(const Tile& t) const { return a_.tail && a_.tail->slots[t.sequence] >= 0; }
  int64_t slots() const { return keys_.panels.panels * keys_.panels.fields * 16; }

  Row row(const Tile& t, int64_t r) const {
    const int64_t i = (t.first_row + r) / a_.group, g = (t.first_row + r) % a_.group;
    return {a_.batch.query_begin[t.sequence] + i, t.kv_head * a_.group + g, a_.batch.position(t.sequence, i)};
  }

  void allocate() {
    Workspace& w = work_;
    w.plain.resize(rows_ * a_.d);
    w.factors = Scratch(rows_ * factor_bytes_);
    for (auto* v : {&w.unit, &w.shift}) v->resize(rows_);
    w.correction.resize(rows_);
    for (auto* v : {&w.first, &w.end, &w.visible, &w.sinks, &w.recent, &w.position}) v->resize(rows_);
    w.max.assign(parts_, -INFINITY);
    w.sum.assign(parts_, 0);
    w.sums.assign(parts_ * a_.d, 0);
  }
  uint8_t* factors(int64_t row) const { return work_.factors.as<uint8_t>() + row * factor_bytes_; }

  void prepare(const Tile& t) {
    Workspace& w = work_;
    std::vector<float> rotated(a_.d);
    std::vector<int16_t> integers(a_.d + kQueryMargin);
    dispatch_float(a_.q.scalar_type(), [&](auto tag) {
      using T = typename decltype(tag)::type;
      const T* q = static_cast<const T*>(a_.q.data_ptr());
      for (int64_t r = 0; r < t.rows; ++r) {
        const Row x = row(t, r);
        const int64_t at = t.at + r;
        float* plain = w.plain.data() + at * a_.d;
        to_float(q + x.token * a_.q.stride(0) + x.head * a_.q.stride(1), plain, a_.d);
        const format::Channels channels = a_.channels.of_head(t.kv_head, a_.d);
        std::copy(plain, plain + a_.d, rotated.begin());
        if (channels.inverse) multiply(rotated.data(), channels.inverse, a_.d);
        rotate(rotated.data(), a_.key_signs, split_);
        const int d = static_cast<int>(a_.d);
        const float unit = kernels().query_factors(rotated.data(), d, key_layout_, a_.max_key_level, factors(at),
                                                   &w.correction[at], integers.data());
        w.unit[at] = unit * format::kLevelUnit * a_.softmax_scale;
        w.shift[at] = channels.center ? dot(plain, channels.center, a_.d) * a_.softmax_scale : 0;

        const Attention::Exact exact = a_.exact(t.sequence, x.position);
        const int64_t first = a_.first_visible(x.position);
        w.visible[at] = first;
        w.first[at] = std::max(first, exact.sinks);
        w.end[at] = std::min(x.position + 1, exact.recent);
        w.sinks[at] = exact.sinks;
        w.recent[at] = exact.recent;
        w.position[at] = x.position;
      }
    });
  }

  void attend_span(const Tile& t, int64_t span, const Scratch& scratch, const Scratch& memory) {
    Workspace& w = work_;
    const int64_t part = t.part + span * t.rows, begin = t.begin + span * kSpanTokens;
    const QueryRows rows{static_cast<int>(t.rows), factors(t.at),  &w.unit[t.at], &w.correction[t.at],
                         &w.shift[t.at],           &w.first[t.at], &w.end[t.at]};
    float* sums = memory.as<float>();
    std::fill(sums, sums + t.rows * slots(), 0.0f);
    const PartialRows out{&w.max[part], &w.sum[part], sums, slots()};
    kernels().attend_pages(keys_, a_.table + t.sequence * a_.max_pages, t.kv_head, begin,
                           std::min(begin + kSpanTokens, t.end), rows, out, scratch.as<void>());
    for (int64_t r = 0; r < t.rows; ++r) {  // from the order of the panels to channels
      float* to = &w.sums[(part + r) * a_.d];
      const float* from = sums + r * slots();
      const int32_t* words = keys_.panels.words;
      for (int64_t c = 0; c < a_.d; ++c, words += 4) {
        to[c] = (from[words[0]] + from[words[1]]) + (from[words[2]] + from[words[3]]);
      }
    }
  }

  void attend_tail(const Tile& t, float* scratch) {
    Workspace& w = work_;
    const TailView& tail = *a_.tail;
    const int64_t part = t.part + t.spans() * t.rows;
    const int64_t item = tail.tensor.scalar_type() == ScalarType::Float ? 4 : 2;
    const int dtype = item == 4 ? 0 : tail.tensor.scalar_type() == ScalarType::Half ? 1 : 2;
    const ExactKeys exact{static_cast<const uint8_t*>(tail.tensor.data_ptr()) +
                              (tail.slots[t.sequence] * tail.kv_heads + t.kv_head) * tail.rows * 2 * tail.d * item,
                          dtype,
                          a_.d,
                          tail.sink_tokens,
                          tail.ring,
                          &w.plain[t.at * a_.d],
                          &w.visible[t.at],
                          &w.sinks[t.at],
                          &w.recent[t.at],
                          &w.position[t.at]};
    kernels().attend_exact(exact, static_cast<int>(t.rows), a_.softmax_scale, a_.soft_cap,
                           {&w.max[part], &w.sum[part], &w.sums[part * a_.d], a_.d}, scratch);
  }

  // Joins the partial results of a row, in the order of the spans.
  template <typename T>
  void finish(const Tile& t, int64_t r, float* coded, float* exact, T* out, float* lse) {
    const Workspace& w = work_;
    const Row x = row(t, r);
    const float* sink = a_.sink_logits ? a_.sink_logits + x.head : nullptr;  // one more logit, without a value
    float top = sink ? *sink : -INFINITY, total = 0;
    for (int64_t i = 0; i <= t.spans(); ++i) top = std::max(top, w.max[t.part + i * t.rows + r]);
    std::fill(coded, coded + a_.d, 0.0f);
    std::fill(exact, exact + a_.d, 0.0f);
    for (int64_t i = 0; i <= t.spans(); ++i) {
      const int64_t part = t.part + i * t.rows + r;
      if (w.sum[part] == 0) continue;
      const float weight = std::exp(w.max[part] - top);
      total += weight * w.sum[part];
      float* to = i < t.spans() ? coded : exact;
      for (int64_t c = 0; c < a_.d; ++c) to[c] += weight * w.sums[part * a_.d + c];
    }
    if (sink && top != -INFINITY) total += std::exp(*sink - top);
    rotate_back(coded, a_.value_signs, split_);
    add(coded, exact, a_.d);
    const float inverse = total == 0 ? 0 : 1 / total;
    for (int64_t c = 0; c < a_.d; ++c) coded[c] *= inverse;
    const int64_t to = x.token * a_.q_heads + x.head;
    from_float(coded, out + to * a_.d, a_.d);
    lse[to] = total == 0 ? -INFINITY : top + std::log(total);
  }

  const Attention& a_;
  std::vector<Tile> tiles_;
  std::vector<Span> spans_;
  format::Split split_;
  PagedKeys keys_;
  int key_layout_;
  int64_t factor_bytes_, rows_ = 0, most_rows_ = 0, parts_ = 0;
  Workspace work_;
};

void attend(const AttentionCall& call, const format::Record& record, const Tensor& out, const Tensor& lse) {
  const Attention a = checked_attention(call, record);
  float* lse_out = static_cast<float*>(lse.data_ptr());
  dispatch_float(a.q.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    T* to = static_cast<T*>(out.data_ptr());
    const int64_t used = a.batch.query_begin[a.batch.count];  // padding behind the last sequence
    std::fill(to + used * a.q_heads * a.d, to + a.tokens * a.q_heads * a.d, T(0));
    std::fill(lse_out + used * a.q_heads, lse_out + a.tokens * a.q_heads, -INFINITY);
    PagedAttention(a).run(to, lse_out);
  });
}

// out_a, out_b: [..., d] of one dtype, lse_a, lse_b: float32 [...], all contiguous -> merged out and lse
std::tuple<Tensor, Tensor> merge_attention(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                                           const Tensor& lse_b) {
  check_merge(out_a, lse_a, out_b, lse_b);
  const int64_t d = out_a.size(out_a.dim() - 1);

  Tensor out = empty_like_shape(out_a, leading_shape(out_a, 0, {}), out_a.scalar_type());
  Tensor lse = empty_like_shape(out_a, leading_shape(out_a, 1, {}), ScalarType::Float);
  const float* la = static_cast<const float*>(lse_a.data_ptr());
  const float* lb = static_cast<const float*>(lse_b.data_ptr());
  float* l = static_cast<float*>(lse.data_ptr());
  dispatch_float(out_a.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* a = static_cast<const T*>(out_a.data_ptr());
    const T* b = static_cast<const T*>(out_b.data_ptr());
    T* to = static_cast<T*>(out.data_ptr());
    parallel_for(lse.numel(), 64, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const float top = std::max(la[r], lb[r]);
        const bool none = top == -INFINITY;  // neither side saw a key
        const float wa = none ? 0 : std::exp(la[r] - top), wb = none ? 0 : std::exp(lb[r] - top), total = wa + wb;
        l[r] = none ? top : top + std::log(total);
        const float fa = none ? 0 : wa / total, fb = none ? 0 : wb / total;
        for (int64_t c = r * d; c < (r + 1) * d; ++c) {
          // a side without keys has weight 0 and is not read: its output may be anything
          const float x = fa == 0 ? 0 : fa * static_cast<float>(a[c]), y = fb == 0 ? 0 : fb * static_cast<float>(b[c]);
          to[c] = static_cast<T>(x + y);
        }
      }
    });
  });
  return {out, lse};
}

}  // namespace
}  // namespace turboquant::cpu

STABLE_TORCH_LIBRARY_IMPL(turboquant, CPU, m) {
  using Ops = turboquant::AttentionOps<turboquant::cpu::attend>;
  m.impl("paged_attention", TORCH_BOX(&Ops::paged_attention));
  m.impl("paged_attention_out", TORCH_BOX(&Ops::paged_attention_out));
  m.impl("merge_attention", TORCH_BOX(&turboquant::cpu::merge_attention));
}
