// The element types of vectors, as kernels know them: kernels know no torch. The numbers are torch's own (checks.h
// proves it).
#pragma once

#include <cstdint>

namespace turboquant {

enum class Dtype : int8_t { kFloat16 = 5, kFloat32 = 6, kBFloat16 = 15 };

constexpr int element_size(Dtype t) { return t == Dtype::kFloat32 ? 4 : 2; }

template <typename T>
struct Tag {
  using type = T;
};

// Calls fn with a Tag of the type that a backend (ElementTypes) has for `dtype`. Always inlined, because the CPU
// kernels are compiled once per instruction set and must not share functions.
template <typename ElementTypes, typename Fn>
inline __attribute__((always_inline)) decltype(auto) dispatch_dtype(Dtype dtype, Fn&& fn) {
  switch (dtype) {
    case Dtype::kFloat32: return fn(Tag<typename ElementTypes::Float32>{});
    case Dtype::kFloat16: return fn(Tag<typename ElementTypes::Float16>{});
    case Dtype::kBFloat16: break;
  }
  return fn(Tag<typename ElementTypes::BFloat16>{});
}

}  // namespace turboquant
