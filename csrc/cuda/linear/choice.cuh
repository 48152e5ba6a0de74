// Which weight a column of linear_experts is multiplied with.
#pragma once

#include <cstdint>

namespace turboquant::cuda::linear {

struct Choice {
  const int64_t* experts;  // [columns]
  int64_t weight_bytes;    // of an expert
  int64_t count;           // of experts
  int choices;             // of a token
};

}  // namespace turboquant::cuda::linear
