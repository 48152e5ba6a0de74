// The op hadamard: rows of vectors, rotated or rotated back.
#pragma once

#include "cpu/kernels/rows.h"
#include "cpu/kernels/transform.h"

namespace turboquant::cpu::TURBOQUANT_LEVEL {

// Channels c to c + 15 of x times those of `by`, if there is such a factor.
template <bool WHOLE>
inline Floats times(Floats x, const float* by, int c, int d) {
  return by ? x * load_some<WHOLE>(by + c, d - c) : x;
}

template <typename T, bool WHOLE>
inline void hadamard_rows(const T* x, T* out, const HadamardRows& rows) {
  const format::Split split = rows.split;
  const int d = split.blocks * split.block;
  const float norm = block_norm(split.block);
  const float* before = rows.inverse ? nullptr : rows.signs;
  const float* after = rows.inverse ? rows.signs : nullptr;
  const int64_t count = rows.count, stride = rows.stride;
  alignas(64) float y[format::kMaxVectorDim];
  for (int64_t r = 0; r < count; ++r, x += stride, out += d) {
    for (int c = 0; c < d; c += 16) store(y + c, times<WHOLE>(load_some<WHOLE>(x + c, d - c), before, c, d));
    transform(y, split, norm);
    for (int c = 0; c < d; c += 16) store_some<WHOLE>(out + c, times<WHOLE>(load(y + c), after, c, d), d - c);
  }
}

inline void hadamard(const void* x, void* out, const HadamardRows& rows) {
  dispatch_rows(rows.dtype, rows.split.blocks * rows.split.block, [&](auto tag) {
    using T = typename decltype(tag)::type;
    hadamard_rows<T, tag.kWhole>(static_cast<const T*>(x), static_cast<T*>(out), rows);
  });
}

}  // namespace turboquant::cpu::TURBOQUANT_LEVEL
