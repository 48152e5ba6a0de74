// The memory of a call: new tensors, and arguments that must not share memory.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <string>
#include <vector>

#include <torch/csrc/stable/ops.h>

#include "checks.h"

namespace turboquant {

// What torch said of its latest failure in this thread. Only torch 2.13 and later can be asked, so this function of it
// is looked up, not linked.
inline std::string words_of_torch() {
  using Words = const char*();
  static const auto words = reinterpret_cast<Words*>(dlsym(RTLD_DEFAULT, "torch_exception_get_what_without_backtrace"));
  return words ? words() : "torch could not allocate it";
}

// The strides of a contiguous tensor as torch sets them; false: they or its elements cannot be counted.
inline bool contiguous_strides(const std::vector<int64_t>& shape, int64_t* strides) {
  int64_t elements = 1, stride = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = stride;
    if (shape[i] < 0 || __builtin_mul_overflow(elements, shape[i], &elements) ||
        __builtin_mul_overflow(stride, std::max<int64_t>(shape[i], 1), &stride)) {
      return false;
    }
  }
  return true;
}

// An uninitialised tensor on the device of `like`. what: names it, where a number of the call makes it large
inline Tensor new_tensor(const Tensor& like, const std::vector<int64_t>& shape, ScalarType dtype,
                         const std::string& what = "a tensor") {
  constexpr size_t kMostDims = 16;
  int64_t strides[kMostDims];
  try {
    if (shape.size() > kMostDims || !contiguous_strides(shape, strides)) {
      return torch::stable::new_empty(like, shape, dtype);
    }
    // calls the allocator sooner than the dispatcher's new_empty, whose arguments are put on a stack
    const DeviceNumbers device = numbers_of_device(like);
    AtenTensorHandle fresh = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(), strides,
                                                    dtype_number(dtype), device.type, device.index, &fresh));
    return Tensor(fresh);
  } catch (const std::exception&) {
    STD_TORCH_CHECK(false, "no memory for ", what, " of shape ", shape_text(shape), " and dtype ", dtype_name(dtype),
                    ": ", words_of_torch());
  }
}

// A contiguous copy.
inline Tensor new_copy(const Tensor& t) {
  Tensor copy = new_tensor(t, leading_shape(t, 0, {}), t.scalar_type(), "a contiguous copy");
  torch::stable::copy_(copy, t);
  return copy;
}

// The arguments of a call that writes some of them, which must not share memory with any other.
class Arguments {
 public:
  void reads(const OptionalTensor& t, const char* name) { add(t, name, false); }
  void writes(const OptionalTensor& t, const char* name) { add(t, name, true); }

  void check() {
    std::sort(spans_.begin(), spans_.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
    const Span *any = nullptr, *written = nullptr;  // of those before, the ones that end last
    for (const Span& span : spans_) {
      const Span* other = span.written ? any : written;
      if (other && other->end > span.begin) return check_pairs();
      if (!any || any->end < span.end) any = &span;
      if (span.written && (!written || written->end < span.end)) written = &span;
    }
  }

 private:
  struct Span {
    const char *begin, *end, *name;
    bool written;
    int64_t entry, stride;  // bytes of an entry of the first dimension, and to the next one; stride 0: it is dense

    // Whether no byte is in both, as far as their entries tell: those of both repeat at the same distance, or one of
    // the spans is dense and no longer than a gap of the other.
    bool apart(const Span& other) const {
      if (end <= other.begin || other.end <= begin) return true;
      if (stride == 0 && other.stride == 0) return false;
      if (stride != 0 && other.stride != 0 && stride != other.stride) return false;
      const int64_t period = std::max(stride, other.stride), shift = (other.begin - begin) % period;
      const int64_t from = shift < 0 ? shift + period : shift;  // where an entry of `other` begins after one of this
      return from >= entry && from + other.entry <= period;
    }
  };

  // Looks closer where spans overlap: layers of one allocation interleave.
  void check_pairs() const {
    for (size_t i = 0; i < spans_.size(); ++i) {
      for (size_t k = 0; k < i; ++k) {
        const Span &a = spans_[k], &b = spans_[i];
        STD_TORCH_CHECK(!(a.written || b.written) || a.apart(b), a.name, " and ", b.name,
                        " share memory: what a call writes must be apart from its other tensors");
      }
    }
  }

  void add(const OptionalTensor& t, const char* name, bool written) {
    if (!t || t->numel() == 0) return;
    int64_t last = 0, entry = 1;  // of the tensor, and of its first entry
    for (int64_t i = 0; i < t->dim(); ++i) last += (t->size(i) - 1) * t->stride(i);
    for (int64_t i = 1; i < t->dim(); ++i) entry += (t->size(i) - 1) * t->stride(i);
    const int64_t size = static_cast<int64_t>(t->element_size()), bytes = (last + 1) * size;
    const int64_t stride = t->dim() > 0 && t->size(0) > 1 && t->stride(0) > entry ? t->stride(0) * size : 0;
    const char* begin = static_cast<const char*>(t->data_ptr());
    spans_.push_back({begin, begin + bytes, name, written, stride == 0 ? bytes : entry * size, stride});
  }

  std::vector<Span> spans_;
};

}  // namespace turboquant
