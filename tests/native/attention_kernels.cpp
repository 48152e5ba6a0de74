// Cases of the kernels that multiply queries with codes: attention, its masses, scores, latents.
#include "cases.h"
#include "cpu/attention/panels.h"

namespace sanitized {

// Queries as integers. Their bytes are the level's own; only units are compared.
struct Queries {
  Memory<uint8_t> factors;
  Memory<float> unit;
  Memory<int32_t> correction;

  Queries(const Kernels& k, Random& random, int64_t count, int d, Layout layout, int max_level)
      : factors(count * k.query_factor_bytes(d, layout), 64), unit(count), correction(count) {
    for (int64_t i = 0; i < count; ++i) {
      Memory<float> q(d);
      random.fill(q.get(), d);
      uint8_t* to = factors.get() + i * k.query_factor_bytes(d, layout);
      Memory<int16_t> scratch(d + kQueryMargin);
      unit[i] = k.query_factors(q.get(), d, layout, max_level, to, &correction[i], scratch.get());
    }
  }
};

void query_factors(const Kernels& k, Random& random, Written& written) {
  const Width widths[] = {Width::k2, Width::k4, Width::k5, Width::k8}, width = random.any_of(widths);
  const Queries q(k, random, 3, random.vector_dim(), Layout{width, false}, static_cast<int>(random.between(1, 127)));
  written.add(q.unit);
}

// Softmax of queries in progress, without any key yet.
struct Partial {
  Memory<float> max, sum, sums;
  PartialRows rows;

  Partial(int64_t count, int64_t stride)
      : max(count, [](int64_t) { return -__builtin_inff(); }), sum(count, [](int64_t) { return 0.0f; }),
        sums(count * stride, [](int64_t) { return 0.0f; }), rows{max.get(), sum.get(), sums.get(), stride} {}
  void keep(Written& written) const {
    written.add(max);
    written.add(sum);
    written.add(sums);
  }
};

// The masses of a sequence's keys, and denominators for `count` queries.
struct Masses {
  Memory<float> lse, mass;
  MassRows rows;

