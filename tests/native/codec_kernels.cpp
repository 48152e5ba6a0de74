// Cases of the kernels that transform, encode, pack and decode: vectors, tokens of a cache, weights and their products.
#include "cases.h"
#include "cpu/linear/map.h"

namespace sanitized {

void project(const Kernels& k, Random& random, Written& written) {
  const int64_t d = random.vector_dim(), rows = 8 * random.between(1, 6);
  Memory<float> matrix(rows * d), x(d), out(rows);
  for (int64_t i = 0; i < rows; ++i) random.fill(matrix.get() + i * d, d);
  random.fill(x.get(), d);
  k.project(matrix.get(), rows, format::split_dim(d), x.get(), out.get());
  Memory<uint8_t> bits(rows / 8);
  k.sign_bits(out.get(), rows, bits.get());
  written.add(out);
  written.add(bits);
}

void sketch(const Kernels& k, Random& random, Written& written) {
  const int64_t d = random.vector_dim(), rows = 8 * random.between(1, 6), count = random.between(1, 30);
  const int64_t panels = (rows + kPanelRows - 1) / kPanelRows;
  Memory<float> matrix(rows * d), x((count + kSketchVectors - 1) / kSketchVectors * kSketchVectors * d), length(count);
  Memory<float> in_panels(panels * kPanelRows * d), bounds(panels * kPanelRows);
  const format::Split split = format::split_dim(d);
  for (int64_t i = 0; i < rows; ++i) random.fill(matrix.get() + i * d, d);
  for (int64_t i = 0; i < count; ++i) {
    random.fill(x.get() + i * d, d);
    const Prescaled scaled = k.prescale(x.get() + i * d, split);
    length[i] = scaled.length;
    written.add(&scaled.length, 1), written.add(&scaled.up, 1);
  }
  const SketchPanels p{matrix.get(), rows, split, in_panels.get(), bounds.get()};
  k.sketch_panels(p, 0, panels);
  Memory<uint8_t> bits(count * rows / 8);
  k.sketch_signs(p, x.get(), length.get(), count, bits.get());
  written.add(bits);
}

void convert(const Kernels& k, Random& random, Written& written) {
  const int64_t count = random.between(0, 70);
  const Dtype dtype = random.dtype();
  const Numbers a(random, dtype, count, 40), b(random, dtype, count, 40);
  Memory<float> x(count);
  k.to_float(a.bytes.get(), dtype, count, x.get());
  written.add(x);
  random.fill(x.get(), count);
  const Numbers rounded(dtype, count), sum(dtype, count);
  k.from_float(x.get(), dtype, count, const_cast<uint8_t*>(rounded.bytes.get()));
  rounded.keep(written);
  const float by_a = random.number();
  const bool no_b = random.one_in(2);  // which is not read then
  k.add_scaled(a.bytes.get(), by_a, no_b ? nullptr : b.bytes.get(), no_b ? 0 : random.number(), dtype, count,
               const_cast<uint8_t*>(sum.bytes.get()));
  sum.keep(written);
  written.add(&count, 1);
}

void hadamard(const Kernels& k, Random& random, Written& written) {
  const int64_t d = random.vector_dim(), count = random.between(0, 5), stride = d + random.below(4);
  const Dtype dtype = random.dtype();
  const Memory<float> signs = random_signs(random, d);
  const Numbers x(random, dtype, count == 0 ? 0 : (count - 1) * stride + d, d), out(dtype, count * d);
  k.hadamard(x.bytes.get(), const_cast<uint8_t*>(out.bytes.get()),
             {.dtype = dtype,
              .count = count,
              .stride = stride,
              .split = format::split_dim(d),
              .signs = signs.get(),
              .inverse = random.one_in(2)});
  out.keep(written);
  written.add(&d, 1);
}

void rotate(const Kernels& k, Random& random, Written& written) {
  const int64_t d = random.vector_dim();
  const Memory<float> signs = random_signs(random, d);
  Memory<float> y(d);
  random.fill(y.get(), d);
  (random.one_in(2) ? k.rotate : k.rotate_back)(y.get(), signs.get(), format::split_dim(d));
  written.add(y);
}

void pack(const Kernels& k, Random& random, Written& written) {
  const int64_t rows = random.between(1, 20), d = random.between(1, 300);
  const int bits = static_cast<int>(random.between(1, 8));
  const int64_t row_bytes = format::dense_row_bytes(d, bits);
  const Memory<uint8_t> codes(rows * d, [&](int64_t) { return static_cast<uint8_t>(random.below(1 << bits)); });
  const Memory<uint8_t> packed(rows * row_bytes, [&](int64_t) { return random.code_byte(bits); });
  Memory<uint8_t> to_packed(rows * row_bytes), to_codes(rows * d);
  k.pack(codes.get(), to_packed.get(), rows, d, bits);
  k.unpack(packed.get(), to_codes.get(), rows, d, bits);
  written.add(to_packed);
  written.add(to_codes);
  const uint8_t fit[] = {k.codes_fit(codes.get(), codes.size(), bits), k.codes_fit(codes.get(), d, bits - 1)};
  written.add(fit, 2);
}

const int kCodecWidths[] = {1, 2, 3, 4, 5, 8};

void encode(const Kernels& k, Random& random, Written& written) {
  const int64_t d = random.vector_dim(), count = random.between(1, 5), stride = d + random.below(4);
  const Dtype dtype = random.dtype();
  const int bits = random.any_of(kCodecWidths);
  const Memory<float> signs = random_signs(random, d);
  const RandomChannels channels(random, d);
  const Numbers x(random, dtype, (count - 1) * stride + d, d);
  const Book book(random, bits, d);
  Memory<uint8_t> packed(count * format::dense_row_bytes(d, bits));
  Memory<uint16_t> scale(count);
  k.encode({.x = x.bytes.get(),
            .dtype = dtype,
            .count = count,
            .stride = stride,
            .split = format::split_dim(d),
            .signs = signs.get(),
            .channels = channels.get()},
           book.quantiser, packed.get(), scale.get());
  written.add(packed);
  written.add(scale);
}

void decode(const Kernels& k, Random& random, Written& written) {
  const int64_t d = random.vector_dim(), count = random.between(1, 5);
  const Dtype dtype = random.dtype();
  const int bits = random.any_of(kCodecWidths);
  const Memory<float> signs = random_signs(random, d);
  const RandomChannels channels(random, d);
  const Book book(random, bits, d);
  const Memory<uint8_t> packed(count * format::dense_row_bytes(d, bits),
                               [&](int64_t) { return random.code_byte(bits); });
  const Memory<uint16_t> scale(count, [&](int64_t) { return random.half(false); });
  const Numbers out(dtype, count * d);
  k.decode({.packed = packed.get(),
            .scale = scale.get(),
            .count = count,
            .width = format::as_width(bits),
            .levels = book.levels.get(),
            .split = format::split_dim(d),
            .signs = signs.get(),
            .channels = channels.get(),
            .dtype = dtype},
           const_cast<uint8_t*>(out.bytes.get()));
  out.keep(written);
}

void cache(const Kernels& k, Random& random, Written& written) {
  const int key_widths[] = {2, 3, 4, 5, 8}, value_widths[] = {2, 3, 4, 8}, page_sizes[] = {16, 32, 64, 128};
  const format::Record r{random.head_dim(), random.any_of(page_sizes), random.any_of(key_widths),
                         random.any_of(value_widths)};
  const int64_t d = r.head_dim, kv_heads = random.between(1, 3), pages = random.between(1, 2);
  const int64_t tokens = random.between(1, 6), item_stride = d + random.below(4), items = tokens * kv_heads;
  const Dtype dtype = random.dtype();
  const Memory<float> key_signs = random_signs(random, d), value_signs = random_signs(random, d);
  const Book key_book(random, r.key_bits, d), value_book(random, r.value_bits, d);
  const RandomChannels channels(random, kv_heads * d);
  const int64_t size = (items - 1) * item_stride + d;
  const Numbers x(random, dtype, size, d), y(random, dtype, size, d);
  const int64_t strides = kv_heads + random.below(2), page_stride = strides * r.record_bytes();
  Memory<uint8_t> stored = random_pages(random, r, (pages - 1) * strides + kv_heads);
  Memory<int64_t> slots(tokens);
  for (int64_t t = 0; t < tokens; ++t) slots[t] = random.one_in(5) ? -1 : (7 * t + 3) % (pages * r.page_size);
  const int64_t begin = random.below(items);
  k.store_tokens({.record = r,
                  .keys = {x.bytes.get(), kv_heads * item_stride, item_stride, key_signs.get(), key_book.quantiser},
                  .values = {y.bytes.get(), kv_heads * item_stride, item_stride, value_signs.get(),
                             value_book.quantiser},
                  .channels = channels.get(),
                  .dtype = dtype,
                  .pages = stored.get(),
                  .page_stride = page_stride,
                  .kv_heads = kv_heads,
                  .slots = slots.get()},
                 begin, items);
  written.add(stored);

  const int64_t seqs = random.between(1, 2), longest = random.between(1, 40);
  const int64_t max_pages = (longest + r.page_size - 1) / r.page_size;
  const int64_t table_stride = max_pages + random.below(3);
  const Memory<int32_t> table((seqs - 1) * table_stride + max_pages,
                              [&](int64_t) { return static_cast<int32_t>(random.below(pages)); });
  const Memory<int64_t> lengths(seqs, [&](int64_t) { return random.between(0, longest); });
  const int64_t rows = seqs * longest * kv_heads;
  const Numbers keys(dtype, rows * d), values(dtype, rows * d);
  k.load_tokens({.record = r,
                 .pages = stored.get(),
                 .page_stride = page_stride,
                 .block_table = table.get(),
                 .table_stride = table_stride,
                 .lengths = lengths.get(),
                 .kv_heads = kv_heads,
                 .max_seq_len = longest,
                 .key_levels = key_book.levels.get(),
                 .value_levels = value_book.levels.get(),
                 .key_signs = key_signs.get(),
                 .value_signs = value_signs.get(),
                 .channels = channels.get(),
                 .dtype = dtype},
                0, rows, const_cast<uint8_t*>(keys.bytes.get()), const_cast<uint8_t*>(values.bytes.get()));
  keys.keep(written);
  values.keep(written);
}

void group(const Kernels& k, Random& random, Written& written) {
  const int group = random.one_in(2) ? 32 : 64, bits = random.one_in(2) ? 2 : 4;
  const Dtype dtype = random.dtype();
  const int64_t d = group * random.between(1, 5), count = random.between(1, 6), stride = d + random.below(4);
  const GroupRows rows{dtype, group, bits, count, d};
  const Numbers x(random, dtype, (count - 1) * stride + d, d), decoded(dtype, count * d);
  Memory<uint8_t> packed(count * format::dense_row_bytes(d, bits));
  Memory<uint16_t> scale(count * d / group), zero(count * d / group);
  k.group_encode(rows, x.bytes.get(), stride, packed.get(), scale.get(), zero.get());
  k.group_decode(rows, packed.get(), scale.get(), zero.get(), const_cast<uint8_t*>(decoded.bytes.get()));
  written.add(packed);
  written.add(scale);
  written.add(zero);
  decoded.keep(written);
}

void move(const Kernels& k, Random& random, Written& written) {
  const int key_widths[] = {2, 3, 4, 5, 8}, value_widths[] = {2, 3, 4, 8}, page_sizes[] = {16, 32, 64, 128};
  const format::Record r{random.head_dim(), random.any_of(page_sizes), random.any_of(key_widths),
                         random.any_of(value_widths)};
  const Memory<uint8_t> from = random_pages(random, r, 1);
  Memory<uint8_t> token(r.token_bytes()), to = random_pages(random, r, 1);
  k.take_token(r, from.get(), static_cast<int>(random.below(r.page_size)), token.get());
  k.put_token(r, to.get(), static_cast<int>(random.below(r.page_size)), token.get());
  written.add(token);
  written.add(to);
}

// weight_encode, weight_pack, weight_unpack, weight_decode and linear_packed
void weights(const Kernels& k, Random& random, Written& written) {
  const int widths[] = {4, 4, 8}, groups[] = {64, 128};
  const int bits = random.any_of(widths), group = random.any_of(groups), sub = bits == 4 && random.one_in(2) ? 32 : 0;
  const WeightBlocks blocks{{group, bits, sub}, random.between(1, 40), random.between(1, 3)};
  const format::WeightBlock& b = blocks.block;
  const int64_t n = blocks.n, channels = blocks.groups * group, stride = channels + random.below(4);
  const int64_t count = format::weight_tiles(n) * blocks.groups, bytes = count * b.block_bytes();
  const Dtype dtype = random.dtype();
  const Memory<float> signs = random_signs(random, group);
  const Memory<float> scales(channels, [&](int64_t) { return 0.25f + std::fabs(random.number()); });
  const float* given_scales = random.one_in(2) ? nullptr : scales.get();
  const Book book(random, bits, group, sub ? format::kMultiplierCodes : 1);
  const Numbers w(random, dtype, (n - 1) * stride + channels, channels);
  Memory<uint8_t> packed(bytes);
  k.encode_weight({.blocks = blocks,
                   .w = w.bytes.get(),
                   .dtype = dtype,
                   .stride = stride,
                   .signs = signs.get(),
                   .channel_scale = given_scales,
                   .quantiser = book.quantiser,
                   .over = 50},
                  0, count, packed.get());
  written.add(packed);

  Memory<uint8_t> codes(n * channels, [&](int64_t) { return static_cast<uint8_t>(random.below(1 << bits)); });
  Memory<uint8_t> multipliers(n * blocks.groups * b.subs(),
                              [&](int64_t) { return static_cast<uint8_t>(random.below(16)); });
  Memory<uint16_t> scale(n * blocks.groups, [&](int64_t) { return random.half(false); });
  const WeightCodes parts{codes.get(), scale.get(), multipliers.get()};
  k.pack_weight(blocks, parts, 0, count, packed.get());
  written.add(packed);
  k.unpack_weight(blocks, packed.get(), 0, count, parts);
  written.add(codes);
  written.add(scale);
  written.add(multipliers);
  const Numbers decoded(dtype, n * channels);
  k.decode_weight({.blocks = blocks,
                   .levels = book.levels.get(),
                   .signs = signs.get(),
                   .channel_inverse = given_scales,
                   .dtype = dtype},
                  packed.get(), 0, count, const_cast<uint8_t*>(decoded.bytes.get()));
  decoded.keep(written);

  const int64_t tokens = random.between(1, 20), x_stride = channels + random.below(4);
  const Numbers x(random, dtype, (tokens - 1) * x_stride + channels, channels);
  const Numbers bias(random, dtype, n, n);
  const LinearMap map(b);
  LinearWeight weight{.blocks = blocks, .packed = packed.get(), .levels = {}, .channels = map.get()};
  std::copy(book.levels.get(), book.levels.get() + kTableLevels, weight.levels);
  const Memory<uint8_t> factors(tokens * blocks.groups * k.linear_factor_bytes(b), 64);
  const Memory<float> unit(tokens * blocks.groups);
  const LinearInputs inputs{tokens, const_cast<uint8_t*>(factors.get()), const_cast<float*>(unit.get())};
  k.linear_inputs(weight,
                  {.x = x.bytes.get(),
                   .dtype = dtype,
                   .count = tokens,
                   .stride = x_stride,
                   .signs = signs.get(),
                   .channel_inverse = given_scales},
                  inputs, 0);
  const Numbers y(dtype, tokens * n);
  k.linear_tiles(weight, inputs, 0, format::weight_tiles(n),
                 {.y = const_cast<uint8_t*>(y.bytes.get()),
                  .bias = random.one_in(2) ? nullptr : bias.bytes.get(),
                  .dtype = dtype});
  y.keep(written);
}

}  // namespace sanitized
