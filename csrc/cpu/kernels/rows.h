// Rows of d channels of any element type and any d: sixteen channels at a time, and a dispatch over element types.
#pragma once

#include "cpu/kernels.h"
#include "cpu/simd.h"

namespace turboquant::cpu::TURBOQUANT_LEVEL {

// Up to 16 numbers, zero behind them; and back. WHOLE: there are always 16.
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

// Calls fn with a Tag of the type that `dtype` means and whether all rows of d channels are whole vectors.
template <typename T, bool WHOLE>
struct RowTag {
  using type = T;
  static constexpr bool kWhole = WHOLE;
};
template <typename Fn>
inline void dispatch_rows(int dtype, int d, Fn&& fn) {
  const bool whole = d % 16 == 0;
  switch (dtype) {
    case 0: return whole ? fn(RowTag<float, true>{}) : fn(RowTag<float, false>{});
    case 1: return whole ? fn(RowTag<Half, true>{}) : fn(RowTag<Half, false>{});
    default: return whole ? fn(RowTag<BFloat16, true>{}) : fn(RowTag<BFloat16, false>{});
  }
}

}  // namespace turboquant::cpu::TURBOQUANT_LEVEL
