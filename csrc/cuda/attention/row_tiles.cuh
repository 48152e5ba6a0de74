// The launch of the row-tile kernel (attention/row_tiles/kernel.cuh), for calls that choose_attention gives to it, and
// before it of those that can take some of the sequences: the kernel of chunks (attention/row_tiles/chunks.cuh) long
// ones, that of prompts (attention/row_tiles/prompts.cuh) those with nothing but own tokens, or with few older ones,
// which another kernel gathers for it (attention/row_tiles/gather.cuh).
#pragma once

#include <algorithm>

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
// The one for sequences of which no key is older than the call; up to 128 channels also of 64 rows. gathered: or whose
// older tokens have been gathered, an instance of its own, so that it does not slow down whole prompts. Defined in
// instances/prompts.cu.
template <int D>
KernelEntry find_prompts_kernel(int groups, Dtype dtype, bool gathered);
// The one for long sequences, with tiles of 128 rows. Defined in instances/chunks.cu.
template <int D>
KernelEntry find_chunks_kernel(Dtype dtype);

// The kernel that gathers older tokens for the one of prompts. Defined in instances/gather.cu.
struct GatherEntry {
  const void* kernel;  // null: there is none for this head_dim
  int threads;         // of a block
  int blocks;          // per multiprocessor, at most
};
GatherEntry find_gather_kernel(int head_dim, Dtype dtype);

// Bytes of a raw stage: the tiles of a record that hold kUnitKeys tokens, in places that bulk copies can write to.
constexpr int raw_stride(const format::Record& record) {
  return round_up(kUnitKeys / record.tile_tokens() * record.tile_bytes(), 128);
}

// A launch, with everything that follows from the call and the device: computed once, before memory is allocated.
class RowTilesLaunch {
 public:
  // least_queries: sequences with fewer queries are another kernel's, which also clears the results of tokens behind
  // the last sequence; 0: there is no other kernel. The call stays alive until `run` returns.
  RowTilesLaunch(const Attention& call, const Device& device, int least_queries);

  // Bytes of memory for partial results, gathered tokens and expanded codes; their contents do not matter.
  int64_t workspace_bytes() const {
    return shared_bytes() + (part_floats() + state_floats() + 2 * call_.seqs) * 4 + absent_bytes();
  }
  // In this order: of row tiles, of prompts, of chunks
  int num_counters() const;

  // workspace: aligned to 16 bytes. counters: see counters.cuh. beside: another kernel of the call precedes.
  void run(void* workspace, uint32_t* counters, cudaStream_t stream, bool beside);

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
  void choose_gather();
  bool gathers() const { return gather_.kernel != nullptr; }
  bool map_tiles(const void* data, int64_t tokens, int64_t token_stride, int64_t head_stride, int keys,
                 CUtensorMap& to) const;
  bool map_own_tokens(Kernel& kernel) const;
  void check_limits() const;
  int64_t part_floats() const { return int64_t{2} * tiles_.grid * tiles_.entry.part_floats; }
  int64_t state_floats() const { return int64_t{states_} * chunks_.entry.state_floats; }
  int64_t ring_bytes() const;
  int64_t gathered_bytes() const;  // of keys, or of values
  int64_t absent_bytes() const { return (int64_t{prompts_.plan.gather.rows} / 16 * 2 + 3) / 4 * 4; }
  // Of tokens that are gathered, and then of codes that the kernel of chunks expands
  int64_t shared_bytes() const { return std::max(ring_bytes(), 2 * gathered_bytes()); }
  void launch(Kernel& kernel, cudaStream_t stream);
  bool map_gathered(const uint8_t* data);
  void gather(uint8_t* to, cudaStream_t stream, bool beside);

  const Attention& call_;
  const Device& device_;
  Kernel tiles_;
  Kernel prompts_;  // for sequences with nothing but own tokens, or whose older tokens are gathered
  Kernel chunks_;   // for long sequences
  int states_ = 0;  // tiles of rows that long sequences have at most
  GatherEntry gather_{};
};

}  // namespace turboquant::cuda::row_tiles
