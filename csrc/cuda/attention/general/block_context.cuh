// What every part of a block may ask: the call, the block's share of it, the thread's place and the shared memory. A
// part changes none of these; what it does change is its own state, or the contents of the shared memory that it
// fills.
#pragma once

#include "cuda/attention/general/shared_memory.cuh"
#include "cuda/attention/general/work_item.cuh"

namespace turboquant::cuda::general {

template <typename S>
struct BlockContext {
  const Arguments& x;
  const Attention& a;
  WorkItem work;
  SharedMemory<S> shared;
  Thread<S> thread;

  __device__ __forceinline__ WorkItem::Query query(int row) const { return work.query(row, a.group); }
};

}  // namespace turboquant::cuda::general
