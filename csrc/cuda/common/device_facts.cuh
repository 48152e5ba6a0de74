// What host code asks about a device before a launch.
#pragma once

#include "choices/device.h"

namespace turboquant::cuda {

struct Device {
  int index;  // CUDA's number of it
  DeviceFacts facts;
};

// Each device is asked once per process, because its answers cost as much as the rest of a launch's preparation. The
// reference lives as long as the process.
const Device& device_of(int index);
const Device& current_device();

}  // namespace turboquant::cuda
