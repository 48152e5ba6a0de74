// The element types of vectors, as kernels know them: they know no torch. (The numbers are torch's own, which checks.h proves.)
#pragma once

#include <cstdint>

namespace turboquant {

enum class Dtype : int8_t { kFloat16 = 5, kFloat32 = 6, kBFloat16 = 15 };

constexpr int element_size(Dtype t) { return t == Dtype::kFloat32 ? 4 : 2; }

}  // namespace turboquant
