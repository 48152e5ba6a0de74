// paged_attention, merge_attention: softmax attention straight from packed pages.
//
// Keys are never rotated back: with R the rotation, q . key = (R q) . (scale / 32 * levels) + q . center, so the query is rotated
// once. Values are summed in the rotated space and the sum is rotated back once. Keys of the exact tail (sinks and recent
// window, docs/format.md section 9) are scored and summed unrotated and join through the same running maximum.
//
// One piece of work is one (sequence, KV head): all its queries and query heads share every key and value that is unpacked.
#include "cache.h"

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
  const float* center;       // [kv_heads, d] or null
  const float* sink_logits;  // [q_heads] or null
  LevelTable key_table, value_table;
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

// One query head's softmax in progress; sums are relative to the running maximum.
struct Row {
  int64_t position, first;  // sees keys [first, position]
  Attention::Exact exact;
  int64_t token, head;  // where its result goes
  float shift;          // q . center
  float max = -INFINITY, sum = 0;
};

// The queries and sums of the rows of one piece of work.
class Rotated {
 public:
  Rotated(const Attention& a, int64_t s, int64_t kv_head) : a_(a), s_(s), kv_head_(kv_head), d_(a.d) {
    for (int64_t i = 0; i < a.batch.queries(s); ++i) {
      const int64_t position = a.batch.position(s, i), token = a.batch.query_begin[s] + i;
      for (int64_t g = 0; g < a.group; ++g) {
        rows_.push_back({position, a.first_visible(position), a.exact(s, position), token, kv_head * a.group + g, 0});
      }
    }
    plain_.resize(rows_.size() * d_);
    rotated_.resize(rows_.size() * d_);
    coded_sum_.assign(rows_.size() * d_, 0);
    exact_sum_.assign(rows_.size() * d_, 0);
    load_queries();
  }

  void run() {
    int64_t first = INT64_MAX, last = -1;
    for (const Row& row : rows_) {
      first = std::min(first, row.first);
      last = std::max(last, row.position);
    }
    attend_coded(first, last);
    if (a_.tail && a_.tail->slots[s_] >= 0) attend_exact();
  }

  // Writes the rows' outputs and log-sum-exps.
  template <typename T>
  void finish(T* out, float* lse) {
    const format::Split split = format::split_dim(d_);
    for (size_t r = 0; r < rows_.size(); ++r) {
      Row& row = rows_[r];
      if (a_.sink_logits) {  // one more logit in the denominator, without a value
        const float logit = a_.sink_logits[row.head];
        raise(r, logit);
        row.sum += row.max == -INFINITY ? 0 : std::exp(logit - row.max);
      }
      const int64_t to = row.token * a_.q_heads + row.head;
      float* sum = coded_sum_.data() + r * d_;
      rotate_back(sum, a_.value_signs, split);
      add(sum, exact_sum_.data() + r * d_, d_);
      const float inverse = row.sum == 0 ? 0 : 1 / row.sum;
      for (int64_t c = 0; c < d_; ++c) sum[c] *= inverse;
      from_float(sum, out + to * d_, d_);
      lse[to] = row.sum == 0 ? -INFINITY : row.max + std::log(row.sum);
    }
  }

 private:
  void load_queries() {
    const format::Split split = format::split_dim(d_);
    dispatch_float(a_.q.scalar_type(), [&](auto tag) {
      using T = typename decltype(tag)::type;
      const T* q = static_cast<const T*>(a_.q.data_ptr());
      for (size_t r = 0; r < rows_.size(); ++r) {
        float* plain = plain_.data() + r * d_;
        float* rotated = rotated_.data() + r * d_;
        to_float(q + rows_[r].token * a_.q.stride(0) + rows_[r].head * a_.q.stride(1), plain, d_);
        std::copy(plain, plain + d_, rotated);
        rotate(rotated, a_.key_signs, split);
        if (a_.center) rows_[r].shift = dot(plain, a_.center + kv_head_ * d_, d_);
      }
    });
  }

  // Scaled and soft-capped logit.
  float logit(float score) const {
    const float s = score * a_.softmax_scale;
    return a_.soft_cap > 0 ? a_.soft_cap * std::tanh(s / a_.soft_cap) : s;
  }

