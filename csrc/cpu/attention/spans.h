// Attention of a checked call: cuts its keys into spans, runs the kernels on torch's threads and joins the results.
//
// A unit of work is a span of keys of one (sequence, KV head): all its queries and query heads share every key and
// value that is unpacked (kernels/attention.h). Partial results of spans and of exact keys are joined in a fixed order,
// and the cut depends on lengths and on the number of KV heads only, so that results do not depend on the number of
// threads. The sets of rows of a turn are attended to together: a turn has as many as memory of a bounded size holds,
// with their partial results.
#pragma once

#include <span>

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

constexpr int64_t kRowsAtOnce = 128;  // rows of a unit of work: their sums stay in the cache

// Keys of a unit of work, a multiple of kBlockTokens. A sequence with few KV heads has few units, so these are
// smaller: one KV head has four of them at 2,048 tokens.
inline int64_t span_tokens(int64_t kv_heads) { return std::clamp<int64_t>(256 * kv_heads, 512, 2048); }

// Rows that share keys: queries of one sequence, query heads of one KV head. Their keys are cut into spans.
struct RowSet {
  int64_t sequence, kv_head;
  int64_t first_row, rows;  // among those of (sequence, KV head), query-major
  int64_t begin, end;       // packed keys that some row sees; begin is the first of a block
  int64_t at;               // index of the first row among those of all sets
  int64_t span_tokens;      // keys of a span
  int64_t spans() const { return (end - begin + span_tokens - 1) / span_tokens; }
  int64_t parts() const { return (spans() + 1) * rows; }  // partial results: the exact keys come after the spans
};

