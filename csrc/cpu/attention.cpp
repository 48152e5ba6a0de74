// paged_attention, store_and_attend, merge_attention: softmax attention straight from packed pages.
//
// Keys are never rotated back: with R the rotation and s the scales of channels, q . key = (R (q / s)) . (scale / 32 *
// levels) + q . center, so the query is rotated once. Values are summed in the rotated space, and the sum is rotated
// back once. Exact keys (sinks and recent window of the tail, docs/format.md section 9, and the call's own tokens where
// they are given) are scored and summed unrotated and join in the end.
//
// A unit of work is a span of keys of one (sequence, KV head): all its queries and query heads share every key and
// value that is unpacked (kernels/attention.h). Partial results of spans and of exact keys are joined in a fixed order.
#include "calls/step.h"

#include <optional>

#include "cpu/attention/panels.h"
#include "cpu/cache.h"
#include "cpu/cache/batch.h"
#include "cpu/codec/codebook.h"
#include "cpu/common/torch.h"
#include "cpu/common/vector.h"

namespace turboquant::cpu {
namespace {

// A checked call: its plain pointers and numbers.
struct Attention {
  const AttentionCall& call;
  int64_t tokens, q_heads, kv_heads, d, group;  // group = q_heads / kv_heads
  format::Record record;
  Batch batch;
  const uint8_t* pages;             // [num_pages, kv_heads, record_bytes]
  const int32_t* table;             // [seqs, max_pages]
  int64_t table_stride, max_pages;  // stride: from one row to the next
  const float* key_signs;           // [d]
  const float* value_signs;         // [d]
  format::Channels channels;        // [kv_heads, d]
  const float* sink_logits;         // [q_heads] or null
  Levels key_levels, value_levels;
  std::optional<TailView> tail;
  const int32_t* tail_valid;  // [max_seqs, 2] or null
  int64_t recent_window, sliding_window;
  float softmax_scale, soft_cap;

  const int32_t* table_of(int64_t s) const { return table + s * table_stride; }
  int max_key_level() const { return greatest_level(record.key_width(), key_levels.of); }
  // Keys [first_visible(p), p] are visible to a query at position p.
  int64_t first_visible(int64_t position) const {
    return sliding_window > 0 ? std::max<int64_t>(0, position - sliding_window + 1) : 0;
  }
  // The first position of a sequence that k_new and v_new hold; without them its end.
  int64_t new_begin(int64_t s) const { return batch.length[s] - (call.k_new ? batch.queries(s) : 0); }
  // The two runs of exact keys of a query at `position`: [0, sinks) and [recent, position]. Those from new_begin on are
  // in k_new, the others in the tail.
  struct Exact {
    int64_t sinks, recent;
  };
  Exact exact(int64_t s, int64_t position) const {
    int64_t sinks = 0, recent = position + 1;
    if (has_tail(s)) {
      const int32_t* valid = tail_valid ? tail_valid + 2 * tail->slots[s] : nullptr;
      sinks = valid ? std::clamp<int64_t>(valid[0], 0, tail->sink_tokens) : tail->sink_tokens;
      // Beside k_new, the new tokens may have been stored or not. Without tail_valid, what counts is therefore what a
      // ring of any size holds both before and after.
      const int64_t held = valid ? valid[1] : call.k_new ? batch.length[s] - tail->ring : 0;
      recent = std::max({position - recent_window + 1, held, tail->sink_tokens});
    }
    return {sinks, std::min(std::max(std::min(recent, new_begin(s)), sinks), position + 1)};
  }
  bool has_tail(int64_t s) const { return tail && tail->slots[s] >= 0; }
};

// One query head of one new token.
struct Row {
  int64_t token, head, position;
};

constexpr int64_t kRowsAtOnce = 128;   // rows of a unit of work: their sums stay in the cache
constexpr int64_t kSpanTokens = 2048;  // keys of a unit of work; a multiple of kBlockTokens

// Rows that share keys: queries of one sequence, query heads of one KV head. Their keys are cut into spans. The cut
// depends on lengths only, so results do not depend on the number of threads.
struct RowSet {
  int64_t sequence, kv_head;
  int64_t first_row, rows;  // among those of (sequence, KV head), query-major
  int64_t begin, end;       // packed keys that some row sees; begin is the first of a block
  int64_t at;               // index of the first row among those of all sets
  int64_t part;             // index of the first partial result
  int64_t spans() const { return (end - begin + kSpanTokens - 1) / kSpanTokens; }
};

// Memory between the queries and the output, one row after the other.
struct Workspace {
  std::vector<float> plain;        // queries, [rows, d]
  Scratch factors{0};              // the same rotated, as integers: [rows, factor_bytes]
  std::vector<float> unit, shift;  // [rows]
  std::vector<int32_t> correction;
  std::vector<int64_t> first, end;                        // packed keys of a row
  std::vector<int64_t> visible, sinks, recent, position;  // and its exact ones
  std::vector<float> max, sum, sums;                      // partial results: [parts], [parts], [parts, d]
};

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
  std::optional<TailView> tail;
  if (c.tail) tail = checked_tail(*c.tail, c.tail_slots, q, batch.count, kv_heads, d, c.sink_tokens);

