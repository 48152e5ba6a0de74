// Runs the kernels of every level with random arguments, for AddressSanitizer and UBSan (tests/test_sanitizers.py). No
// torch.
//
// A case makes its arguments in memory of exactly the promised size, calls kernels and keeps the bytes that they wrote,
// which must be the same at every level. A new kernel needs a function below, and its name in CASES.
#include <pybind11/pybind11.h>

#include <concepts>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/attention/panels.h"
#include "cpu/kernels.h"
#include "cpu/linear/map.h"
#include "format.h"

extern "C" const char* turboquant_cpu_levels();
extern "C" bool turboquant_cpu_force_level(const char* name);

namespace py = pybind11;
namespace format = turboquant::format;
using format::Width;
using turboquant::Dtype;
using turboquant::element_size;
using namespace turboquant::cpu;

namespace {

// ---- Memory and values ----------------------------------------------------------------------------------------------

// Memory holds this byte before anyone writes it. It differs from level to level, so that a result that depends on it
// shows.
uint8_t stale_byte = 0;

// n elements at an address that is a multiple of `align` bytes and of no more, nothing behind them.
template <typename T>
class Memory {
 public:
  explicit Memory(int64_t n, size_t align = alignof(T)) : n_(n) {
    const size_t shift = align < 64 ? align : 0;
    void* p = nullptr;
    if (posix_memalign(&p, 64, shift + n * sizeof(T)) != 0) throw std::bad_alloc();
    memory_.reset(static_cast<uint8_t*>(p));
    std::memset(p, stale_byte, shift + n * sizeof(T));
    data_ = reinterpret_cast<T*>(memory_.get() + shift);
  }
  template <std::invocable<int64_t> Fn>
  Memory(int64_t n, Fn&& fn) : Memory(n) {
    for (int64_t i = 0; i < n; ++i) data_[i] = fn(i);
  }
  T* get() { return data_; }
  const T* get() const { return data_; }
  T& operator[](int64_t i) { return data_[i]; }
  const T& operator[](int64_t i) const { return data_[i]; }
  int64_t size() const { return n_; }

 private:
  struct Free {
    void operator()(uint8_t* p) const { std::free(p); }
  };
  std::unique_ptr<uint8_t, Free> memory_;
  T* data_;
  int64_t n_;
};

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 2 + 1) {}
  uint64_t word() {
    state_ += 0x9E3779B97F4A7C15;
    uint64_t z = state_;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z >> 27) * 0x94D049BB133111EB;
    return z ^ z >> 31;
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(word() % static_cast<uint64_t>(n)); }
  int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }
  bool one_in(int64_t n) { return below(n) == 0; }
  template <typename T, size_t N>
  T any_of(const T (&list)[N]) {
    return list[below(N)];
  }
  Dtype dtype() {
    const Dtype dtypes[] = {Dtype::kFloat32, Dtype::kFloat16, Dtype::kBFloat16};
    return any_of(dtypes);
  }
  float number() { return static_cast<float>(below(1 << 24)) / (1 << 23) - 1; }  // -1 .. 1

  // [n], mostly ordinary; else zeros, one-hot, of extreme size, or with a NaN or an infinity
  void fill(float* x, int64_t n) {
    const float sizes[] = {1, 1, 1, 1, 1e-30f, 1e30f, 1e-42f, 3e38f, 0};
    const float size = any_of(sizes);
    for (int64_t i = 0; i < n; ++i) x[i] = number() * size;
    const float bad[] = {__builtin_nanf(""), __builtin_inff(), -__builtin_inff()};
    if (one_in(20)) x[below(n)] = any_of(bad);
    if (one_in(20)) {
      std::fill(x, x + n, 0.0f);
      x[below(n)] = -1.5f;
    }
  }
  uint8_t code_byte(int bits) {  // the 8-bit grid never writes 0x80
    const auto byte = static_cast<uint8_t>(word());
    return bits == 8 && byte == 0x80 ? 0x81 : byte;
  }
  uint16_t half(bool finite) {
    const uint16_t special[] = {0, 1, 0x7BFF, 0x8001, 0x7C00, 0x7E00};
    if (one_in(40)) return finite ? special[below(4)] : any_of(special);
    return static_cast<uint16_t>(0x2000 + below(0x1000));
  }
  // [2^bits], increasing and symmetric
  void levels(int8_t* to, int bits) {
    const int half = 1 << (bits - 1);
    int level = 0;
    for (int i = 0; i < half; ++i) {
      level = static_cast<int>(between(level + 1, 127 - (half - 1 - i)));
      to[half + i] = static_cast<int8_t>(level);
      to[half - 1 - i] = static_cast<int8_t>(-level);
    }
  }
  int head_dim() {
    for (;;) {
      const int64_t d = 16 * between(1, one_in(4) ? 64 : 18);
      if (format::valid_head_dim(d)) return static_cast<int>(d);
    }
  }
  int vector_dim() {
    for (;;) {
      const int64_t d = between(2, one_in(4) ? format::kMaxVectorDim : 300);
      if (format::split_dim(d).valid()) return static_cast<int>(d);
    }
  }

 private:
  uint64_t state_;
};

