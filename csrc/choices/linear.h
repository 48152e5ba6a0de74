// How a call of linear_packed is computed on CUDA, and why: the one place that knows the conditions. Plain C++ without
// torch and CUDA, so that the launch, a test and a report of the machine ask the same function.
#pragma once

#include <cstdint>

#include "choices/device.h"
#include "dtype.h"

namespace turboquant {

enum class LinearKernel {
  kCodes,    // products of codes (cuda/linear/kernel.cuh)
  kTiles,    // products of codes that become float16 in registers (cuda/linear/tiles/kernel.cuh)
  kDecoded,  // the weight is decoded, some rows at a time, for torch's product of matrices
};

struct LinearChoice {
  LinearKernel kernel;
  const char* reason;  // the condition that decided
};

struct LinearShape {
  int64_t tokens, n, k;  // k channels become n outputs
  Dtype dtype;
};

namespace choices {

// Measured on an H100 and an H200 (docs/measurements/performance_linear.md). Products of bytes are the fastest kernel
// up to kFewTokens, and up to kFewTokensOfSmall where n * k is at most kSmallWeight.
constexpr int64_t kFewTokens = 16, kFewTokensOfSmall = 32, kSmallWeight = 12'000'000;
// GPUs without tiles take products of bytes up to here.
constexpr int64_t kMostCodeTokens = 64;
// With more tokens torch's product of decoded rows is faster than tiles, however large the weight is.
constexpr int64_t kMostTileTokens = 5000;
// Decoded rows of float32 are multiplied in float32, which is exact, but many times slower.
constexpr int64_t kMostRoundedTokens = 256;

constexpr bool has_at_most(const LinearShape& call, int64_t weights) { return call.n <= weights / call.k; }

// Whether decoding the weight takes less time than tiles lose against torch's product. Tiles lose more with more
// tokens, and with smaller weights. The limit, 400 (n k / 2^24)^(4/3) tokens, fits what was measured.
constexpr bool is_decoded_sooner(const LinearShape& call) {
  const double tokens = static_cast<double>(call.tokens) / 400;
  const double weights = static_cast<double>(call.n) * static_cast<double>(call.k) / (1 << 24);
  return tokens * tokens * tokens >= weights * weights * weights * weights;
}

}  // namespace choices

constexpr LinearChoice choose_linear(const LinearShape& call, const DeviceFacts& device) {
  using Kernel = LinearKernel;
  if (call.tokens <= choices::kFewTokens) return {Kernel::kCodes, "up to 16 tokens"};
  if (!device.warpgroup_products) {
    if (call.tokens <= choices::kMostCodeTokens) {
      return {Kernel::kCodes, "up to 64 tokens, without products of warpgroups"};
    }
    return {Kernel::kDecoded, "more than 64 tokens, without products of warpgroups"};
  }
  if (call.tokens <= choices::kFewTokensOfSmall && choices::has_at_most(call, choices::kSmallWeight)) {
    return {Kernel::kCodes, "up to 32 tokens, and n * k is at most 12 million"};
  }
  if (call.dtype == Dtype::kFloat32) {
    if (call.tokens <= choices::kMostRoundedTokens) return {Kernel::kTiles, "up to 256 tokens of float32"};
    return {Kernel::kDecoded, "more than 256 tokens of float32"};
  }
  if (call.tokens > choices::kMostTileTokens) return {Kernel::kDecoded, "more than 5,000 tokens"};
  if (choices::is_decoded_sooner(call)) return {Kernel::kDecoded, "at least 400 (n k / 2^24)^(4/3) tokens"};
  return {Kernel::kTiles, "fewer than 400 (n k / 2^24)^(4/3) tokens"};
}

}  // namespace turboquant
