// The arguments of the general attention kernel, and the part of a call that one thread block does.
//
// Rows of one sequence and KV head are numbered by query, then by query head of the group: row r is query r / group
// under the head kv_head * group + r % group.
#pragma once

#include "cuda/attention/call.cuh"
#include "cuda/codec/record.cuh"
#include "cuda/codec/transform.cuh"
#include "format.h"

namespace turboquant::cuda::general {

struct Arguments {
  Attention a;
  RecordLayout layout;
  format::Split split;
  float norm;  // of the transform: 1 / sqrt(split.block)
  // How the general kernel shares its work, 0 for others: thread blocks that share a sequence and KV head, all of them,
  // and the last blocks of the grid, which clear the rows of tokens without a sequence.
  int row_blocks = 0;
  unsigned work_blocks = 0, clear_blocks = 0;

  explicit Arguments(const Attention& call)
      : a(call), layout(call.record), split(format::split_dim(call.record.head_dim)), norm(block_norm(split)) {}

  // Do the keys of this pass lack their center, so that each query's product with the center is added to its scores?
  // Codes are stored without it. From exact float32 keys it is subtracted here, because float16 then rounds them
  // better.
  __device__ __forceinline__ bool centered(bool exact) const {
    return a.channels.center && (!exact || a.dtype == Dtype::kFloat32);
  }
};

struct WorkItem {
  int sequence, kv_head;
  int first_row, rows;  // of the sequence and KV head
  int first_query;      // token of the sequence's first query

  struct Query {
    int64_t token;
    int head;
  };
  __device__ __forceinline__ Query query(int row, int group) const {
    const int i = (first_row + row) / group;
    return {int64_t{first_query} + i, kv_head * group + first_row + row - i * group};
  }
};

}  // namespace turboquant::cuda::general