  Attention a{.call = c,
              .tokens = tokens,
              .q_heads = q_heads,
              .kv_heads = kv_heads,
              .d = d,
              .group = q_heads / kv_heads,
              .record = record,
              .batch = std::move(batch),
              .pages = data_of<uint8_t>(c.cache),
              .table = data_of<int32_t>(c.block_table),
              .table_stride = c.block_table.stride(0),
              .max_pages = c.block_table.size(1),
              .key_signs = checked_signs(c.key_signs, "key_signs"),
              .value_signs = checked_signs(c.value_signs, "value_signs"),
              .channels = channels_of(c.center, data_of<float>(c.center), kv_heads, d),
              .sink_logits = data_of<float>(c.sink_logits),
              .key_levels = {record.key_width(), checked_levels(c.key_levels, q, c.key_bits, "key_levels")},
              .value_levels = {record.value_width(), checked_levels(c.value_levels, q, c.value_bits, "value_levels")},
              .tail = std::move(tail),
              .tail_valid = c.tail ? data_of<int32_t>(c.tail_valid) : nullptr,
              .recent_window = c.recent_window,
              .sliding_window = std::min<int64_t>(c.sliding_window, INT32_MAX),  // no sequence is longer
              .softmax_scale = static_cast<float>(c.softmax_scale),
              .soft_cap = static_cast<float>(c.soft_cap)};
  for (int64_t s = 0; s < a.batch.count; ++s) {
    if (a.batch.queries(s) == 0 || a.batch.length[s] == 0) continue;
    const int64_t first = a.first_visible(a.batch.position(s, 0));
    check_pages(a.table_of(s), a.max_pages, c.cache.size(0), record.page_size, s, first, a.new_begin(s));
  }
  return a;
}

// Cuts the rows of a call into sets.
std::vector<RowSet> sets_of(const Attention& a) {
  std::vector<RowSet> sets;
  int64_t at = 0, part = 0;
  for (int64_t s = 0; s < a.batch.count; ++s) {
    const int64_t rows = a.batch.queries(s) * a.group;
    for (int64_t head = 0; head < a.kv_heads; ++head) {
      for (int64_t first = 0; first < rows; first += kRowsAtOnce) {
        RowSet set{.sequence = s,
                   .kv_head = head,
                   .first_row = first,
                   .rows = std::min(kRowsAtOnce, rows - first),
                   .begin = INT64_MAX,
                   .end = 0,
                   .at = at,
                   .part = part};
        for (int64_t i = first / a.group; i <= (first + set.rows - 1) / a.group; ++i) {
          const int64_t position = a.batch.position(s, i);
          const Attention::Exact exact = a.exact(s, position);
          const int64_t from = std::max(a.first_visible(position), exact.sinks),
                        end = std::min(position + 1, exact.recent);
          if (from >= end) continue;
          set.begin = std::min(set.begin, from);
          set.end = std::max(set.end, end);
        }
        set.begin = set.end == 0 ? 0 : set.begin / kBlockTokens * kBlockTokens;
        at += set.rows;
        part += (set.spans() + 1) * set.rows;  // the exact keys come after the spans
        sets.push_back(set);
      }
    }
  }
  return sets;
}

class PagedAttention {
 public:
  explicit PagedAttention(const Attention& a)
      : a_(a), sets_(sets_of(a)), split_(format::split_dim(a.d)), layout_(key_layout(a.record)),
        factor_bytes_(kernels().query_factor_bytes(static_cast<int>(a.d), layout_)) {
    keys_.record = a.record;
    keys_.panels = panel_map(a.record).get();
    keys_.pages = a.pages;
    keys_.page_stride = entry_stride(a.call.cache);
    keys_.soft_cap = a.soft_cap;
    std::copy_n(a.key_levels.of, kTableLevels, keys_.key_levels);
    std::copy_n(a.value_levels.of, kTableLevels, keys_.value_levels);
    for (const RowSet& set : sets_) {
      for (int64_t i = 0; i < set.spans(); ++i) spans_.push_back({&set - sets_.data(), i});
      if (has_exact(set)) spans_.push_back({&set - sets_.data(), set.spans()});
      rows_ = set.at + set.rows;
      most_rows_ = std::max(most_rows_, set.rows);
      parts_ = set.part + (set.spans() + 1) * set.rows;
    }
  }

