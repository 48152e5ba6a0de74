// The decode kernel as its callers see it: which calls it takes, what memory it needs, the launch. (The kernel: attention/split_kv_kernel.cuh.)
#pragma once

#include "cuda/attention/call.cuh"
#include "cuda/attention/operands.cuh"

namespace turboquant::cuda {

// Whether the decode kernel exists for the head_dim, bits and grids of a call and for the current device (compute capability 8.0 and
// later), the rows of a KV head (max_q_len * group) are few, and an exact tail is of a 16-bit type.
bool split_kv_takes(const Attention& a);

// Bytes of memory for partial results that a launch on the current device needs; its contents do not matter.
int64_t split_kv_workspace_bytes(const Attention& a);

// One launch. workspace: aligned to 16 bytes.
void attend_split_kv(const Attention& a, void* workspace, cudaStream_t stream);

// A compiled kernel; kernel is null where there is none.
struct DecodeKernel {
  const void* kernel = nullptr;
  int rows = 0;          // of a block of rows
  int blocks = 0;        // of eight warps, per multiprocessor: as many as its registers allow
  int small_blocks = 0;  // the same of four warps
  int query_bytes = 0;   // of the queries' operands
  int join_floats = 0;   // of a warp's state
  CodeFacts codes{};
};

// For keys and values of so many bits, one of 4, 8 and 16 rows: defined in decode_<head_dim>.cu.
template <int D>
DecodeKernel find_split_kv(int key_bits, bool key_uniform, int value_bits, bool value_uniform, int rows);

}  // namespace turboquant::cuda
