// Codes one by one, as ops take them.
#pragma once

#include <atomic>

#include "cpu/common/torch.h"
#include "cpu/kernels.h"

namespace turboquant::cpu {

// codes: uint8, contiguous
inline void check_codes_fit(const Tensor& codes, const char* name, int bits) {
  std::atomic<bool> in_range{true};
  const uint8_t* all = data_of<uint8_t>(codes);
  parallel_for(codes.numel(), 1 << 18, [&](int64_t begin, int64_t end) {
    if (!kernels().codes_fit(all + begin, end - begin, bits)) in_range = false;
  });
  STD_TORCH_CHECK(in_range, name, " holds values of ", 1 << bits, " or more, which do not fit ", bits, " bits");
}

}  // namespace turboquant::cpu