  // out: [tokens, q_heads, d] like q, lse: float32 [tokens, q_heads], both contiguous
  template <typename T>
  void run(T* out, float* lse) {
    allocate();
    parallel_for(sets_.size(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) prepare(sets_[i]);
    });
    parallel_for(spans_.size(), 1, [&](int64_t begin, int64_t end) {
      Scratch scratch(kernels().attend_scratch_bytes(keys_)), sums(4 * std::max(most_rows_ * lanes(), 32 * a_.d));
      for (int64_t i = begin; i < end; ++i) {
        const RowSet& set = sets_[spans_[i].set];
        if (spans_[i].span < set.spans()) {
          attend_span(set, spans_[i].span, scratch, sums);
        } else {
          attend_exact(set, sums.as<float>());
        }
      }
    });
    parallel_for(sets_.size(), 1, [&](int64_t begin, int64_t end) {
      std::vector<float> coded(a_.d), exact(a_.d);
      for (int64_t i = begin; i < end; ++i) {
        for (int64_t r = 0; r < sets_[i].rows; ++r) finish(sets_[i], r, coded.data(), exact.data(), out, lse);
      }
    });
  }

 private:
  struct Span {
    int64_t set, span;
  };

  bool has_exact(const RowSet& set) const { return a_.has_tail(set.sequence) || a_.call.k_new; }
  // Sums of a row in the order of the panels.
  int64_t lanes() const { return keys_.panels.panels * keys_.panels.fields * 16; }

