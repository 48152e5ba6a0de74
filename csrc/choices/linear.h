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
  int64_t tokens;
  Dtype dtype;
};

// Measured on an H200 (docs/measurements/performance_linear.md). With more tokens than these, tiles are faster than
// products of bytes, and torch's product of decoded rows is faster than tiles.
constexpr int64_t kMostFewTokens = 16, kMostTileTokens = 1536;
// The same without tiles.
constexpr int64_t kMostCodeTokens = 64;
// Decoded rows of float32 are multiplied in float32, which is exact, but many times slower.
constexpr int64_t kMostRoundedTokens = 256;

constexpr LinearChoice choose_linear(const LinearShape& call, const DeviceFacts& device) {
  if (call.tokens <= kMostFewTokens) return {LinearKernel::kCodes, "up to 16 tokens"};
  if (!device.warpgroup_products) {
    if (call.tokens <= kMostCodeTokens) {
      return {LinearKernel::kCodes, "up to 64 tokens, without products of warpgroups"};
    }
    return {LinearKernel::kDecoded, "more than 64 tokens, without products of warpgroups"};
  }
  if (call.dtype == Dtype::kFloat32) {
    if (call.tokens <= kMostRoundedTokens) return {LinearKernel::kTiles, "up to 256 tokens of float32"};
    return {LinearKernel::kDecoded, "more than 256 tokens of float32"};
  }
  if (call.tokens <= kMostTileTokens) return {LinearKernel::kTiles, "up to 1,536 tokens"};
  return {LinearKernel::kDecoded, "more than 1,536 tokens"};
}

}  // namespace turboquant
