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

// An uninitialised tensor on the device of `like`. what: names it, where a number of the call makes it large
inline Tensor new_tensor(const Tensor& like, const std::vector<int64_t>& shape, ScalarType dtype,
                         const std::string& what = "a tensor") {
  try {
    return torch::stable::new_empty(like, shape, dtype);
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
      STD_TORCH_CHECK(!other || other->end <= span.begin, other->name, " and ", span.name,
                      " share memory: what a call writes must be apart from its other tensors");
      if (!any || any->end < span.end) any = &span;
      if (span.written && (!written || written->end < span.end)) written = &span;
    }
  }

 private:
  struct Span {
    const char *begin, *end, *name;
    bool written;
  };

  void add(const OptionalTensor& t, const char* name, bool written) {
    if (!t || t->numel() == 0) return;
    int64_t last = 0;
    for (int64_t i = 0; i < t->dim(); ++i) last += (t->size(i) - 1) * t->stride(i);
    const char* begin = static_cast<const char*>(t->data_ptr());
    spans_.push_back({begin, begin + (last + 1) * static_cast<int64_t>(t->element_size()), name, written});
  }

  std::vector<Span> spans_;
};

}  // namespace turboquant
