// paged_mass: the softmax weights that the queries of a call give each key, summed over queries and query heads.
//
// A unit of work is a span of keys of one (sequence, KV head), with all its queries: nobody else writes its masses. The
// exact keys of a sequence, which can lie in every span, follow when all spans are done. So sums have the same order
// for every number of threads.
#include <span>

#include "cpu/attention/paged.h"

namespace turboquant::cpu {
namespace {

// The masses of a checked call.
class Masses {
 public:
  // lse: float32 [tokens, q_heads], mass: float32 [seqs, kv_heads, keys]
  Masses(const PagedAttention& call, const float* lse, float* mass, int64_t keys)
      : a_(call), rows_(call), tokens_(span_tokens(call.kv_heads)), mass_(mass), keys_(keys), lse_(rows_.count()) {
    const std::vector<RowSet>& sets = rows_.sets();
    for (size_t first = 0, end; first < sets.size(); first = end) {
      end = first + 1;
      while (end < sets.size() && sets[end].first_row > 0) ++end;
      heads_.emplace_back(&sets[first], end - first);
      add_spans(static_cast<int64_t>(heads_.size()) - 1);
    }
    for (const RowSet& set : sets) {
      for (int64_t r = 0; r < set.rows; ++r) {
        const auto row = rows_.row(set, r);
        lse_[set.at + r] = lse[row.token * a_.q_heads + row.head];
      }
    }
  }

  void run() {
    rows_.prepare(rows_.sets());
    for_each_dynamically(
        spans_.size(), [&] { return Scratch(a_.scratch_bytes()); },
        [&](int64_t i, const Scratch& scratch) { add_coded(spans_[i], scratch.as<void>()); });
    for_each_dynamically(
        heads_.size(), [&] { return Scratch(int64_t{sizeof(float)} * 16 * a_.key_dim); },
        [&](int64_t i, const Scratch& scratch) { add_exact(heads_[i], scratch.as<float>()); });
  }

 private:
  // The sets of one sequence and KV head.
  using Head = std::span<const RowSet>;
  struct HeadSpan {
    int64_t head, begin;  // begin: a multiple of tokens_
  };

  void add_spans(int64_t head) {
    int64_t begin = INT64_MAX, end = 0;
    for (const RowSet& set : heads_[head]) {
      if (set.begin >= set.end) continue;
      begin = std::min(begin, set.begin / tokens_ * tokens_);
      end = std::max(end, set.end);
    }
    for (int64_t at = begin; at < end; at += tokens_) spans_.push_back({head, at});
  }

  MassRows rows_of(const RowSet& set) const {
    return {.lse = &lse_[set.at], .mass = mass_ + (set.sequence * a_.kv_heads + set.kv_head) * keys_, .keys = keys_};
  }

  void add_coded(const HeadSpan& span, void* scratch) const {
    for (const RowSet& set : heads_[span.head]) {
      const int64_t begin = std::max(span.begin, set.begin), end = std::min(span.begin + tokens_, set.end);
      if (begin >= end) continue;
      const int32_t* table = data_of<int32_t>(a_.call.block_table) + set.sequence * a_.call.block_table.stride(0);
      kernels().mass_of_pages(a_.paged, table, set.kv_head, begin, end, rows_.coded(set), rows_of(set), scratch);
    }
  }

  void add_exact(const Head& head, float* scratch) const {
    for (const RowSet& set : head) {
      if (!a_.windows.has_exact(set.sequence)) return;
      kernels().mass_of_exact(rows_.exact(set), static_cast<int>(set.rows), a_.softmax_scale, a_.keys.soft_cap,
                              rows_of(set), scratch);
    }
  }

  const PagedAttention& a_;
  PreparedRows<PagedAttention> rows_;
  const int64_t tokens_;  // keys of a span
  float* mass_;
  int64_t keys_;
  std::vector<float> lse_;  // of the prepared rows
  std::vector<Head> heads_;
  std::vector<HeadSpan> spans_;
};

void add_mass(const AttentionCall& call, const format::Record& record, const Tensor& lse, const Tensor& mass) {
  const PagedAttention attention(call, record);
  const Batch& batch = attention.windows.batch;
  for (int64_t s = 0; s < batch.count; ++s) {
    STD_TORCH_CHECK(batch.queries(s) == 0 || batch.length[s] <= mass.size(2), "sequence ", s, " has ", batch.length[s],
                    " tokens but mass has room for ", mass.size(2));
  }
  Masses(attention, data_of<float>(lse), data_of<float>(mass), mass.size(2)).run();
}

}  // namespace
}  // namespace turboquant::cpu

STABLE_TORCH_LIBRARY_IMPL(turboquant, CPU, m) {
  using namespace turboquant;
  m.impl("paged_mass", boxed<&paged_mass<cpu::add_mass>>);
}
