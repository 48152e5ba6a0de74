// The codes that the bulk kernels know, as template parameters. codec/encode_bulk.cu and codec/decode_bulk.cu are
// compiled for every pair of storage and width below, and one switch chooses among them.
#pragma once

#include "cuda/codec/codebook.cuh"

namespace turboquant::cuda {

// Where codes are stored: in the keys or values of page records, or in dense rows.
enum class Kind { kKeys, kValues, kRows };
constexpr int choice_of(Kind kind, Width width) { return 8 * static_cast<int>(kind) + format::num_bits(width) - 1; }

// Calls fn<KIND, WIDTH>(). The choice of a kernel (choices/codec.h) has made sure that the pair is one of these. Every
// pair has a case of its own: a branch inside fn would run every few codes, and the warp has no other work that could
// hide it.
template <typename Fn>
__device__ __forceinline__ void dispatch_codes(Kind kind, Width width, Fn&& fn) {
  switch (choice_of(kind, width)) {
    case choice_of(Kind::kKeys, Width::k2): return fn.template operator()<Kind::kKeys, Width::k2>();
    case choice_of(Kind::kKeys, Width::k3): return fn.template operator()<Kind::kKeys, Width::k3>();
    case choice_of(Kind::kKeys, Width::k4): return fn.template operator()<Kind::kKeys, Width::k4>();
    case choice_of(Kind::kKeys, Width::k5): return fn.template operator()<Kind::kKeys, Width::k5>();
    case choice_of(Kind::kKeys, Width::k8): return fn.template operator()<Kind::kKeys, Width::k8>();
    case choice_of(Kind::kValues, Width::k2): return fn.template operator()<Kind::kValues, Width::k2>();
    case choice_of(Kind::kValues, Width::k3): return fn.template operator()<Kind::kValues, Width::k3>();
    case choice_of(Kind::kValues, Width::k4): return fn.template operator()<Kind::kValues, Width::k4>();
    case choice_of(Kind::kValues, Width::k8): return fn.template operator()<Kind::kValues, Width::k8>();
    case choice_of(Kind::kRows, Width::k1): return fn.template operator()<Kind::kRows, Width::k1>();
    case choice_of(Kind::kRows, Width::k2): return fn.template operator()<Kind::kRows, Width::k2>();
    case choice_of(Kind::kRows, Width::k3): return fn.template operator()<Kind::kRows, Width::k3>();
    case choice_of(Kind::kRows, Width::k4): return fn.template operator()<Kind::kRows, Width::k4>();
    case choice_of(Kind::kRows, Width::k5): return fn.template operator()<Kind::kRows, Width::k5>();
    default: return fn.template operator()<Kind::kRows, Width::k8>();
  }
}

}  // namespace turboquant::cuda