  // Lifts the running maximum of row r to at least `logit`.
  void raise(size_t r, float logit) {
    Row& row = rows_[r];
    if (logit <= row.max) return;  // a NaN logit goes on and spoils this row, as it should
    const float keep = row.max == -INFINITY ? 0 : std::exp(row.max - logit);
    row.max = logit;
    row.sum *= keep;
    float* coded = coded_sum_.data() + r * d_;
    float* exact = exact_sum_.data() + r * d_;
    for (int64_t c = 0; c < d_; ++c) coded[c] *= keep;
    for (int64_t c = 0; c < d_; ++c) exact[c] *= keep;
  }

  // Adds one key with its value to row r; `sums` are those of the value's space.
  void accumulate(size_t r, float logit, const float* value, std::vector<float>& sums) {
    raise(r, logit);
    Row& row = rows_[r];
    const float p = row.max == -INFINITY ? 0 : std::exp(logit - row.max);
    row.sum += p;
    float* to = sums.data() + r * d_;
    for (int64_t c = 0; c < d_; ++c) to[c] += p * value[c];
  }

  void attend_coded(int64_t first, int64_t last) {
    const int page_size = a_.map->record.page_size;
    std::vector<uint8_t> codes(d_);
    std::vector<float> key(d_), value(d_);
    for (int64_t j = first; j <= last; ++j) {
      bool unpacked = false;
      for (size_t r = 0; r < rows_.size(); ++r) {
        const Row& row = rows_[r];
        if (j < row.first || j > row.position || row.exact.holds(j)) continue;
        if (!unpacked) {
          const uint8_t* rec = a_.record(s_, kv_head_, j);
          const int offset = static_cast<int>(j % page_size), d = static_cast<int>(d_);
          const float key_scale = a_.map->read_key(rec, offset, codes.data());
          a_.key_table.decode(codes.data(), key_scale, key.data(), d);
          const float value_scale = a_.map->read_value(rec, offset, codes.data());
          a_.value_table.decode(codes.data(), value_scale, value.data(), d);
          unpacked = true;
        }
        accumulate(r, logit(dot(rotated_.data() + r * d_, key.data(), d_) + row.shift), value.data(), coded_sum_);
      }
    }
  }

  void attend_exact() {
    const TailView& tail = *a_.tail;
    const int64_t slot = tail.slots[s_];
    dispatch_float(tail.tensor.scalar_type(), [&](auto tag) {
      using T = typename decltype(tag)::type;
      const T* exact = static_cast<const T*>(tail.tensor.data_ptr());
      std::vector<float> key(d_), value(d_);
      const auto attend = [&](size_t r, int64_t begin, int64_t end) {
        for (int64_t j = begin; j < end; ++j) {
          to_float(exact + tail.offset(slot, kv_head_, j, 0), key.data(), d_);
          to_float(exact + tail.offset(slot, kv_head_, j, 1), value.data(), d_);
          accumulate(r, logit(dot(plain_.data() + r * d_, key.data(), d_)), value.data(), exact_sum_);
        }
      };
      for (size_t r = 0; r < rows_.size(); ++r) {
        const Row& row = rows_[r];
        attend(r, row.first, std::min(row.exact.sinks, row.position + 1));
        attend(r, std::max(row.first, row.exact.recent), row.position + 1);
      }
    });
  }

  const Attention& a_;
  int64_t s_, kv_head_, d_;
  std::vector<Row> rows_;                     // [queries * group]
  std::vector<float> plain_, rotated_;        // queries, [rows, d]
  std::vector<float> coded_sum_, exact_sum_;  // values in the rotated and in the original space, [rows, d]
};

int64_t largest_query_count(const Batch& batch) {
  int64_t most = 0;
  for (int64_t s = 0; s < batch.count; ++s) most = std::max(most, batch.queries(s));
  return most;
}

