// Elements of tensors as float32 and back, and the sum of two rows with a factor each.
#pragma once

#include "cpu/kernels/rows.h"

namespace turboquant::cpu::TURBOQUANT_LEVEL {

inline void to_float(const void* x, Dtype dtype, int64_t count, float* out) {
  dispatch_dtype<ElementTypes>(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* from = static_cast<const T*>(x);
    for (int64_t i = 0; i < count; i += 16) {
      store_some<false>(out + i, load_some<false>(from + i, count - i), count - i);
    }
  });
}

inline void from_float(const float* x, Dtype dtype, int64_t count, void* out) {
  dispatch_dtype<ElementTypes>(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    T* to = static_cast<T*>(out);
    for (int64_t i = 0; i < count; i += 16) {
      store_some<false>(to + i, load_some<false>(x + i, count - i), count - i);
    }
  });
}

inline void add_scaled(const void* a, float by_a, const void* b, float by_b, Dtype dtype, int64_t count, void* out) {
  dispatch_dtype<ElementTypes>(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto part = [&](const void* of, float by, int64_t i) {
      return by == 0 ? broadcast(0.0f) : broadcast(by) * load_some<false>(static_cast<const T*>(of) + i, count - i);
    };
    for (int64_t i = 0; i < count; i += 16) {
      store_some<false>(static_cast<T*>(out) + i, part(a, by_a, i) + part(b, by_b, i), count - i);
    }
  });
}

}  // namespace turboquant::cpu::TURBOQUANT_LEVEL
