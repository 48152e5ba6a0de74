// Attention of a checked call: cuts its keys into spans, runs the kernels on torch's threads and joins the results.
//
// A unit of work is a span of keys of one (sequence, KV head): all its queries and query heads share every key and
// value that is unpacked (kernels/attention.h). Partial results of spans and of exact keys are joined in a fixed order,
// and the cut depends on lengths only, so that results do not depend on the number of threads.
#pragma once

#include "cpu/attention/panels.h"
#include "cpu/cache/batch.h"
#include "cpu/common/torch.h"

namespace turboquant::cpu {

// Which keys the queries of a call see, and which of them exactly.
struct Windows {
  Batch batch;
  std::vector<int64_t> tail_slots;         // [seqs], -1: this sequence has none; empty: there is no tail
  int64_t tail_ring = 0, sink_tokens = 0;  // rows of the tail
  const int32_t* tail_valid = nullptr;     // [max_seqs, 2] or null
  int64_t recent_window = 0, sliding_window = 0;
  bool own = false;  // whether the keys of the call's own tokens are given

  // Keys [first_visible(p), p] are visible to a query at position p.
  int64_t first_visible(int64_t position) const {
    return sliding_window > 0 ? std::max<int64_t>(0, position - sliding_window + 1) : 0;
  }
  // The first position of a sequence whose key is given as the call's own; without such keys its end.
  int64_t new_begin(int64_t s) const { return batch.length[s] - (own ? batch.queries(s) : 0); }
  bool has_tail(int64_t s) const { return !tail_slots.empty() && tail_slots[s] >= 0; }
  bool has_exact(int64_t s) const { return own || has_tail(s); }

