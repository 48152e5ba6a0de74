// The seam between the ops of the CPU and torch: threads and allocation. Nothing else in
// csrc/cpu uses more of torch than Tensor itself.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "checks.h"
#include "cpu/kernels.h"
#include "memory.h"

namespace turboquant::cpu {

// fn(begin, end) over [0, n) on torch's threads; `grain` is the least work worth a thread.
template <typename Fn>
void parallel_for(int64_t n, int64_t grain, Fn&& fn) {
  if (n > 0) torch::stable::parallel_for(0, n, grain, std::forward<Fn>(fn));
}

inline int64_t num_threads() { return torch::stable::get_num_threads(); }

// Calls fn(i, memory) for each i of [0, n) on torch's threads. Each thread takes the next i when it is done with its
// last one, so units whose costs differ keep all threads busy. What a thread needs for its units, make() makes once.
template <typename Make, typename Fn>
void for_each_dynamically(int64_t n, Make&& make, Fn&& fn) {
  std::atomic<int64_t> next{0};
  parallel_for(n, 1, [&](int64_t, int64_t) {
    int64_t i = next.fetch_add(1, std::memory_order_relaxed);
    if (i >= n) return;
    auto memory = make();
    for (; i < n; i = next.fetch_add(1, std::memory_order_relaxed)) fn(i, memory);
  });
}
template <typename Fn>
void for_each_dynamically(int64_t n, Fn&& fn) {
  for_each_dynamically(n, [] { return 0; }, [&](int64_t i, int) { fn(i); });
}

// Memory for kernels, aligned to cache lines and not initialised.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) : memory_(static_cast<uint8_t*>(::operator new(bytes + 1, kAlignment))) {}
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(memory_.get());
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(uint8_t* p) const { ::operator delete(p, kAlignment); }
  };
  std::unique_ptr<uint8_t[], Free> memory_;
};

// The address of element i of a tensor's memory.
inline void* element(const Tensor& t, int64_t i) {
  return static_cast<char*>(t.data_ptr()) + i * static_cast<int64_t>(t.element_size());
}

// `count` neighbouring elements of a tensor from element `first` on, as float32.
inline void to_float(const Tensor& t, int64_t first, int64_t count, float* out) {
  kernels().to_float(element(t, first), dtype_of(t), count, out);
}

// The data of a checked tensor, and of an optional one: null where it is absent.
template <typename T>
T* data_of(const Tensor& t) {
  return static_cast<T*>(t.data_ptr());
}
template <typename T>
const T* data_of(const OptionalTensor& t) {
  return t ? static_cast<const T*>(t->data_ptr()) : nullptr;
}

// Signs of a rotation, [d] and checked. Like levels and steps they can be read without waiting for a device.
inline const float* checked_signs(const Tensor& signs, const char* name) {
  const float* s = data_of<float>(signs);
  bool good = true;
  for (int64_t i = 0; i < signs.numel(); ++i) good &= std::fabs(s[i]) == 1.0f;
  STD_TORCH_CHECK(good, name, " must be +1 or -1");
  return s;
}

// The number of rows that is worth a thread when one channel of a row costs `work`.
inline int64_t row_grain(int64_t d, int64_t work) { return 1 + (1 << 18) / d / work; }

// Rows, in the last dimension, of a tensor with arbitrary outer strides, counted over the flattened leading dimensions.
class Rows {
 public:
  explicit Rows(const Tensor& t) : count_(t.numel() ? 1 : 0) {
    if (count_ == 0) return;  // sizes and strides can be anything
    for (int64_t i = 0; i + 1 < t.dim(); ++i) {
      if (t.size(i) == 1) continue;  // its stride can be anything, and would end a run
      count_ *= t.size(i);
      if (!sizes_.empty() && strides_.back() == t.stride(i) * t.size(i)) {  // it goes on where the last dimension ended
        sizes_.back() *= t.size(i);
        strides_.back() = t.stride(i);
      } else {
        sizes_.push_back(t.size(i));
        strides_.push_back(t.stride(i));
      }
    }
  }
  int64_t count() const { return count_; }
  // Offset in elements of row i.
  int64_t operator()(int64_t i) const {
    int64_t offset = 0;
    for (size_t k = sizes_.size(); k-- > 0; i /= sizes_[k]) offset += i % sizes_[k] * strides_[k];
    return offset;
  }
  // Calls fn(first, count, offset, stride) for the longest runs of rows begin .. end - 1 that lie at equal distances.
  template <typename Fn>
  void runs(int64_t begin, int64_t end, Fn&& fn) const {
    const int64_t size = sizes_.empty() ? 1 : sizes_.back(), stride = sizes_.empty() ? 0 : strides_.back();
    for (int64_t next; begin < end; begin = next) {
      next = std::min(end, (begin / size + 1) * size);
      fn(begin, next - begin, (*this)(begin), stride);
    }
  }

 private:
  std::vector<int64_t> sizes_, strides_;
  int64_t count_;
};

}  // namespace turboquant::cpu
