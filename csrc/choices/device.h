// What the choice of a kernel asks about a CUDA device. Plain numbers and no CUDA header, so that a choice is an
// ordinary function: a test can ask it about any device, and the CPU library can show it.
//
// A device can run code that was compiled for an older one, without using what is new. Launches then see the facts of
// the older one, but for the number of multiprocessors (cuda/common/device_facts.cu).
#pragma once

namespace turboquant {

struct DeviceFacts {
  int major, minor;  // compute capability
  int multiprocessors;
  int shared_per_block;           // bytes of shared memory that a kernel can opt in to
  int shared_per_multiprocessor;  // bytes of shared memory
  bool warpgroup_products;        // the code has those of compute capability 9.0 (cuda/common/wgmma.cuh)
};

constexpr int kReservedSharedBytes = 1024;  // of every block's shared memory, by CUDA

}  // namespace turboquant
