// Random arguments for kernels, in memory of exactly the promised size, and the bytes that kernels write. No torch.
#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "cpu/kernels.h"
#include "format.h"

namespace sanitized {

namespace format = turboquant::format;
using format::Width;
using turboquant::Dtype;
using turboquant::element_size;
using namespace turboquant::cpu;

// ---- Memory and values ----------------------------------------------------------------------------------------------

// Memory holds this byte before anyone writes it. It differs from level to level, so that a result that depends on it
// shows.
inline uint8_t stale_byte = 0;

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
inline void put(uint8_t* to, Dtype dtype, float x, uint16_t half) {
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

// ---- Arguments of several kernels -----------------------------------------------------------------------------------

inline Memory<uint8_t> random_pages(Random& random, const format::Record& r, int64_t records) {
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

inline Memory<float> random_signs(Random& random, int64_t d) {
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

}  // namespace sanitized