Attention checked_attention(const Tensor& q, const Tensor& cache, const Tensor& block_table, const Tensor& seq_lens,
                            const Tensor& key_signs, const Tensor& value_signs, const OptionalTensor& key_levels,
                            const OptionalTensor& value_levels, const OptionalTensor& center, int64_t page_size,
                            int64_t key_bits, int64_t value_bits, double softmax_scale,
                            const OptionalTensor& cu_seqlens_q, int64_t max_q_len, const OptionalTensor& tail,
                            const OptionalTensor& tail_slots, const OptionalTensor& tail_valid, int64_t sink_tokens,
                            int64_t recent_window, int64_t sliding_window, double soft_cap,
                            const OptionalTensor& sink_logits) {
  check_float(q, "q");
  check_shape(q, "q", {-1, -1, -1});
  check_unit_last_stride(q, "q");
  const int64_t tokens = q.size(0), q_heads = q.size(1), d = q.size(2);
  const format::Record record = check_record(d, page_size, key_bits, value_bits);
  check_cache(cache, q, record);
  const int64_t kv_heads = cache.size(1);
  STD_TORCH_CHECK(kv_heads > 0 && q_heads % kv_heads == 0, "q has ", q_heads, " heads and the cache ", kv_heads,
                  " KV heads: supported are multiples");
  check_constant(key_signs, q, "key_signs", ScalarType::Float, {d});
  check_constant(value_signs, q, "value_signs", ScalarType::Float, {d});
  check_center(center, q, kv_heads, d);
  if (sink_logits) check_constant(*sink_logits, q, "sink_logits", ScalarType::Float, {q_heads});
  STD_TORCH_CHECK(max_q_len >= 1, "max_q_len is ", max_q_len, ", supported: 1 and more");
  STD_TORCH_CHECK(sliding_window >= 0, "sliding_window is ", sliding_window, ", supported: 0 (none) and more");
  STD_TORCH_CHECK(recent_window >= 0, "recent_window is ", recent_window, ", supported: 0 and more");
  STD_TORCH_CHECK(soft_cap >= 0 && std::isfinite(soft_cap), "soft_cap is ", soft_cap, ", supported: 0 (none) and more");
  STD_TORCH_CHECK(std::isfinite(softmax_scale), "softmax_scale is ", softmax_scale, ", supported: finite numbers");

  Batch batch = checked_batch(seq_lens, cu_seqlens_q, q, tokens);
  STD_TORCH_CHECK(largest_query_count(batch) <= max_q_len, "a sequence has ", largest_query_count(batch),
                  " queries, more than max_q_len ", max_q_len);
  check_constant(block_table, q, "block_table", ScalarType::Int, {batch.count, -1});
  std::optional<TailView> ring;
  if (tail) {
    ring = checked_tail(*tail, tail_slots, q, batch.count, kv_heads, d, sink_tokens);
    STD_TORCH_CHECK(ring->ring >= recent_window + max_q_len - 1, "the tail has room for ", ring->ring,
                    " recent tokens, needed: recent_window + max_q_len - 1 = ", recent_window + max_q_len - 1);
    if (tail_valid) check_constant(*tail_valid, q, "tail_valid", ScalarType::Int, {tail->size(0), 2});
  }

  Attention a{q,
              tokens,
              q_heads,
              kv_heads,
              d,
              q_heads / kv_heads,
              std::move(batch),
              &record_map(record),
              static_cast<const uint8_t*>(cache.data_ptr()),
              static_cast<const int32_t*>(block_table.data_ptr()),
              block_table.size(1),
              static_cast<const float*>(key_signs.data_ptr()),
              static_cast<const float*>(value_signs.data_ptr()),
              center ? static_cast<const float*>(center->data_ptr()) : nullptr,
              sink_logits ? static_cast<const float*>(sink_logits->data_ptr()) : nullptr,
              LevelTable(record.key_bits, checked_levels(key_levels, q, key_bits, "key_levels")),
              LevelTable(record.value_bits, checked_levels(value_levels, q, value_bits, "value_levels")),
              ring,
              tail && tail_valid ? static_cast<const int32_t*>(tail_valid->data_ptr()) : nullptr,
              recent_window,
              sliding_window,
              static_cast<float>(softmax_scale),
              static_cast<float>(soft_cap)};
  for (int64_t s = 0; s < a.batch.count; ++s) {
    if (a.batch.queries(s) == 0 || a.batch.length[s] == 0) continue;
    const int64_t first = a.first_visible(a.batch.position(s, 0));
    check_pages(a.table, a.max_pages, cache.size(0), record.page_size, s, first, a.batch.length[s]);
  }
  return a;
}