// The bytes that kernels wrote. Every NaN becomes the same one: C++ does not define which of two a sum hands on.
class Written {
 public:
  template <typename T>
  void add(const T* p, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      T x = p[i];
      if (x != x) x = static_cast<T>(__builtin_nanf(""));
      bytes_.append(reinterpret_cast<const char*>(&x), sizeof x);
    }
  }
  template <typename T>
  void add(const Memory<T>& m) {
    add(m.get(), m.size());
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

// A float32 as an element of any dtype: half is the float16 that stands for it, or for another number.
void put(uint8_t* to, Dtype dtype, float x, uint16_t half) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const auto top = static_cast<uint16_t>(bits >> 16);
  switch (dtype) {
    case Dtype::kFloat32: std::memcpy(to, &bits, sizeof bits); return;
    case Dtype::kFloat16: std::memcpy(to, &half, sizeof half); return;
    case Dtype::kBFloat16: std::memcpy(to, &top, sizeof top); return;
  }
}

// n elements of one dtype at an address that fits it and no more, in rows of d.
struct Numbers {
  Dtype dtype;
  int64_t item;
  Memory<uint8_t> bytes;

  Numbers(Dtype dtype, int64_t n) : dtype(dtype), item(element_size(dtype)), bytes(n * item, item) {}
  Numbers(Random& random, Dtype dtype, int64_t n, int64_t d) : Numbers(dtype, n) {
    for (int64_t i = 0; i < n; i += d) {
      const int64_t count = std::min(d, n - i);
      Memory<float> row(count);
      random.fill(row.get(), count);
      for (int64_t c = 0; c < count; ++c) put(bytes.get() + (i + c) * item, dtype, row[c], random.half(false));
    }
  }
  void keep(Written& written) const {
    if (dtype == Dtype::kFloat32) return written.add(reinterpret_cast<const float*>(bytes.get()), bytes.size() / 4);
    const int infinity = dtype == Dtype::kFloat16 ? 0x7C00 : 0x7F80;
    for (int64_t i = 0; i < bytes.size(); i += 2) {
      uint16_t x;
      std::memcpy(&x, bytes.get() + i, sizeof x);
      if ((x & 0x7FFF) > infinity) x = 0x7FFF;
      written.add(&x, 1);
    }
  }
};

// ---- Cases ----------------------------------------------------------------------------------------------------------

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

Memory<uint8_t> random_pages(Random& random, const format::Record& r, int64_t records) {
  Memory<uint8_t> pages(records * r.record_bytes(), 64);
  const int widest = std::max(r.key_bits, r.value_bits);
  const bool finite = !random.one_in(3);
  for (int64_t i = 0; i < records; ++i) {
    uint8_t* record = pages.get() + i * r.record_bytes();
    for (int b = 0; b < r.record_bytes(); ++b) record[b] = random.code_byte(widest);
    for (int t = 0; t < r.page_size; ++t) {
      for (const int place : {r.key_scale(t), r.value_scale(t)}) {
        const uint16_t half = random.half(finite);
        std::memcpy(record + place, &half, sizeof half);
      }
    }
  }
  return pages;
}

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

Memory<float> random_signs(Random& random, int64_t d) {
  return {d, [&](int64_t) { return random.one_in(2) ? 1.0f : -1.0f; }};
}
// A center of n channels around 0, or none; with scales of channels, or without.
struct RandomChannels {
  std::unique_ptr<Memory<float>> center, scale, inverse;

