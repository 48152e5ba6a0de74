// What all parts of the key-tile kernel (attention/key_tiles/kernel.cuh) share, some of it with the host that launches
// it: sizes that are known when it is compiled, where everything of a block lies in shared memory, and a thread's view
// of its block.
#pragma once

#include "cuda/attention/roles.cuh"
#include "cuda/attention/split_kv/rows.cuh"
#include "cuda/common/async_copy.cuh"

namespace turboquant::cuda::key_tiles {

using namespace roles;
using split_kv::BlockView;
using split_kv::part_floats;
using split_kv::StageLayout;

constexpr int kThreads = 2 * kWarpgroup, kWarps = kThreads / 32;
constexpr int kMaxStages = 8;

// D: head_dim. ROWS: query rows of a block.
template <int D, int ROWS>
struct Shape {
  static_assert((D == 64 || D == 128) && (ROWS == 16 || ROWS == 24 || ROWS == 32));
  static constexpr int kDim = D, kRows = ROWS;
  static constexpr int kRowTiles = ROWS / 8;  // a product's columns are eight rows each
  static constexpr int kBlocks = 2;           // per multiprocessor

  static constexpr int kStepBytes = 64 * ROWS;  // of 32 channels of all queries, each channel two bytes
  static constexpr int kQueryBytes = D / 32 * kStepBytes;
  static constexpr int kBlockBytes = 32 * ROWS;  // of the weights of 16 tokens
  static constexpr int kWeightBytes = kUnitTokens / 16 * kBlockBytes;
  static constexpr int kPart = part_floats(D);
};

// What scores need to know of the rows of a block: arrays one behind the other.
struct RowTable {
  float *factor, *start;  // of a sum of products with codes: the factor, and what is added then
  float* shift;           // the score of the center, base 2
  int *first, *end;       // the keys that a row sees from codes

  __host__ __device__ static constexpr int bytes(int rows) { return 5 * 4 * rows; }

  __device__ __forceinline__ RowTable(uint8_t* memory, int rows)
      : factor(reinterpret_cast<float*>(memory)), start(factor + rows), shift(start + rows),
        first(reinterpret_cast<int*>(shift + rows)), end(first + rows) {}

  // A row that does not exist sees all keys, so that it never decides what is masked.
  __device__ __forceinline__ bool exists(int row) const { return first[row] >= 0; }
};

// The plan of a launch. Of split-KV's plan, `stages` are units of a common ring, `operands` the queries as bytes, and
// `join`, `result` and `exact` have their places in the ring: they are used when nothing is copied.
struct Plan : split_kv::SplitKvPlan {
  int values;       // which of kValueCodes (expansion.cuh)
  CodeOrder order;  // of keys
  int unit_bytes;   // of the ring
  int copies;       // of a unit, one for each of its tiles of a record
  int exact;        // see exact.cuh
  int table, weights, factors, exchange, barriers, present;
  float key_step, key_offset;  // level = step * byte - offset
  bool clears;                 // fills the results of tokens behind the last sequence

  // Floats of a buffer of factors: one for each row, and whether any is not 1. Two rows' are read at once.
  __host__ __device__ static constexpr int factors_of(int rows) { return rows + 2; }
};

// The thread's number, of which the compiler does not know that it could read it again wherever it is needed.
__device__ __forceinline__ unsigned held_thread() {
  unsigned thread = threadIdx.x;
  asm volatile("" : "+r"(thread));
  return thread;
}

// A thread's view of its block.
struct View : BlockView {
  const Plan& own;

  __device__ __forceinline__ View(const Attention& a, const StageLayout& l, const Plan& p, uint8_t* memory)
      : BlockView(a, l, p, memory, held_thread()), own(p) {}

  __device__ __forceinline__ uint8_t* queries() const { return shared + own.operands; }
  __device__ __forceinline__ RowTable table(int rows) const { return RowTable(shared + own.table, rows); }
  __device__ __forceinline__ uint8_t* weights() const { return shared + own.weights; }
  __device__ __forceinline__ float* factors() const { return reinterpret_cast<float*>(shared + own.factors); }
  __device__ __forceinline__ float* exchange() const { return reinterpret_cast<float*>(shared + own.exchange); }
  // Floats of a row there: what four warps and their result exchange; then its state, which lasts for a segment: the
  // reference of its weights, the largest score, and what is added to its scores.
  static constexpr int kExchanged = 4 + 1, kState = 3;
  __host__ __device__ static constexpr int exchange_bytes(int rows) { return (kExchanged + kState) * rows * 4; }
  __device__ __forceinline__ float* references(int rows) const { return exchange() + kExchanged * rows; }

  // The entries of tables of levels, [kMaxLevels] each (expansion.cuh): of grids of levels only.
  template <class S>
  __device__ __forceinline__ int8_t* key_levels() const {
    return reinterpret_cast<int8_t*>(signs() + 2 * S::kDim);
  }
  template <class S>
  __device__ __forceinline__ int8_t* value_levels() const {
    return key_levels<S>() + split_kv::kMaxLevels;
  }
  // Which tiles of a stage exist, a bit for each.
  __device__ __forceinline__ uint32_t& present(int stage) const {
    return reinterpret_cast<uint32_t*>(shared + own.present)[stage];
  }
  // Where value block (16 tokens) `block` of a unit at `unit` begins, or the keys of the same tokens; `next`: the
  // layout's distance from the first 16 tokens of a stage to the others.
  __device__ __forceinline__ int offset_of_block(int block, int next) const {
    return block / 2 * layout.bytes + block % 2 * next;
  }
  __device__ __forceinline__ const uint8_t* block_of(int unit, int block, int next) const {
    return shared + unit + offset_of_block(block, next);
  }

  // Barriers: stage `i` has arrived; it has been read; weights `i` are there; weights `i` have been read; all warps of
  // scores have voted.
  __device__ __forceinline__ uint64_t* arrived(int i) const { return barriers() + i; }
  __device__ __forceinline__ uint64_t* freed(int i) const { return barriers() + kMaxStages + i; }
  __device__ __forceinline__ uint64_t* weighed(int i) const { return barriers() + 2 * kMaxStages + i; }
  __device__ __forceinline__ uint64_t* weights_read(int i) const {
    return barriers() + 2 * kMaxStages + kWeightBuffers + i;
  }
  __device__ __forceinline__ uint64_t* voted() const { return barriers() + 2 * kMaxStages + 2 * kWeightBuffers; }
  // By which a warp of scores tells the others of a unit, of this number, whose weights would be too large.
  __device__ __forceinline__ uint32_t& vote(uint32_t unit) const {
    return reinterpret_cast<uint32_t*>(voted() + 1)[unit % 2];
  }
  static constexpr int kBarrierBytes = (2 * kMaxStages + 2 * kWeightBuffers + 2) * 8;

 private:
  __device__ __forceinline__ uint64_t* barriers() const { return reinterpret_cast<uint64_t*>(shared + own.barriers); }
};

// Whether the phase of a barrier has ended, without waiting for it.
__device__ __forceinline__ bool has_ended(uint64_t* barrier, uint32_t phase) {
  int ended = 0;
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.s32 %0, 1, 0, p; }"
               : "=r"(ended)
               : "r"(shared_address(barrier)), "r"(phase)
               : "memory");
#endif
  return ended;
}

}  // namespace turboquant::cuda::key_tiles