// Cuts the rows of a call into sets.
inline std::vector<RowSet> sets_of(const Windows& w, int64_t kv_heads, int64_t group) {
  std::vector<RowSet> sets;
  int64_t at = 0;
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
                   .span_tokens = span_tokens(kv_heads)};
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

  // Bytes of a prepared row.
  int64_t row_bytes() const {
    return (a_.key_dim + 2) * int64_t{sizeof(float)} + factor_bytes_ + int64_t{sizeof(int32_t)} +
           6 * int64_t{sizeof(int64_t)};
  }

  // Prepares the rows of neighbouring sets, on torch's threads. The functions below know those of the last call.
  void prepare(std::span<const RowSet> sets) {
    if (sets.empty()) return;
    base_ = sets.front().at;
    const int64_t count = sets.back().at + sets.back().rows - base_;
    plain_.resize(count * a_.key_dim);
    if (count > room_) factors_ = Scratch(count * factor_bytes_);
    room_ = std::max(room_, count);
    for (auto* v : {&unit_, &shift_}) v->resize(count);
    correction_.resize(count);
    for (auto* v : {&first_, &end_, &visible_, &sinks_, &recent_, &position_}) v->resize(count);
    const auto make = [&] {
      return OneQuery{std::vector<float>(a_.value_dim), std::vector<int16_t>(a_.value_dim + kQueryMargin)};
    };
    for_each_dynamically(sets.size(), make, [&](int64_t i, OneQuery& memory) { prepare(sets[i], memory); });
  }

  QueryRows coded(const RowSet& set) const {
    const int64_t at = set.at - base_;
    return {.count = static_cast<int>(set.rows),
            .factors = factors(at),
            .unit = &unit_[at],
            .correction = &correction_[at],
            .shift = &shift_[at],
            .rope = plain_.data() + at * a_.key_dim + a_.value_dim,
            .rope_stride = a_.key_dim,
            .first = &first_[at],
            .end = &end_[at]};
  }
  ExactKeys exact(const RowSet& set) const {
    ExactKeys exact = a_.exact_keys(set.sequence, set.kv_head);
    const int64_t at = set.at - base_;
    exact.q = &plain_[at * a_.key_dim];
    exact.first = &visible_[at];
    exact.sinks = &sinks_[at];
    exact.recent = &recent_[at];
    exact.position = &position_[at];
    return exact;
  }

 private:
  uint8_t* factors(int64_t row) const { return factors_.template as<uint8_t>() + row * factor_bytes_; }

  // Memory of a thread.
  struct OneQuery {
    std::vector<float> rotated;
    std::vector<int16_t> integers;
  };

  void prepare(const RowSet& set, OneQuery& memory) {
    const int d = static_cast<int>(a_.value_dim);
    for (int64_t r = 0; r < set.rows; ++r) {
      const Row x = row(set, r);
      const int64_t at = set.at - base_ + r;
      float* plain = plain_.data() + at * a_.key_dim;
      a_.load_query(x.token, x.head, plain);
      shift_[at] = a_.rotate_query(set.kv_head, plain, memory.rotated.data()) * a_.softmax_scale;
      const float unit = kernels().query_factors(memory.rotated.data(), d, a_.layout, a_.max_key_level, factors(at),
                                                 &correction_[at], memory.integers.data());
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
  // Of the prepared rows, one after the other.
  int64_t base_ = 0, room_ = 0;      // the first one's index among those of all sets; for how many factors_ has room
  std::vector<float> plain_;         // queries, [rows, key_dim]
  Scratch factors_{0};               // the same rotated, as integers: [rows, factor_bytes]
  std::vector<float> unit_, shift_;  // [rows]
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
  explicit SpanAttention(const Layer& layer) : a_(layer), rows_(layer) {
    const int64_t part_bytes = (a_.value_dim + 2) * int64_t{sizeof(float)};
    const int64_t most = kTurnBytes * num_threads();
    int64_t bytes = 0;
    for (const RowSet& set : rows_.sets()) {
      const int64_t more = set.rows * rows_.row_bytes() + set.parts() * part_bytes;
      if (turns_.empty() || bytes + more > most) {
        turns_.push_back({.first = &set});
        bytes = 0;
      }
      bytes += more;
      turns_.back().add(set, a_.windows.has_exact(set.sequence));
      most_rows_ = std::max(most_rows_, set.rows);
      most_parts_ = std::max(most_parts_, turns_.back().parts);
    }
  }

  // out: [tokens, q_heads, value_dim], lse: float32 [tokens, q_heads], both contiguous
  void run(const Tensor& out, float* lse) {
    const int64_t used = a_.windows.batch.query_begin[a_.windows.batch.count];  // padding behind the last sequence
    const int64_t padded = (out.size(0) - used) * a_.q_heads, first = used * a_.q_heads;
    std::memset(element(out, first * a_.value_dim), 0, padded * a_.value_dim * out.element_size());
    std::fill_n(lse + first, padded, -INFINITY);
    parts_.sums = Scratch(most_parts_ * a_.value_dim * static_cast<int64_t>(sizeof(float)));
    for (const Turn& turn : turns_) run(turn, out, lse);
  }

 private:
  static constexpr int64_t kTurnBytes = 4 << 20;  // of prepared rows and partial results, for each thread: a cache's

  // A span of keys and the rows of a set, or the exact keys of these rows.
  struct Unit {
    const RowSet& set;
    int64_t span;  // set.spans(): the exact keys
    int64_t part;  // the first of its partial results
  };
  // Neighbouring sets whose rows and partial results exist at once.
  struct Turn {
    const RowSet* first;
    std::vector<int64_t> part = {};  // the first partial result of each set
    std::vector<Unit> units = {};
    int64_t parts = 0;

    std::span<const RowSet> sets() const { return {first, part.size()}; }
    void add(const RowSet& set, bool has_exact) {
      part.push_back(parts);
      for (int64_t i = 0; i < set.spans() + has_exact; ++i) units.push_back({set, i, parts + i * set.rows});
      parts += set.parts();
    }
  };
  // Partial results of a turn.
  struct Parts {
    std::vector<float> max, sum;  // [parts]
    Scratch sums{0};              // float [parts, value_dim]; not initialised where `sum` is 0
  };
  // Memory of a thread that attends, and of one that joins the partial results of a row.
  struct UnitMemory {
    Scratch scratch, sums;
  };
  struct RowSums {
    std::vector<float> coded, exact;
  };

  // Sums of a row in the order of the panels.
  int64_t lanes() const { return a_.keys.panels.panels * a_.keys.panels.fields * 16; }
  float* sums_of(int64_t part) const { return parts_.sums.template as<float>() + part * a_.value_dim; }

  void run(const Turn& turn, const Tensor& out, float* lse) {
    rows_.prepare(turn.sets());
    parts_.max.assign(turn.parts, -INFINITY);
    parts_.sum.assign(turn.parts, 0);
    const int64_t sums = std::max(most_rows_ * lanes(), 16 * (a_.key_dim + a_.value_dim));
    const auto memory_of_units = [&] {
      return UnitMemory{Scratch(a_.scratch_bytes()), Scratch(sums * static_cast<int64_t>(sizeof(float)))};
    };
    for_each_dynamically(turn.units.size(), memory_of_units, [&](int64_t i, const UnitMemory& memory) {
      const Unit& unit = turn.units[i];
      unit.span < unit.set.spans() ? attend_span(unit, memory.scratch, memory.sums) : attend_exact(unit, memory.sums);
    });
    const auto memory_of_rows = [&] {
      return RowSums{std::vector<float>(a_.value_dim), std::vector<float>(a_.value_dim)};
    };
    for_each_dynamically(turn.part.size(), memory_of_rows, [&](int64_t i, RowSums& memory) {
      const RowSet& set = turn.sets()[i];
      for (int64_t r = 0; r < set.rows; ++r) {
        finish(set, turn.part[i], r, memory.coded.data(), memory.exact.data(), out, lse);
      }
    });
  }

  void attend_span(const Unit& unit, const Scratch& scratch, const Scratch& memory) {
    const RowSet& set = unit.set;
    const int64_t begin = set.begin + unit.span * set.span_tokens, end = std::min(begin + set.span_tokens, set.end);
    float* sums = memory.as<float>();
    std::fill(sums, sums + set.rows * lanes(), 0.0f);
    const PartialRows out{.max = &parts_.max[unit.part],
                          .sum = &parts_.sum[unit.part],
                          .sums = sums,
                          .stride = lanes()};
    a_.attend(set.sequence, set.kv_head, begin, end, rows_.coded(set), out, scratch.as<void>());
    for (int64_t r = 0; r < set.rows; ++r) {  // from the order of the panels to that of channels
      float* to = sums_of(unit.part + r);
      const float* from = sums + r * lanes();
      const int32_t* words = a_.keys.panels.words;
      for (int64_t c = 0; c < a_.value_dim; ++c, words += 4) {
        to[c] = (from[words[0]] + from[words[1]]) + (from[words[2]] + from[words[3]]);
      }
    }
  }

  void attend_exact(const Unit& unit, const Scratch& memory) {
    const RowSet& set = unit.set;
    const PartialRows out{.max = &parts_.max[unit.part],
                          .sum = &parts_.sum[unit.part],
                          .sums = sums_of(unit.part),
                          .stride = a_.value_dim};
    std::fill_n(out.sums, set.rows * a_.value_dim, 0.0f);
    kernels().attend_exact(rows_.exact(set), static_cast<int>(set.rows), a_.softmax_scale, a_.keys.soft_cap, out,
                           memory.as<float>());
  }

  // Joins the partial results of a row, in the order of the spans. first: those of the set's first row
  void finish(const RowSet& set, int64_t first, int64_t r, float* coded, float* exact, const Tensor& out, float* lse) {
    const Parts& w = parts_;
    const int64_t d = a_.value_dim;
    const auto x = rows_.row(set, r);
    const float* sink = a_.sink_logits ? a_.sink_logits + x.head : nullptr;  // one more logit, without a value
    float top = sink ? *sink : -INFINITY, total = 0, of_codes = 0;
    for (int64_t i = 0; i <= set.spans(); ++i) top = std::max(top, w.max[first + i * set.rows + r]);
    std::fill(coded, coded + d, 0.0f);
    std::fill(exact, exact + d, 0.0f);
    for (int64_t i = 0; i <= set.spans(); ++i) {
      const int64_t part = first + i * set.rows + r;
      if (i == set.spans()) of_codes = total;
      if (w.sum[part] == 0) continue;
      const float weight = std::exp(w.max[part] - top);
      total += weight * w.sum[part];
      float* to = i < set.spans() ? coded : exact;
      const float* from = sums_of(part);
      for (int64_t c = 0; c < d; ++c) to[c] += weight * from[c];
    }
    if (sink && top != -INFINITY) total += std::exp(*sink - top);
    a_.rotate_sum(of_codes, coded);
    const float inverse = total == 0 ? 0 : 1 / total;
    for (int64_t c = 0; c < d; ++c) coded[c] = (coded[c] + exact[c]) * inverse;
    const int64_t to = x.token * a_.q_heads + x.head;
    kernels().from_float(coded, dtype_of(out), d, element(out, to * d));
    lse[to] = total == 0 ? -INFINITY : top + std::log(total);
  }

  const Layer& a_;
  PreparedRows<Layer> rows_;
  std::vector<Turn> turns_;
  int64_t most_rows_ = 0, most_parts_ = 0;  // rows of a set, partial results of a turn
  Parts parts_;
};

}  // namespace turboquant::cpu