  Row row(const RowSet& set, int64_t r) const {
    const int64_t i = (set.first_row + r) / a_.group, g = (set.first_row + r) % a_.group;
    return {a_.batch.query_begin[set.sequence] + i, set.kv_head * a_.group + g, a_.batch.position(set.sequence, i)};
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

  void prepare(const RowSet& set) {
    Workspace& w = work_;
    std::vector<float> rotated(a_.d);
    std::vector<int16_t> integers(a_.d + kQueryMargin);
    const Tensor& queries = a_.call.q;
    dispatch_float(dtype_of(queries), [&](auto tag) {
      using T = typename decltype(tag)::type;
      const T* q = data_of<T>(queries);
      for (int64_t r = 0; r < set.rows; ++r) {
        const Row x = row(set, r);
        const int64_t at = set.at + r;
        float* plain = w.plain.data() + at * a_.d;
        to_float(q + x.token * queries.stride(0) + x.head * queries.stride(1), plain, a_.d);
        const format::Channels channels = a_.channels.of_head(set.kv_head, a_.d);
        std::copy(plain, plain + a_.d, rotated.begin());
        if (channels.inverse) multiply(rotated.data(), channels.inverse, a_.d);
        rotate(rotated.data(), a_.key_signs, split_);
        const int d = static_cast<int>(a_.d);
        const float unit = kernels().query_factors(rotated.data(), d, layout_, a_.max_key_level(), factors(at),
                                                   &w.correction[at], integers.data());
        w.unit[at] = unit * format::kLevelUnit * a_.softmax_scale;
        w.shift[at] = channels.center ? dot(plain, channels.center, a_.d) * a_.softmax_scale : 0;

        const Attention::Exact exact = a_.exact(set.sequence, x.position);
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

  void attend_span(const RowSet& set, int64_t span, const Scratch& scratch, const Scratch& memory) {
    Workspace& w = work_;
    const int64_t part = set.part + span * set.rows, begin = set.begin + span * kSpanTokens;
    const QueryRows rows{.count = static_cast<int>(set.rows),
                         .factors = factors(set.at),
                         .unit = &w.unit[set.at],
                         .correction = &w.correction[set.at],
                         .shift = &w.shift[set.at],
                         .first = &w.first[set.at],
                         .end = &w.end[set.at]};
    float* sums = memory.as<float>();
    std::fill(sums, sums + set.rows * lanes(), 0.0f);
    const PartialRows out{.max = &w.max[part], .sum = &w.sum[part], .sums = sums, .stride = lanes()};
    kernels().attend_pages(keys_, a_.table_of(set.sequence), set.kv_head, begin, std::min(begin + kSpanTokens, set.end),
                           rows, out, scratch.as<void>());
    for (int64_t r = 0; r < set.rows; ++r) {  // from the order of the panels to that of channels
      float* to = &w.sums[(part + r) * a_.d];
      const float* from = sums + r * lanes();
      const int32_t* words = keys_.panels.words;
      for (int64_t c = 0; c < a_.d; ++c, words += 4) {
        to[c] = (from[words[0]] + from[words[1]]) + (from[words[2]] + from[words[3]]);
      }
    }
  }

  void attend_exact(const RowSet& set, float* scratch) {
    Workspace& w = work_;
    const int64_t part = set.part + set.spans() * set.rows;
    ExactKeys exact{.tail = nullptr,
                    .new_keys = nullptr,
                    .new_values = nullptr,
                    .new_begin = a_.new_begin(set.sequence),
                    .new_key_stride = 0,
                    .new_value_stride = 0,
                    .dtype = dtype_of(a_.call.q),
                    .d = a_.d,
                    .sink_tokens = 0,
                    .ring = 1,
                    .q = &w.plain[set.at * a_.d],
                    .first = &w.visible[set.at],
                    .sinks = &w.sinks[set.at],
                    .recent = &w.recent[set.at],
                    .position = &w.position[set.at]};
    if (a_.has_tail(set.sequence)) {
      const TailView& tail = *a_.tail;
      exact.tail = tail.vector(tail.slots[set.sequence], set.kv_head, 0, 0);
      exact.sink_tokens = tail.sink_tokens, exact.ring = tail.ring;
    }
    if (a_.call.k_new) {
      const Tensor &k = *a_.call.k_new, &v = *a_.call.v_new;
      const int64_t token = a_.batch.query_begin[set.sequence];
      exact.new_keys = element(k, token * k.stride(0) + set.kv_head * k.stride(1));
      exact.new_values = element(v, token * v.stride(0) + set.kv_head * v.stride(1));
      exact.new_key_stride = k.stride(0), exact.new_value_stride = v.stride(0);
    }
    const PartialRows out{.max = &w.max[part], .sum = &w.sum[part], .sums = &w.sums[part * a_.d], .stride = a_.d};
    kernels().attend_exact(exact, static_cast<int>(set.rows), a_.softmax_scale, a_.soft_cap, out, scratch);
  }

  // Joins the partial results of a row, in the order of the spans.
  template <typename T>
  void finish(const RowSet& set, int64_t r, float* coded, float* exact, T* out, float* lse) {
    const Workspace& w = work_;
    const Row x = row(set, r);
    const float* sink = a_.sink_logits ? a_.sink_logits + x.head : nullptr;  // one more logit, without a value
    float top = sink ? *sink : -INFINITY, total = 0;
    for (int64_t i = 0; i <= set.spans(); ++i) top = std::max(top, w.max[set.part + i * set.rows + r]);
    std::fill(coded, coded + a_.d, 0.0f);
    std::fill(exact, exact + a_.d, 0.0f);
    for (int64_t i = 0; i <= set.spans(); ++i) {
      const int64_t part = set.part + i * set.rows + r;
      if (w.sum[part] == 0) continue;
      const float weight = std::exp(w.max[part] - top);
      total += weight * w.sum[part];
      float* to = i < set.spans() ? coded : exact;
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
  std::vector<RowSet> sets_;
  std::vector<Span> spans_;
  format::Split split_;
  Layout layout_;  // of keys
  PagedKeys keys_;
  int64_t factor_bytes_, rows_ = 0, most_rows_ = 0, parts_ = 0;
  Workspace work_;
};

void attend(const AttentionCall& call, const format::Record& record, const Tensor& out, const Tensor& lse,
            const Store& store) {
  const Attention a = checked_attention(call, record);
  if (store) store();
  float* lse_out = data_of<float>(lse);
  dispatch_float(dtype_of(call.q), [&](auto tag) {
    using T = typename decltype(tag)::type;
    T* to = data_of<T>(out);
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

  Tensor out = new_tensor(out_a, leading_shape(out_a, 0, {}), out_a.scalar_type());
  Tensor lse = new_tensor(out_a, leading_shape(out_a, 1, {}), ScalarType::Float);
  const float* la = data_of<float>(lse_a);
  const float* lb = data_of<float>(lse_b);
  float* l = data_of<float>(lse);
  dispatch_float(dtype_of(out_a), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* a = data_of<T>(out_a);
    const T* b = data_of<T>(out_b);
    T* to = data_of<T>(out);
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
  using namespace turboquant;
  m.impl("paged_attention", boxed<&paged_attention<cpu::attend>, kPagedAttention>);
  m.impl("paged_attention_out", boxed<&paged_attention_out<cpu::attend>, kPagedAttentionOut>);
  m.impl("store_and_attend", boxed<&store_and_attend<cpu::attend, cpu::prepare_store>, kStoreAndAttend>);
  m.impl("merge_attention", TORCH_BOX(&cpu::merge_attention));
}
