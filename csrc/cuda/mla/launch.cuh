// The launches of latent attention, for calls that choose_latents gives to them.
#pragma once

#include "cuda/common/device_facts.cuh"
#include "cuda/mla/shape.cuh"

namespace turboquant::cuda::mla {

// A compiled kernel.
struct KernelEntry {
  const void *kernel, *join;
  int rows, threads, blocks;  // of a block; blocks per multiprocessor
};

// The kernel whose block has the fewest rows that are at least `rows`, or else the most. Defined in
// instances/latent_<R>.cu.
template <int R>
KernelEntry find_kernel(int rows);

// A launch, with everything that follows from the call and the device: computed once, before memory is allocated.
class LatentLaunch {
 public:
  // The call stays alive until `run` returns.
  LatentLaunch(const Latents& call, const Device& device);

  // Bytes of memory for partial results; their contents do not matter.
  int64_t workspace_bytes() const {
    return part_floats() * 4 + int64_t{grid_} * 4 + num_segments() * static_cast<int64_t>(sizeof(SharedBy));
  }

  // workspace: aligned to 16 bytes.
  void run(void* workspace, cudaStream_t stream);

 private:
  int64_t part_floats() const { return int64_t{grid_} * kParts * entry_.rows * (kPartHead + call_.record.latent_dim); }
  int64_t num_segments() const { return int64_t{call_.a.seqs} * plan_.row_blocks; }
  void check_limits() const;

  const Latents& call_;
  const Device& device_;
  KernelEntry entry_;
  Plan plan_;
  int grid_;
  bool joins_later_;  // by a second kernel
};

// The general kernel: every dtype, width, grid and device.
void attend_general(const Latents& call, cudaStream_t stream);

}  // namespace turboquant::cuda::mla
