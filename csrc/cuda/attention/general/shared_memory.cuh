// The shared memory of a block of the general attention kernel, in this order:
//
//   BlockConstants | queries float16 [kRows, kDim] | keys float16 [kBuffers, kKeys, kDim] | values, the same size |
//   staged codes [2]
//
// The order within queries, keys and values is the one that tensor cores read (operand_layout.cuh). When sums become
// outputs, float32 rows take the place of everything behind the constants.
#pragma once

#include <algorithm>

#include "cuda/attention/general/expansion.cuh"
#include "cuda/attention/general/shape.cuh"
#include "format.h"

namespace turboquant::cuda::general {

constexpr int kKnownSteps = 4;       // steps whose page tiles are known at the same time
constexpr int kQueryRowsAtOnce = 4;  // of a warp that prepares queries, whose loads are in flight together

// What a step's keys have besides their float16 elements.
template <typename S>
struct KeyScalars {
  float key_scale[S::kKeys], value_scale[S::kKeys];  // true value = float16 element * scale
  int position[S::kKeys];                            // -1: there is no key
};

// The keys that a row sees: those in codes are [max(first, sinks), recent), the exact ones [first, sinks) and
// [max(first, recent), end).
struct VisibleKeys {
  int first, sinks, recent, end;

  __device__ __forceinline__ int coded_begin() const { return max(first, sinks); }
  __device__ __forceinline__ int recent_begin() const { return max(first, recent); }
};
// Where the keys in codes begin that any row from `first` to `last` sees. A row that stands among the sinks sees none.
__device__ __forceinline__ int coded_begin(const VisibleKeys& first, const VisibleKeys& last) {
  return max(first.first, last.sinks);
}

// The small arrays, whose size does not depend on the head dimension or the format.
template <typename S>
struct BlockConstants {
  KeyScalars<S> scalars[S::kBuffers];
  VisibleKeys visible[S::kRows];
  // Base-2 score = product with a row's float16 query * factor + shift. In the end, output = sum * factor.
  float factor[S::kRows];
  float shift[S::kRows];
  LevelTables levels;
  float hartley[format::kMaxBlocks];            // row 1 of the transform's odd factor
  int new_begin;                                // the first position that the call's own tokens have
  uint8_t* tile[kKnownSteps][S::kValueBlocks];  // the record tiles that hold a step's keys; null: no keys
};

template <typename S>
class SharedMemory {
 public:
  static constexpr int kSumRows = 16 * S::kRowWarps;  // float32 rows: one strip of every team

  __device__ __forceinline__ explicit SharedMemory(uint8_t* base) : base_(base) {}

  __device__ __forceinline__ BlockConstants<S>& constants() const {
    return *reinterpret_cast<BlockConstants<S>*>(base_);
  }
  __device__ __forceinline__ KeyScalars<S>& scalars(int step) const { return constants().scalars[step % S::kBuffers]; }
  __device__ __forceinline__ uint4* queries() const { return reinterpret_cast<uint4*>(base_ + kQueries); }
  __device__ __forceinline__ uint4* keys(int step) const {
    return reinterpret_cast<uint4*>(base_ + kKeys) + step % S::kBuffers * S::kOperandWords;
  }
  __device__ __forceinline__ uint4* values(int step) const {
    return reinterpret_cast<uint4*>(base_ + kValues) + step % S::kBuffers * S::kOperandWords;
  }
  __device__ __forceinline__ uint8_t* stage(int step, int stage_bytes) const {
    return base_ + kStages + step % 2 * stage_bytes;
  }

  // float32 [kSumRows, sum_stride(d)], over everything but the constants.
  __device__ __forceinline__ float* sum_rows() const { return reinterpret_cast<float*>(base_ + kQueries); }
  __host__ __device__ static constexpr int sum_stride(int d) { return d + 8; }

  // float32 [rows, d] of a warp, over the keys, while queries are prepared.
  __device__ __forceinline__ float* query_rows(int warp, int rows, int d) const {
    return reinterpret_cast<float*>(base_ + kKeys) + warp * rows * d;
  }

  static int bytes(int d, int stage_bytes) {
    return std::max(kStages + (S::kStaged ? 2 * stage_bytes : 0), kQueries + 4 * kSumRows * sum_stride(d));
  }

 private:
  static constexpr int kQueries = round_up(sizeof(BlockConstants<S>), 128);
  static constexpr int kKeys = kQueries + S::kRows * S::kDim * 2;
  static constexpr int kValues = kKeys + S::kBuffers * S::kOperandWords * 16;
  static constexpr int kStages = kValues + S::kBuffers * S::kOperandWords * 16;

  uint8_t* base_;
};

}  // namespace turboquant::cuda::general
