// The launches of latent attention, for calls that choose_latents gives to them.
#pragma once

#include "choices/mla.h"
#include "cuda/common/device_facts.cuh"
#include "cuda/mla/shape.cuh"

namespace turboquant::cuda::mla {

// A compiled kernel.
struct KernelEntry {
  const void *kernel, *prepare, *join_few, *join;
  int rows, threads, blocks;  // of a block; blocks per multiprocessor
};

// Of several sizes of key tiles that whose block has the fewest rows that are at least `rows`, or else the most.
// Defined in instances/latents.cu.
template <int R>
KernelEntry find_kernel(LatentKernel kernel, int64_t rows);

// A launch, with everything that follows from the call and the device: computed once, before memory is allocated.
class LatentLaunch {
 public:
  // The call stays alive until `run` returns.
  LatentLaunch(const Latents& call, LatentKernel kernel, const Device& device);

  // Bytes of memory for partial results; their contents do not matter.
  int64_t workspace_bytes() const {
    return segments_ * (plan_.image_bytes + int64_t{sizeof(SharedBy)}) + (part_floats() + exact_floats()) * 4 +
           int64_t{grid_} * 4 + plan_.num_long * int64_t{sizeof(LongSegment)};
  }

  // workspace: aligned to 16 bytes.
  void run(void* workspace, cudaStream_t stream);

 private:
  int64_t part_floats() const { return int64_t{grid_} * kParts * entry_.rows * (kPartHead + call_.record.latent_dim); }
  int64_t exact_floats() const {
    return int64_t{call_.a.seqs} * plan_.few_rows * (kPartHead + call_.record.latent_dim);
  }
  template <int R>
  void find(LatentKernel kernel);
  void check_limits() const;
  double most_units() const;
  void plan_join();
  cudaError_t join(void** arguments, cudaStream_t stream) const;

  const Latents& call_;
  const Device& device_;
  KernelEntry entry_;
  Plan plan_;
  int grid_;
  int64_t segments_;  // numbers of segments
  int64_t parts_;     // of a segment, if all are equal
  bool joins_later_;  // all of them, by a kernel of its own
};

// The general kernel: every dtype, width, grid and device.
void attend_general(const Latents& call, cudaStream_t stream);

}  // namespace turboquant::cuda::mla
