// What host code asks about a device before a launch. cudaDeviceGetAttribute costs about as much as the rest of a
// launch's preparation, so each device is asked once per process.
#pragma once

#include <deque>
#include <mutex>

#include "choices/device.h"
#include "cuda/common/torch.cuh"

namespace turboquant::cuda {

struct Device {
  int index;  // CUDA's number of it
  DeviceFacts facts;
};

// The reference lives as long as the process.
inline const Device& device_of(int index) {
  static std::mutex mutex;
  static std::deque<Device> known;  // a deque never moves its elements
  const std::lock_guard<std::mutex> lock(mutex);
  for (const Device& d : known) {
    if (d.index == index) return d;
  }
  const auto attribute = [&](cudaDeviceAttr name) {
    int value = 0;
    check_cuda(cudaDeviceGetAttribute(&value, name, index), "cudaDeviceGetAttribute");
    return value;
  };
  return known.emplace_back(
      Device{index,
             {.major = attribute(cudaDevAttrComputeCapabilityMajor),
              .minor = attribute(cudaDevAttrComputeCapabilityMinor),
              .multiprocessors = attribute(cudaDevAttrMultiProcessorCount),
              .shared_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin),
              .shared_per_multiprocessor = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor)}});
}

inline const Device& current_device() {
  int index = 0;
  check_cuda(cudaGetDevice(&index), "cudaGetDevice");
  return device_of(index);
}

}  // namespace turboquant::cuda