// out: [tokens, q_heads, d] like q, lse: float32 [tokens, q_heads], both contiguous
void attend(const Attention& a, const Tensor& out, const Tensor& lse) {
  float* lse_out = static_cast<float*>(lse.data_ptr());
  dispatch_float(a.q.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    T* to = static_cast<T*>(out.data_ptr());
    const int64_t used = a.batch.query_begin[a.batch.count];  // padding behind the last sequence
    std::fill(to + used * a.q_heads * a.d, to + a.tokens * a.q_heads * a.d, T(0));
    std::fill(lse_out + used * a.q_heads, lse_out + a.tokens * a.q_heads, -INFINITY);
    parallel_for(a.batch.count * a.kv_heads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        Rotated work(a, item / a.kv_heads, item % a.kv_heads);
        work.run();
        work.finish(to, lse_out);
      }
    });
  });
}

std::tuple<Tensor, Tensor> paged_attention(const Tensor& q, const Tensor& cache, const Tensor& block_table,
                                           const Tensor& seq_lens, const Tensor& key_signs, const Tensor& value_signs,
                                           const OptionalTensor& key_levels, const OptionalTensor& value_levels,
                                           const OptionalTensor& center, int64_t page_size, int64_t key_bits,
                                           int64_t value_bits, double softmax_scale, const OptionalTensor& cu_seqlens_q,
                                           int64_t max_q_len, const OptionalTensor& tail,
                                           const OptionalTensor& tail_slots, const OptionalTensor& tail_valid,
                                           int64_t sink_tokens, int64_t recent_window, int64_t sliding_window,
                                           double soft_cap, const OptionalTensor& sink_logits) {
  const Attention a =
      checked_attention(q, cache, block_table, seq_lens, key_signs, value_signs, key_levels, value_levels, center,
                        page_size, key_bits, value_bits, softmax_scale, cu_seqlens_q, max_q_len, tail, tail_slots,
                        tail_valid, sink_tokens, recent_window, sliding_window, soft_cap, sink_logits);
  Tensor out = empty_like_shape(q, {a.tokens, a.q_heads, a.d}, q.scalar_type());
  Tensor lse = empty_like_shape(q, {a.tokens, a.q_heads}, ScalarType::Float);
  attend(a, out, lse);
  return {out, lse};
}

void paged_attention_out(const Tensor& q, const Tensor& cache, const Tensor& block_table, const Tensor& seq_lens,
                         const Tensor& key_signs, const Tensor& value_signs, const OptionalTensor& key_levels,
                         const OptionalTensor& value_levels, const OptionalTensor& center, int64_t page_size,
                         int64_t key_bits, int64_t value_bits, double softmax_scale, const Tensor& out,
                         const Tensor& lse, const OptionalTensor& cu_seqlens_q, int64_t max_q_len,
                         const OptionalTensor& tail, const OptionalTensor& tail_slots, const OptionalTensor& tail_valid,
                         int64_t sink_tokens, int64_t recent_window, int64_t sliding_window, double soft_cap,
                         const OptionalTensor& sink_logits) {
  const Attention a =
      checked_attention(q, cache, block_table, seq_lens, key_signs, value_signs, key_levels, value_levels, center,
                        page_size, key_bits, value_bits, softmax_scale, cu_seqlens_q, max_q_len, tail, tail_slots,
                        tail_valid, sink_tokens, recent_window, sliding_window, soft_cap, sink_logits);
  check_constant(out, q, "out", q.scalar_type(), {a.tokens, a.q_heads, a.d});
  check_constant(lse, q, "lse", ScalarType::Float, {a.tokens, a.q_heads});
  attend(a, out, lse);
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
  m.impl("paged_attention", TORCH_BOX(&turboquant::cpu::paged_attention));
  m.impl("paged_attention_out", TORCH_BOX(&turboquant::cpu::paged_attention_out));
  m.impl("merge_attention", TORCH_BOX(&turboquant::cpu::merge_attention));
}
