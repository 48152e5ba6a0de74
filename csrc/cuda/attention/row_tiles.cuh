// The launch of the row-tile kernel (attention/row_tiles/kernel.cuh), for calls that choose_attention gives to it, and
// before it of those that can take some of the sequences: the kernel of chunks (attention/row_tiles/chunks.cuh) long
// ones, that of prompts (attention/row_tiles/prompts.cuh) those with nothing but own tokens.
#pragma once

#include "choices/attention.h"
#include "cuda/attention/call.cuh"
#include "cuda/attention/row_tiles/shape.cuh"
#include "cuda/common/device_facts.cuh"

namespace turboquant::cuda::row_tiles {

// A compiled kernel, and what the launch needs to know about its shape.
struct KernelEntry {
  const void* kernel;
  int rows, threads;  // of a tile of rows; of a block
  int blocks;         // per multiprocessor, at most
  int stream_warps;   // see Shape
  int part_floats;    // of a partial result
  int state_floats;   // of what the kernel of chunks keeps of a tile of rows
  int keys, bytes;    // of a tile
  bool (*lay_out)(Plan& plan, int limit);
};

// The kernel for tiles of 64 rows (groups = 1) or 128 (2), and queries of a 16-bit type. Defined in
// instances/row_tiles.cu.
template <int D>
KernelEntry find_kernel(int groups, Dtype dtype);
// The one for sequences of which no key is older than the call; up to 128 channels also of 64 rows. Defined in
// instances/prompts.cu.
template <int D>
KernelEntry find_prompts_kernel(int groups, Dtype dtype);
// The one for long sequences, with tiles of 128 rows. Defined in instances/chunks.cu.
template <int D>
KernelEntry find_chunks_kernel(Dtype dtype);

// Bytes of a raw stage: the tiles of a record that hold kUnitKeys tokens, in places that bulk copies can write to.
constexpr int raw_stride(const format::Record& record) {
  return (kUnitKeys / record.tile_tokens() * record.tile_bytes() + 127) / 128 * 128;
}

// A launch, with everything that follows from the call and the device: computed once, before memory is allocated.
class RowTilesLaunch {
 public:
  // least_queries: sequences with fewer queries are another kernel's, which also clears the results of tokens behind
  // the last sequence; 0: there is no other kernel. The call stays alive until `run` returns.
  RowTilesLaunch(const Attention& call, const Device& device, int least_queries);

  // Bytes of memory for partial results and expanded codes; their contents do not matter.
  int64_t workspace_bytes() const {
    return ring_bytes() + (part_floats() + state_floats() + call_.seqs + num_counters()) * 4;
  }

  // workspace: aligned to 16 bytes.
  void run(void* workspace, cudaStream_t stream);

 private:
  // One of the kernels; grid 0: it is not launched.
  struct Kernel {
    KernelEntry entry{};
    Plan plan{};
    OwnMaps maps{};
    int grid = 0;
  };
  bool choose_shape(int groups);
  void choose_prompts();
  void choose_chunks();
  bool map_own_tokens(Kernel& kernel) const;
  void check_limits() const;
  int64_t part_floats() const { return int64_t{2} * tiles_.grid * tiles_.entry.part_floats; }
  int64_t state_floats() const { return int64_t{states_} * chunks_.entry.state_floats; }
  int64_t ring_bytes() const;
  // In this order: of row tiles, of prompts, of chunks
  int num_counters() const;
  void launch(Kernel& kernel, cudaStream_t stream);

  const Attention& call_;
  const Device& device_;
  Kernel tiles_;
  Kernel prompts_;  // for sequences with nothing but own tokens
  Kernel chunks_;   // for long sequences
  int states_ = 0;  // tiles of rows that long sequences have at most
};

}  // namespace turboquant::cuda::row_tiles