  // The two runs of exact keys of a query at `position`: [0, sinks) and [recent, position]. Those from new_begin on are
  // the call's own, the others in the tail.
  struct Exact {
    int64_t sinks, recent;
  };
  Exact exact(int64_t s, int64_t position) const {
    int64_t sinks = 0, recent = position + 1;
    if (has_tail(s)) {
      const int32_t* valid = tail_valid ? tail_valid + 2 * tail_slots[s] : nullptr;
      sinks = valid ? std::clamp<int64_t>(valid[0], 0, sink_tokens) : sink_tokens;
      // Beside their keys, the new tokens may have been stored or not. Without tail_valid, what counts is therefore
      // what a ring of any size holds both before and after.
      const int64_t held = valid ? valid[1] : own ? batch.length[s] - tail_ring : 0;
      recent = std::max({position - recent_window + 1, held, sink_tokens});
    }
    return {sinks, std::min(std::max(std::min(recent, new_begin(s)), sinks), position + 1)};
  }
};

inline int64_t largest_query_count(const Batch& batch) {
  int64_t most = 0;
  for (int64_t s = 0; s < batch.count; ++s) most = std::max(most, batch.queries(s));
  return most;
}

inline void check_max_q_len(const Batch& batch, int64_t max_q_len) {
  STD_TORCH_CHECK(largest_query_count(batch) <= max_q_len, "a sequence has ", largest_query_count(batch),
                  " queries, more than max_q_len ", max_q_len);
}

// Checks the pages that the queries of a call read. table: [seqs, max_pages], rows `stride` apart
inline void check_pages_of(const Windows& w, const int32_t* table, int64_t stride, int64_t max_pages, int64_t num_pages,
                           int page_size) {
  for (int64_t s = 0; s < w.batch.count; ++s) {
    if (w.batch.queries(s) == 0 || w.batch.length[s] == 0) continue;
    const int64_t first = w.first_visible(w.batch.position(s, 0));
    check_pages(table + s * stride, max_pages, num_pages, page_size, s, first, w.new_begin(s));
  }
}

constexpr int64_t kRowsAtOnce = 128;   // rows of a unit of work: their sums stay in the cache
constexpr int64_t kSpanTokens = 2048;  // keys of a unit of work; a multiple of kBlockTokens

// Rows that share keys: queries of one sequence, query heads of one KV head. Their keys are cut into spans.
struct RowSet {
  int64_t sequence, kv_head;
  int64_t first_row, rows;  // among those of (sequence, KV head), query-major
  int64_t begin, end;       // packed keys that some row sees; begin is the first of a block
  int64_t at;               // index of the first row among those of all sets
  int64_t part;             // index of the first partial result
  int64_t spans() const { return (end - begin + kSpanTokens - 1) / kSpanTokens; }
};

// Cuts the rows of a call into sets.
inline std::vector<RowSet> sets_of(const Windows& w, int64_t kv_heads, int64_t group) {
  std::vector<RowSet> sets;
  int64_t at = 0, part = 0;
  for (int64_t s = 0; s < w.batch.count; ++s) {
    const int64_t rows = w.batch.queries(s) * group;
    for (int64_t head = 0; head < kv_heads; ++head) {
      for (int64_t first = 0; first < rows; first += kRowsAtOnce) {
        RowSet set{.sequence = s,
                   .kv_head = head,
                   .first_row = first,
                   .rows = std::min(kRowsAtOnce, rows - first),
                   .begin = INT64_MAX,
                   .end = 0,
                   .at = at,
                   .part = part};
        for (int64_t i = first / group; i <= (first + set.rows - 1) / group; ++i) {
          const int64_t position = w.batch.position(s, i);
          const Windows::Exact exact = w.exact(s, position);
          const int64_t from = std::max(w.first_visible(position), exact.sinks),
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

// The rows of a call as kernels take them.
//
// Layer is a checked call and knows how its keys are kept:
//
//   windows, q_heads, kv_heads           which keys there are, and for whom
//   key_dim, value_dim                   floats of a query and of an output; a query is its coded channels, value_dim
//                                        of them, and the raw ones behind
//   keys: AttendedKeys, layout: Layout   the codes, and how queries meet them
//   softmax_scale
//   load_query(token, head, to)          float32 [key_dim]
//   rotate_query(kv_head, query, to)     its coded channels as codes meet them; returns its product with the center
//   exact_keys(sequence, kv_head)        ExactKeys without what belongs to rows
template <typename Layer>
class PreparedRows {
 public:
  explicit PreparedRows(const Layer& layer)
      : a_(layer), group_(layer.q_heads / layer.kv_heads), sets_(sets_of(layer.windows, layer.kv_heads, group_)),
        factor_bytes_(kernels().query_factor_bytes(static_cast<int>(layer.value_dim), layer.layout)) {
    if (!sets_.empty()) count_ = sets_.back().at + sets_.back().rows;
  }
  PreparedRows(const PreparedRows&) = delete;

  const std::vector<RowSet>& sets() const { return sets_; }
  int64_t count() const { return count_; }  // of all sets

  // One query head of one new token.
  struct Row {
    int64_t token, head, position;
  };
  Row row(const RowSet& set, int64_t r) const {
    const Batch& batch = a_.windows.batch;
    const int64_t i = (set.first_row + r) / group_, g = (set.first_row + r) % group_;
    return {batch.query_begin[set.sequence] + i, set.kv_head * group_ + g, batch.position(set.sequence, i)};
  }

  // On torch's threads; before the functions below.
  void prepare() {
    plain_.resize(count_ * a_.key_dim);
    factors_ = Scratch(count_ * factor_bytes_);
    for (auto* v : {&unit_, &shift_}) v->resize(count_);
    correction_.resize(count_);
    for (auto* v : {&first_, &end_, &visible_, &sinks_, &recent_, &position_}) v->resize(count_);
    parallel_for(sets_.size(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) prepare(sets_[i]);
    });
  }

  QueryRows coded(const RowSet& set) const {
    return {.count = static_cast<int>(set.rows),
            .factors = factors(set.at),
            .unit = &unit_[set.at],
            .correction = &correction_[set.at],
            .shift = &shift_[set.at],
            .rope = plain_.data() + set.at * a_.key_dim + a_.value_dim,
            .rope_stride = a_.key_dim,
            .first = &first_[set.at],
            .end = &end_[set.at]};
  }
  ExactKeys exact(const RowSet& set) const {
    ExactKeys exact = a_.exact_keys(set.sequence, set.kv_head);
    exact.q = &plain_[set.at * a_.key_dim];
    exact.first = &visible_[set.at];
    exact.sinks = &sinks_[set.at];
    exact.recent = &recent_[set.at];
    exact.position = &position_[set.at];
    return exact;
  }

 private:
  uint8_t* factors(int64_t row) const { return factors_.template as<uint8_t>() + row * factor_bytes_; }

  void prepare(const RowSet& set) {
    const int d = static_cast<int>(a_.value_dim);
    std::vector<float> rotated(d);
    std::vector<int16_t> integers(d + kQueryMargin);
    for (int64_t r = 0; r < set.rows; ++r) {
      const Row x = row(set, r);
      const int64_t at = set.at + r;
      float* plain = plain_.data() + at * a_.key_dim;
      a_.load_query(x.token, x.head, plain);
      shift_[at] = a_.rotate_query(set.kv_head, plain, rotated.data()) * a_.softmax_scale;
      const float unit = kernels().query_factors(rotated.data(), d, a_.layout, a_.max_key_level, factors(at),
                                                 &correction_[at], integers.data());
      unit_[at] = unit * format::kLevelUnit * a_.softmax_scale;

      const Windows::Exact exact = a_.windows.exact(set.sequence, x.position);
      const int64_t first = a_.windows.first_visible(x.position);
      visible_[at] = first;
      first_[at] = std::max(first, exact.sinks);
      end_[at] = std::min(x.position + 1, exact.recent);
      sinks_[at] = exact.sinks;
      recent_[at] = exact.recent;
      position_[at] = x.position;
    }
  }

  const Layer& a_;
  int64_t group_;  // query heads of a KV head
  std::vector<RowSet> sets_;
  int64_t factor_bytes_, count_ = 0;
  // One row after the other.
  std::vector<float> plain_;         // queries, [count, key_dim]
  Scratch factors_{0};               // the same rotated, as integers: [count, factor_bytes]
  std::vector<float> unit_, shift_;  // [count]
  std::vector<int32_t> correction_;
  std::vector<int64_t> first_, end_;                          // packed keys of a row
  std::vector<int64_t> visible_, sinks_, recent_, position_;  // and its exact ones
};

// Runs a call. Layer has what PreparedRows asks for, and:
//
//   sink_logits
//   scratch_bytes()                      of attend
//   attend(sequence, kv_head, begin, end, rows, out, scratch)
//   rotate_sum(weight, sum)              a sum of coded values, of this total weight, becomes one of plain values
template <typename Layer>
class SpanAttention {
 public:
  explicit SpanAttention(const Layer& layer) : a_(layer), rows_(layer), sets_(rows_.sets()) {
    for (const RowSet& set : sets_) {
      for (int64_t i = 0; i < set.spans(); ++i) spans_.push_back({&set - sets_.data(), i});
      if (a_.windows.has_exact(set.sequence)) spans_.push_back({&set - sets_.data(), set.spans()});
      most_rows_ = std::max(most_rows_, set.rows);
      count_ = set.part + (set.spans() + 1) * set.rows;
    }
  }

  // out: [tokens, q_heads, value_dim], lse: float32 [tokens, q_heads], both contiguous
  template <typename T>
  void run(T* out, float* lse, int64_t tokens) {
    const int64_t used = a_.windows.batch.query_begin[a_.windows.batch.count];  // padding behind the last sequence
    std::fill(out + used * a_.q_heads * a_.value_dim, out + tokens * a_.q_heads * a_.value_dim, T(0));
    std::fill(lse + used * a_.q_heads, lse + tokens * a_.q_heads, -INFINITY);
    parts_.max.assign(count_, -INFINITY);
    parts_.sum.assign(count_, 0);
    parts_.sums.assign(count_ * a_.value_dim, 0);
    rows_.prepare();
    parallel_for(spans_.size(), 1, [&](int64_t begin, int64_t end) {
      Scratch scratch(a_.scratch_bytes()), sums(4 * std::max(most_rows_ * lanes(), 16 * (a_.key_dim + a_.value_dim)));
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
      std::vector<float> coded(a_.value_dim), exact(a_.value_dim);
      for (int64_t i = begin; i < end; ++i) {
        for (int64_t r = 0; r < sets_[i].rows; ++r) finish(sets_[i], r, coded.data(), exact.data(), out, lse);
      }
    });
  }

 private:
  struct Span {
    int64_t set, span;
  };
  // Partial results.
  struct Parts {
    std::vector<float> max, sum, sums;  // [parts], [parts], [parts, value_dim]
  };

  // Sums of a row in the order of the panels.
  int64_t lanes() const { return a_.keys.panels.panels * a_.keys.panels.fields * 16; }

  void attend_span(const RowSet& set, int64_t span, const Scratch& scratch, const Scratch& memory) {
    Parts& w = parts_;
    const int64_t part = set.part + span * set.rows, begin = set.begin + span * kSpanTokens;
    const QueryRows rows = rows_.coded(set);
    float* sums = memory.as<float>();
    std::fill(sums, sums + set.rows * lanes(), 0.0f);
    const PartialRows out{.max = &w.max[part], .sum = &w.sum[part], .sums = sums, .stride = lanes()};
    a_.attend(set.sequence, set.kv_head, begin, std::min(begin + kSpanTokens, set.end), rows, out, scratch.as<void>());
    for (int64_t r = 0; r < set.rows; ++r) {  // from the order of the panels to that of channels
      float* to = &w.sums[(part + r) * a_.value_dim];
      const float* from = sums + r * lanes();
      const int32_t* words = a_.keys.panels.words;
      for (int64_t c = 0; c < a_.value_dim; ++c, words += 4) {
        to[c] = (from[words[0]] + from[words[1]]) + (from[words[2]] + from[words[3]]);
      }
    }
  }

  void attend_exact(const RowSet& set, float* scratch) {
    Parts& w = parts_;
    const int64_t part = set.part + set.spans() * set.rows;
    const ExactKeys exact = rows_.exact(set);
    const PartialRows out{.max = &w.max[part],
                          .sum = &w.sum[part],
                          .sums = &w.sums[part * a_.value_dim],
                          .stride = a_.value_dim};
    kernels().attend_exact(exact, static_cast<int>(set.rows), a_.softmax_scale, a_.keys.soft_cap, out, scratch);
  }

  // Joins the partial results of a row, in the order of the spans.
  template <typename T>
  void finish(const RowSet& set, int64_t r, float* coded, float* exact, T* out, float* lse) {
    const Parts& w = parts_;
    const int64_t d = a_.value_dim;
    const auto x = rows_.row(set, r);
    const float* sink = a_.sink_logits ? a_.sink_logits + x.head : nullptr;  // one more logit, without a value
    float top = sink ? *sink : -INFINITY, total = 0, of_codes = 0;
    for (int64_t i = 0; i <= set.spans(); ++i) top = std::max(top, w.max[set.part + i * set.rows + r]);
    std::fill(coded, coded + d, 0.0f);
    std::fill(exact, exact + d, 0.0f);
    for (int64_t i = 0; i <= set.spans(); ++i) {
      const int64_t part = set.part + i * set.rows + r;
      if (i == set.spans()) of_codes = total;
      if (w.sum[part] == 0) continue;
      const float weight = std::exp(w.max[part] - top);
      total += weight * w.sum[part];
      float* to = i < set.spans() ? coded : exact;
      for (int64_t c = 0; c < d; ++c) to[c] += weight * w.sums[part * d + c];
    }
    if (sink && top != -INFINITY) total += std::exp(*sink - top);
    a_.rotate_sum(of_codes, coded);
    const float inverse = total == 0 ? 0 : 1 / total;
    for (int64_t c = 0; c < d; ++c) coded[c] = (coded[c] + exact[c]) * inverse;
    const int64_t to = x.token * a_.q_heads + x.head;
    from_float(coded, out + to * d, d);
    lse[to] = total == 0 ? -INFINITY : top + std::log(total);
  }

  const Layer& a_;
  PreparedRows<Layer> rows_;
  const std::vector<RowSet>& sets_;
  std::vector<Span> spans_;
  int64_t most_rows_ = 0, count_ = 0;  // rows of a set, partial results
  Parts parts_;
};

}  // namespace turboquant::cpu