  RandomChannels(Random& random, int64_t n) {
    const auto some = [&](auto&& make) { return std::make_unique<Memory<float>>(n, make); };
    if (random.one_in(2)) return;
    center = some([&](int64_t) { return 3 * random.number(); });
    if (random.one_in(2)) return;
    scale = some([&](int64_t) { return 0.25f + std::fabs(random.number()); });
    inverse = some([&](int64_t c) { return 1 / scale->get()[c]; });
  }
  format::Channels get() const {
    const auto of = [](const auto& x) { return x ? x->get() : nullptr; };
    return {of(center), of(scale), of(inverse)};
  }
};

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

// Steps, boundaries and levels of random sizes.
struct Book {
  int count;
  Memory<float> steps;
  Memory<int16_t> boundaries;
  Memory<int8_t> levels;
  Quantiser quantiser;

  // multiple: of the number of steps
  Book(Random& random, int bits, int64_t d, int multiple = 1)
      : count(multiple * static_cast<int>(random.between(1, multiple > 1 ? 3 : 8))), steps(count),
        boundaries(64 * count), levels(32), quantiser{.width = format::as_width(bits),
                                                      .scale_mode = static_cast<format::ScaleMode>(random.below(4)),
                                                      .num_steps = count,
                                                      .steps = steps.get(),
                                                      .boundaries = boundaries.get(),
                                                      .levels = levels.get(),
                                                      .units = 4096 * __builtin_sqrtf(static_cast<float>(d)),
                                                      .over = 32 / __builtin_sqrtf(static_cast<float>(d)),
                                                      .times = 32 * __builtin_sqrtf(static_cast<float>(d))} {
    std::fill(levels.get(), levels.get() + 32, 0);
    if (bits < 8) random.levels(levels.get(), bits);
    for (int i = 0; i < count; ++i) {
      steps[i] = (i ? steps[i - 1] : 0) + (random.one_in(9) ? 1e4f : 0.01f * (random.number() + 1.1f));
      int16_t sorted[32] = {};
      for (int j = 1; j < 1 << bits && bits < 8; ++j) sorted[j] = static_cast<int16_t>(random.between(-3000, 3000));
      std::sort(sorted + 1, sorted + (bits < 8 ? 1 << bits : 1));
      std::fill(&boundaries[64 * i], &boundaries[64 * i] + 64, 0);
      for (int node = 1, depth = 0; node < 1 << bits && bits < 8; ++node) {
        depth += node == 2 << depth;
        boundaries[64 * i + node] = sorted[(2 * (node - (1 << depth)) + 1) << (bits - 1 - depth)];
      }
    }
  }
};

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

using Case = void(const Kernels& k, Random& random, Written& written);
const std::map<std::string, Case*> CASES = {
    {"query_factors", query_factors},
    {"attend_pages", attend_pages},
    {"attend_exact", attend_exact},
    {"score_rows", score_rows},
    {"project", project},
    {"hadamard", hadamard},
    {"rotate", rotate},
    {"pack", pack},
    {"encode", encode},
    {"decode", decode},
    {"group", group},
    {"cache", cache},
    {"move", move},
    {"latents", latents},
    {"weights", weights},
};

py::bytes run(const std::string& name, const std::string& level, uint64_t seed) {
  if (!turboquant_cpu_force_level(level.c_str())) throw std::invalid_argument("no level " + level);
  stale_byte = static_cast<uint8_t>(level.size() * 0x25 + 0x55);
  Random random(seed);
  Written written;
  CASES.at(name)(kernels(), random, written);
  return written.bytes();
}

// For the test that the sanitizers work.
int misbehave(const std::string& how, int n) {
  Memory<uint8_t> bytes(24, 64);
  Memory<int32_t> words(2, 64);
  if (how == "read beyond") return bytes[24 + n];
  if (how == "shift") return 1 << (32 + n);
  if (how == "misaligned") return reinterpret_cast<const int32_t*>(bytes.get() + 1 + n)[0];
  throw std::invalid_argument(how);
}

}  // namespace

PYBIND11_MODULE(turboquant_sanitized, m) {
  py::list cases;
  for (const auto& [name, fn] : CASES) cases.append(name);
  m.attr("CASES") = cases;
  m.attr("LEVELS") = py::str(turboquant_cpu_levels()).attr("split")();
  m.def("run", &run);
  m.def("misbehave", &misbehave);
}
