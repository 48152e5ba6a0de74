// The facts about a device: its sizes, and which of the library's code it runs.
//
// The library may have code for several architectures, of which the driver takes one: machine code for this device, or
// PTX that it compiles itself. Either may have been compiled for an older architecture, without instructions that the
// device has. Which code it is says a kernel of the same build, without being launched.
#include "cuda/common/device_facts.cuh"

#include <algorithm>
#include <deque>
#include <exception>
#include <iterator>
#include <mutex>
#include <string>

#include "cuda/common/torch.cuh"
#include "cuda/common/wgmma.cuh"

namespace turboquant::cuda {
namespace {

// Never launched. Its largest block is a warpgroup where the code has products of warpgroups, else a warp.
constexpr int kWarp = 32, kWarpgroup = 128;
__global__ void __launch_bounds__(kWarpgroupProducts ? kWarpgroup : kWarp) code_of_this_device() {}

// Shared memory in KiB of devices older than what may run their code (CUDA programming guide, compute capabilities).
// Which shapes a kernel is launched in depends on it, so a newer device that runs the code is taken for the older one.
struct OlderDevice {
  int ptx_version, per_block, per_multiprocessor;
};
constexpr OlderDevice kOlderDevices[] = {{75, 64, 64},   {80, 163, 164}, {86, 99, 100},
                                         {87, 163, 164}, {89, 99, 100},  {120, 99, 100}};

DeviceFacts facts_of(int index) {
  const torch::stable::accelerator::DeviceGuard guard(index);
  const auto attribute = [&](cudaDeviceAttr name) {
    int value = 0;
    check_cuda(cudaDeviceGetAttribute(&value, name, index), "cudaDeviceGetAttribute");
    return value;
  };
  cudaFuncAttributes code{};
  cudaError_t error = cudaFuncGetAttributes(&code, code_of_this_device);
  if (error != cudaSuccess) cudaGetLastError();  // it would show again in an innocent launch
  if (error == cudaErrorInvalidDeviceFunction) error = cudaErrorNoKernelImageForDevice;
  check_cuda(error, "torch_turboquant");
  // ptxVersion, such as 90, is what __CUDA_ARCH__ was, divided by ten. Machine code keeps it: that of
  // arch=compute_80,code=sm_90 says 80.
  DeviceFacts facts{.major = code.ptxVersion / 10,
                    .minor = code.ptxVersion % 10,
                    .multiprocessors = attribute(cudaDevAttrMultiProcessorCount),
                    .shared_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin),
                    .shared_per_multiprocessor = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor),
                    .warpgroup_products = code.maxThreadsPerBlock == kWarpgroup};
  for (const OlderDevice& older : kOlderDevices) {
    if (code.ptxVersion != older.ptx_version) continue;
    facts.shared_per_block = std::min(facts.shared_per_block, older.per_block << 10);
    facts.shared_per_multiprocessor = std::min(facts.shared_per_multiprocessor, older.per_multiprocessor << 10);
  }
  return facts;
}

}  // namespace

const Device& device_of(int index) {
  static thread_local const Device* latest = nullptr;  // of this thread: found without the lock
  if (latest && latest->index == index) return *latest;
  static std::mutex mutex;
  static std::deque<Device> known;  // a deque never moves its elements
  const std::lock_guard<std::mutex> lock(mutex);
  auto found = std::find_if(known.begin(), known.end(), [&](const Device& d) { return d.index == index; });
  if (found == known.end()) found = known.insert(known.end(), Device{index, facts_of(index)});
  latest = &*found;
  return *latest;
}

const Device& current_device() {
  int index = 0;
  check_cuda(cudaGetDevice(&index), "cudaGetDevice");
  return device_of(index);
}

}  // namespace turboquant::cuda

// The members of DeviceFacts, in their order, for torch_turboquant/choices.py. Returns null, or what is wrong: a C++
// exception must not reach Python.
extern "C" __attribute__((visibility("default"))) const char* turboquant_cuda_device_facts(int device, int64_t* facts) {
  static thread_local std::string error;
  try {
    const turboquant::DeviceFacts f = turboquant::cuda::device_of(device).facts;
    const int64_t all[] = {
        f.major, f.minor, f.multiprocessors, f.shared_per_block, f.shared_per_multiprocessor, f.warpgroup_products};
    std::copy(std::begin(all), std::end(all), facts);
    return nullptr;
  } catch (const std::exception& e) {
    error = e.what();
    return error.c_str();
  }
}
