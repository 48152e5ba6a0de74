// How a call of linear_packed or linear_experts is computed on CUDA, and why: the one place that knows the conditions.
// Plain C++ without torch and CUDA, so that the launch, a test and a report of the machine ask the same function.
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

// Measured on an H200 with codes of 4 bits (docs/measurements/performance_linear.md). Products of bytes are the fastest
// kernel up to 32 tokens, and up to more if the weight is small. They round activations to 8 bits, those in float32
// only up to kFewTokens.
constexpr int64_t kFewTokens = 16;
struct FewTokens {
  int64_t tokens, weights;  // the most tokens, of a weight of at most so many numbers
  const char* reason;
};
constexpr FewTokens kFewRoundedTokens[] = {{32, INT64_MAX, "up to 32 tokens of 16 bits"},
                                           {64, 17'000'000, "up to 64 tokens, and n * k is at most 17 million"},
                                           {96, 5'000'000, "up to 96 tokens, and n * k is at most 5 million"}};
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
  if (call.dtype == Dtype::kFloat32) {
    if (call.tokens <= choices::kMostRoundedTokens) return {Kernel::kTiles, "up to 256 tokens of float32"};
    return {Kernel::kDecoded, "more than 256 tokens of float32"};
  }
  for (const choices::FewTokens& few : choices::kFewRoundedTokens) {
    if (call.tokens <= few.tokens && choices::has_at_most(call, few.weights)) return {Kernel::kCodes, few.reason};
  }
  if (call.tokens > choices::kMostTileTokens) return {Kernel::kDecoded, "more than 5,000 tokens"};
  if (choices::is_decoded_sooner(call)) return {Kernel::kDecoded, "at least 400 (n k / 2^24)^(4/3) tokens"};
  return {Kernel::kTiles, "fewer than 400 (n k / 2^24)^(4/3) tokens"};
}

// ---- linear_experts ------------------------------------------------------------------------------------------------

enum class ExpertsKernel {
  kCodes,     // products of codes, for pieces of tokens of an expert (cuda/linear/experts/kernel.cuh)
  kTiles,     // products of codes that become float16 in registers, for larger pieces (cuda/linear/tiles/kernel.cuh)
  kOneByOne,  // the host waits for the experts that are chosen, and calls linear_packed for each
};

struct ExpertsChoice {
  ExpertsKernel kernel;
  const char* reason;  // the condition that decided
};

struct ExpertsFacts {
  int64_t pairs, experts, k;  // pairs of a token and an expert; channels of a token
  Dtype dtype;
  bool captured;  // in a CUDA graph, which cannot wait
};

// Whose pairs a thread block counts in shared memory (cuda/linear/experts/arrange.cu).
constexpr int kMostExperts = 4096;

namespace choices {

// Pairs of each expert on average. Up to kFewPairs products of codes are faster than tiles, and up to kMorePairs where
// shared memory has room for kWidePiece tokens (docs/measurements/performance_linear.md); float32 stops at kFewPairs,
// because they round it to 8 bits. GPUs without tiles take them up to kMostCodePairs.
constexpr int64_t kFewPairs = 8, kMorePairs = 12, kMostCodePairs = 64;
constexpr int kLeastPiece = 3, kWidePiece = 16;

// Whether shared memory has room for the channels of so many tokens as operands, beside weights of any format
// (cuda/linear/experts/plan.cuh). A channel takes a byte of each token, and the units of tokens up to one more.
constexpr bool has_room(int64_t k, int tokens, const DeviceFacts& device) {
  return k <= (device.shared_per_block - (56 << 10)) / (1 + tokens);
}

}  // namespace choices

constexpr ExpertsChoice choose_experts(const ExpertsFacts& call, const DeviceFacts& device) {
  using Kernel = ExpertsKernel;
  const bool has_room = choices::has_room(call.k, choices::kLeastPiece, device);
  const auto has_at_most = [&](int64_t pairs) { return call.pairs <= pairs * call.experts; };
  if (!device.warpgroup_products) {
    if (!has_room) return {Kernel::kOneByOne, "shared memory has no room for the channels of 3 tokens"};
    if (has_at_most(choices::kMostCodePairs)) return {Kernel::kCodes, "up to 64 tokens for each expert on average"};
    if (call.captured) return {Kernel::kCodes, "a CUDA graph, which cannot wait"};
    return {Kernel::kOneByOne, "more than 64 tokens for each expert on average"};
  }
  if (has_at_most(choices::kFewPairs)) {
    if (has_room) return {Kernel::kCodes, "up to 8 tokens for each expert on average"};
    return {Kernel::kTiles, "shared memory has no room for the channels of 3 tokens as bytes"};
  }
  if (call.dtype == Dtype::kFloat32) {
    if (!has_at_most(choices::kMostRoundedTokens) && !call.captured) {
      return {Kernel::kOneByOne, "more than 256 tokens of float32 for each expert on average"};
    }
    return {Kernel::kTiles, "more than 8 tokens of float32 for each expert on average"};
  }
  if (!has_at_most(choices::kMorePairs)) return {Kernel::kTiles, "more than 12 tokens for each expert on average"};
  if (choices::has_room(call.k, choices::kWidePiece, device)) {
    return {Kernel::kCodes, "up to 12 tokens for each expert on average"};
  }
  return {Kernel::kTiles, "more than 8 tokens for each expert on average, and no room for the channels of 16"};
}

}  // namespace turboquant
