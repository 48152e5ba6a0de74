// Rows of d channels of any element type and any d: sixteen channels at a time, and a dispatch over element types.
#pragma once

#include "cpu/kernels.h"
#include "cpu/simd.h"

namespace turboquant::cpu::TURBOQUANT_LEVEL {

// Loads up to 16 elements, zero behind them, and stores them. WHOLE: there are always 16.
template <bool WHOLE, typename T>
inline Floats load_some(const T* p, int64_t count) {
  if (WHOLE || count >= 16) return load_float(p);
  T some[16] = {};
  memcpy(some, p, count * sizeof(T));
  return load_float(some);
}
template <bool WHOLE, typename T>
inline void store_some(T* p, Floats x, int64_t count) {
  if (WHOLE || count >= 16) return store_float(p, x);
  T some[16];
  store_float(some, x);
  memcpy(p, some, count * sizeof(T));
}

struct ElementTypes {
  using Float32 = float;
  using Float16 = Half;
  using BFloat16 = turboquant::cpu::TURBOQUANT_LEVEL::BFloat16;
};

// Calls fn with the type of a row's elements and whether all rows of d channels are whole vectors.
template <typename T, bool WHOLE>
struct RowTag {
  using type = T;
  static constexpr bool kWhole = WHOLE;
};
template <typename Fn>
inline void dispatch_rows(Dtype dtype, int d, Fn&& fn) {
  dispatch_dtype<ElementTypes>(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    d % 16 == 0 ? fn(RowTag<T, true>{}) : fn(RowTag<T, false>{});
  });
}

}  // namespace turboquant::cpu::TURBOQUANT_LEVEL
