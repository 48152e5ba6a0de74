// How a call of linear_packed is computed on CUDA, and why: the one place that knows the conditions. Plain C++ without
// torch and CUDA, so that the launch, a test and a report of the machine ask the same function.
#pragma once

#include <cstdint>

namespace turboquant {

enum class LinearKernel {
  kCodes,    // products of codes (cuda/linear/kernel.cuh)
  kDecoded,  // the weight is decoded, some rows at a time, for torch's product of matrices
};

struct LinearChoice {
  LinearKernel kernel;
  const char* reason;  // the condition that decided
};

// With more tokens, tensor cores and not memory limit the kernel of codes, and decoding costs less than that.
constexpr int64_t kMostCodeTokens = 256;

constexpr LinearChoice choose_linear(int64_t tokens) {
  if (tokens <= kMostCodeTokens) return {LinearKernel::kCodes, "up to 256 tokens"};
  return {LinearKernel::kDecoded, "more than 256 tokens"};
}

}  // namespace turboquant
