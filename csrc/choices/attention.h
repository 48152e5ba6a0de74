// Which CUDA kernel takes a call of paged_attention, and why: the one place that knows the conditions. Plain C++
// without torch and CUDA, so that the launch, a test and a report of the machine ask the same function.
#pragma once

#include <cstdint>

#include "choices/device.h"
#include "dtype.h"
#include "format.h"

namespace turboquant {

enum class AttentionKernel {
  kSplitKv,  // few query rows over long caches (cuda/attention/split_kv/kernel.cuh)
  kGeneral,  // everything (cuda/attention/general.cu)
};

// What the choice depends on, of a call.
struct AttentionShape {
  int head_dim;
  format::Codes keys, values;
  int64_t query_rows;  // of a KV head: max_q_len * query heads per KV head
  Dtype dtype;         // of queries, results and the exact tail
  bool has_tail;
};

struct AttentionChoice {
  AttentionKernel kernel;
  const char* reason;  // the condition that decided
  int pair;            // kSplitKv: the index of the codes in kSplitKvPairs
};

// The head_dims that the split-KV kernel is compiled for (cuda/attention/instances): all that pages can have up to 256,
// and two larger ones.
constexpr int kSplitKvHeadDims[] = {16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 192, 224, 256, 512, 576};

// The pairs of codes that it is compiled for: those of the presets (torch_turboquant/config.py).
struct CodesOfPair {
  format::Codes keys, values;
  constexpr bool operator==(const CodesOfPair&) const = default;
};
namespace choices {
using format::Grid, format::Width;
constexpr format::Codes kByte{Width::k8, Grid::kUniform};
constexpr format::Codes kUniform3{Width::k3, Grid::kUniform}, kUniform4{Width::k4, Grid::kUniform};
constexpr format::Codes kUniform5{Width::k5, Grid::kUniform};
constexpr format::Codes kLevels2{Width::k2, Grid::kLevels}, kLevels3{Width::k3, Grid::kLevels};
constexpr format::Codes kLevels4{Width::k4, Grid::kLevels};
}  // namespace choices
constexpr CodesOfPair kSplitKvPairs[] = {
    {choices::kByte, choices::kByte},         {choices::kByte, choices::kLevels4},
    {choices::kUniform5, choices::kUniform4}, {choices::kUniform5, choices::kUniform3},
    {choices::kUniform4, choices::kUniform4}, {choices::kLevels4, choices::kLevels4},
    {choices::kLevels4, choices::kLevels3},   {choices::kLevels4, choices::kLevels2},
    {choices::kLevels3, choices::kLevels3},   {choices::kLevels3, choices::kLevels2},
    {choices::kLevels2, choices::kLevels2},
};
constexpr int kSplitKvNumPairs = sizeof(kSplitKvPairs) / sizeof(kSplitKvPairs[0]);

// With more rows the general kernel reads the codes fewer times.
constexpr int kSplitKvMaxRows = 16;

// Its copies end in barriers of shared memory (cuda/common/async_copy.cuh).
constexpr int kSplitKvLeastMajor = 8;

constexpr bool is_split_kv_head_dim(int head_dim) {
  for (const int d : kSplitKvHeadDims) {
    if (d == head_dim) return true;
  }
  return false;
}

// The index of a pair of codes in kSplitKvPairs; -1: it is not there.
constexpr int split_kv_pair(const format::Codes& keys, const format::Codes& values) {
  for (int i = 0; i < kSplitKvNumPairs; ++i) {
    if (kSplitKvPairs[i] == CodesOfPair{keys, values}) return i;
  }
  return -1;
}

constexpr AttentionChoice choose_attention(const AttentionShape& shape, const DeviceFacts& device) {
  const auto general = [](const char* reason) { return AttentionChoice{AttentionKernel::kGeneral, reason, -1}; };
  if (shape.query_rows > kSplitKvMaxRows) return general("more than 16 query rows per KV head");
  if (shape.has_tail && shape.dtype == Dtype::kFloat32) return general("the exact tail is float32");
  if (!is_split_kv_head_dim(shape.head_dim)) return general("the split-KV kernel is not compiled for this head_dim");
  const int pair = split_kv_pair(shape.keys, shape.values);
  if (pair < 0) return general("the split-KV kernel is not compiled for this pair of key and value codes");
  if (device.major < kSplitKvLeastMajor) return general("compute capability below 8.0");
  return {AttentionKernel::kSplitKv, "at most 16 query rows per KV head", pair};
}

}  // namespace turboquant