  Masses(Random& random, int64_t count, int64_t keys)
      : lse(count, [&](int64_t) { return random.one_in(6) ? -__builtin_inff() : 4 * random.number(); }),
        mass(keys, [&](int64_t) { return random.number(); }), rows{lse.get(), mass.get(), keys} {}
};

AttendedKeys attended(Random& random, int head_dim, const ValuePanels& panels, int key_bits, int value_bits) {
  AttendedKeys keys{.head_dim = head_dim,
                    .panels = panels,
                    .key_levels = {},
                    .value_levels = {},
                    .soft_cap = 0,
                    .rope_dim = 0,
                    .rope_factor = 0};
  if (key_bits < 8) random.levels(keys.key_levels, key_bits);
  if (value_bits < 8) random.levels(keys.value_levels, value_bits);
  return keys;
}

void attend_pages(const Kernels& k, Random& random, Written& written) {
  const int key_widths[] = {2, 3, 4, 5, 8}, value_widths[] = {2, 3, 4, 8}, page_sizes[] = {16, 32, 64, 128};
  const format::Record r{random.head_dim(), random.any_of(page_sizes), random.any_of(key_widths),
                         random.any_of(value_widths)};
  const int64_t kv_heads = random.between(1, 2), num_pages = random.between(1, 3), length = random.between(1, 400);
  const int64_t strides = kv_heads + random.below(2);  // records from one page to the next
  const Memory<uint8_t> pages = random_pages(random, r, (num_pages - 1) * strides + kv_heads);
  const Memory<int32_t> table((length + r.page_size - 1) / r.page_size,
                              [&](int64_t) { return static_cast<int32_t>(random.below(num_pages)); });
  const PanelMap panels(r);
  const float caps[] = {0, 0, 0.5f, 30};
  PagedKeys keys{.record = r,
                 .attended = attended(random, r.head_dim, panels.get(), r.key_bits, r.value_bits),
                 .pages = pages.get(),
                 .page_stride = strides * r.record_bytes()};
  keys.attended.soft_cap = random.any_of(caps);
  const int max_level = r.key_bits == 8 ? 127 : keys.attended.key_levels[(1 << r.key_bits) - 1];

  const int count = static_cast<int>(random.between(1, 9));
  Queries q(k, random, count, r.head_dim, key_layout(r), max_level);
  for (int i = 0; i < count; ++i) q.unit[i] /= 32 * static_cast<float>(r.head_dim);
  const Memory<float> shift(count, [&](int64_t) { return random.one_in(2) ? 0 : random.number(); });
  const int64_t begin = random.below(length) / kBlockTokens * kBlockTokens;
  Memory<int64_t> first(count), end(count);
  for (int i = 0; i < count; ++i) {
    first[i] = random.one_in(2) ? 0 : random.below(length);
    end[i] = random.one_in(2) ? length : random.between(0, length);
  }
  Memory<uint8_t> scratch(k.attend_scratch_bytes(keys), 64);
  const Partial out(count, static_cast<int64_t>(panels.get().panels) * panels.get().fields * 16);
  const QueryRows rows{.count = count,
                       .factors = q.factors.get(),
                       .unit = q.unit.get(),
                       .correction = q.correction.get(),
                       .shift = shift.get(),
                       .rope = nullptr,
                       .rope_stride = 0,
                       .first = first.get(),
                       .end = end.get()};
  const int64_t kv_head = random.below(kv_heads);
  k.attend_pages(keys, table.get(), kv_head, begin, length, rows, out.rows, scratch.get());
  out.keep(written);
  const Masses masses(random, count, length);
  k.mass_of_pages(keys, table.get(), kv_head, begin, length, rows, masses.rows, scratch.get());
  written.add(masses.mass);
}

// Values of their own behind the keys, or, as of latents, the first channels of the keys.
void attend_exact(const Kernels& k, Random& random, Written& written) {
  const bool latent = random.one_in(2);
  const int64_t d = latent ? 16 * random.between(2, 20) : random.head_dim(), sink_tokens = random.between(0, 5),
                window = random.between(0, 40);
  const int64_t length = random.between(1, 90), ring = std::max<int64_t>(1, window + random.below(5));
  const int count = static_cast<int>(random.between(1, 9));
  const Dtype dtype = random.dtype();
  const int64_t item = element_size(dtype), rows = sink_tokens + ring;
  const int64_t tail_row = latent ? d : 2 * d, value_dim = latent ? d - 16 : d;
  Memory<uint8_t> tail(rows * tail_row * item, item);
  for (int64_t i = 0; i < rows * tail_row; ++i) {
    const float x = random.one_in(2000) ? __builtin_nanf("") : random.number();
    put(tail.get() + i * item, dtype, x, random.half(true));
  }
  Memory<float> q(count * d);
  Memory<int64_t> first(count), sinks(count), recent(count), position(count);
  for (int i = 0; i < count; ++i) {
    random.fill(q.get() + i * d, d);
    position[i] = std::max<int64_t>(0, length - 1 - random.below(std::max<int64_t>(1, ring - window + 1)));
    first[i] = random.one_in(2) ? 0 : random.between(0, position[i]);
    sinks[i] = random.between(0, sink_tokens);
    recent[i] = std::min(std::max(position[i] - window + 1, sink_tokens), position[i] + 1);
  }
  Memory<float> scratch(16 * (d + value_dim));
  const float caps[] = {0, 0, 0.5f, 30};
  const Partial out(count, value_dim);
  // the last tokens are the call's own, in memory of exactly their size
  const int64_t fresh = random.below(std::min<int64_t>(length, 20) + 1), key_stride = d + random.below(4),
                value_stride = d + random.below(4);
  const Numbers new_keys(random, dtype, fresh ? (fresh - 1) * key_stride + d : 0, d);
  const Numbers new_values(random, dtype, fresh ? (fresh - 1) * value_stride + value_dim : 0, d);
  const ExactKeys exact{.tail = tail.get(),
                        .tail_row = tail_row,
                        .tail_value_at = latent ? 0 : d,
                        .new_keys = new_keys.bytes.get(),
                        .new_values = new_values.bytes.get(),
                        .new_begin = length - fresh,
                        .new_key_stride = key_stride,
                        .new_value_stride = value_stride,
                        .dtype = dtype,
                        .key_dim = d,
                        .value_dim = value_dim,
                        .sink_tokens = sink_tokens,
                        .ring = ring,
                        .q = q.get(),
                        .first = first.get(),
                        .sinks = sinks.get(),
                        .recent = recent.get(),
                        .position = position.get()};
  const float cap = random.any_of(caps);
  k.attend_exact(exact, count, 0.1f, cap, out.rows, scratch.get());
  out.keep(written);
  const Masses masses(random, count, length);
  Memory<float> keys(16 * d);
  k.mass_of_exact(exact, count, 0.1f, cap, masses.rows, keys.get());
  written.add(masses.mass);
}

void score_rows(const Kernels& k, Random& random, Written& written) {
  const int widths[] = {1, 2, 3, 4, 5, 8}, bits = random.any_of(widths), d = random.vector_dim();
  const int64_t row_bytes = format::dense_row_bytes(d, bits), keys = random.between(1, 70);
  const Memory<uint8_t> packed(keys * row_bytes, [&](int64_t) { return random.code_byte(bits); });
  const Memory<uint16_t> halves(keys, [&](int64_t) { return random.half(false); });
  Memory<float> lengths(keys);
  random.fill(lengths.get(), keys);
  const bool half = random.one_in(2);
  const Width width = format::as_width(bits);
  DenseRows rows{.rows = packed.get(),
                 .row_bytes = row_bytes,
                 .end = packed.get() + packed.size(),
                 .d = d,
                 .width = width,
                 .levels = {},
                 .half_scale = half ? halves.get() : nullptr,
                 .scale = half ? nullptr : lengths.get()};
  if (bits < 8) random.levels(rows.levels, bits);

  const int count = static_cast<int>(random.between(1, 9));
  const Queries q(k, random, count, d, dense_layout(width), bits == 8 ? 127 : rows.levels[(1 << bits) - 1]);
  const Memory<float> shift(count, [&](int64_t) { return random.number(); });
  const int64_t begin = random.below(keys), end = random.between(begin, keys);
  const Memory<float> scores(count * keys, [](int64_t) { return 1.0f; });
  Memory<uint8_t> scratch(16 * row_bytes + 64);
  k.score_rows(rows, begin, end, {count, q.factors.get(), q.unit.get(), q.correction.get(), shift.get()},
               {const_cast<float*>(scores.get()), keys, random.one_in(2)}, scratch.get());
  written.add(scores);
}

// mla_store, mla_load and mla_attention
void latents(const Kernels& k, Random& random, Written& written) {
  const int dims[] = {128, 256, 512}, rope_dims[] = {0, 32, 64}, widths[] = {3, 4, 5, 8}, page_sizes[] = {32, 64, 128};
  const format::LatentRecord r{random.any_of(dims), random.any_of(rope_dims), random.any_of(page_sizes),
                               random.any_of(widths)};
  const int64_t d = r.latent_dim, dr = r.rope_dim, num_pages = random.between(1, 3), tokens = random.between(1, 6);
  const int64_t latent_stride = d + random.below(4), rope_stride = dr + random.below(4);
  const int64_t page_stride = r.record_bytes() + 16 * random.below(3);
  const Dtype dtype = random.dtype(), rope_dtype = random.one_in(2) ? Dtype::kFloat16 : Dtype::kBFloat16;
  const Memory<float> signs = random_signs(random, d);
  const float* given_signs = random.one_in(3) ? nullptr : signs.get();
  const Book book(random, r.bits, d);
  const RandomChannels channels(random, d);
  const Numbers x(random, dtype, (tokens - 1) * latent_stride + d, d);
  const Numbers raw(random, dtype, dr ? (tokens - 1) * rope_stride + dr : 0, std::max<int64_t>(dr, 1));
  Memory<uint8_t> pages((num_pages - 1) * page_stride + r.record_bytes(), 64);
  for (int64_t i = 0; i < pages.size(); ++i) pages[i] = random.code_byte(r.bits);
  for (int64_t page = 0; page < num_pages; ++page) {
    for (int t = 0; t < r.page_size; ++t) {
      const uint16_t half = random.half(true);
      std::memcpy(pages.get() + page * page_stride + r.scale_of(t), &half, sizeof half);
      for (int64_t c = 0; c < dr; ++c) {
        put(pages.get() + page * page_stride + r.rope_of(t) + 2 * c, rope_dtype, random.number(), random.half(true));
      }
    }
  }
  Memory<int64_t> slots(tokens);
  for (int64_t t = 0; t < tokens; ++t) slots[t] = random.one_in(5) ? -1 : (7 * t + 3) % (num_pages * r.page_size);
  k.store_latents({.record = r,
                   .latent = x.bytes.get(),
                   .rope = raw.bytes.get(),
                   .latent_stride = latent_stride,
                   .rope_stride = rope_stride,
                   .dtype = dtype,
                   .rope_dtype = rope_dtype,
                   .signs = given_signs,
                   .quantiser = book.quantiser,
                   .channels = channels.get(),
                   .pages = pages.get(),
                   .page_stride = page_stride,
                   .slots = slots.get()},
                  random.below(tokens), tokens);

  const int64_t length = random.between(1, 300), longest = random.between(1, 40);
  const Memory<int32_t> table((std::max(length, longest) + r.page_size - 1) / r.page_size,
                              [&](int64_t) { return static_cast<int32_t>(random.below(num_pages)); });
  const Memory<int64_t> lengths(1, [&](int64_t) { return random.between(0, longest); });
  const Numbers latent(dtype, longest * d), rope(dtype, longest * dr);
  k.load_latents({.record = r,
                  .pages = pages.get(),
                  .page_stride = page_stride,
                  .block_table = table.get(),
                  .table_stride = table.size(),
                  .lengths = lengths.get(),
                  .max_seq_len = longest,
                  .levels = book.levels.get(),
                  .signs = given_signs,
                  .channels = channels.get(),
                  .rope_dtype = rope_dtype,
                  .dtype = dtype},
                 0, longest, const_cast<uint8_t*>(latent.bytes.get()), const_cast<uint8_t*>(rope.bytes.get()));
  latent.keep(written);
  rope.keep(written);

  const LatentPanelMap panels(r.latent_dim);
  LatentKeys keys{.record = r,
                  .attended = attended(random, r.latent_dim, panels.get(), r.bits, r.bits),
                  .pages = pages.get(),
                  .page_stride = page_stride,
                  .rope_dtype = rope_dtype};
  keys.attended.rope_dim = r.rope_dim;
  keys.attended.rope_factor = 0.1f;
  const int max_level = r.bits == 8 ? 127 : keys.attended.key_levels[(1 << r.bits) - 1];
  const int count = static_cast<int>(random.between(1, 9));
  Queries q(k, random, count, r.latent_dim, row_layout(r.row()), max_level);
  for (int i = 0; i < count; ++i) q.unit[i] /= 32 * static_cast<float>(d);
  const Memory<float> shift(count, [&](int64_t) { return random.number(); });
  const int64_t q_stride = dr + random.below(4);
  Memory<float> q_rope(dr ? (count - 1) * q_stride + dr : 0, [&](int64_t) { return random.number(); });
  const int64_t begin = random.below(length) / kBlockTokens * kBlockTokens;
  Memory<int64_t> first(count), end(count);
  for (int i = 0; i < count; ++i) {
    first[i] = random.one_in(2) ? 0 : random.below(length);
    end[i] = random.one_in(2) ? length : random.between(0, length);
  }
  Memory<uint8_t> scratch(k.attend_latents_scratch_bytes(keys), 64);
  const Partial out(count, static_cast<int64_t>(panels.get().panels) * panels.get().fields * 16);
  k.attend_latents(keys, table.get(), begin, length,
                   {.count = count,
                    .factors = q.factors.get(),
                    .unit = q.unit.get(),
                    .correction = q.correction.get(),
                    .shift = shift.get(),
                    .rope = q_rope.get(),
                    .rope_stride = q_stride,
                    .first = first.get(),
                    .end = end.get()},
                   out.rows, scratch.get());
  out.keep(written);
}

}  // namespace sanitized
