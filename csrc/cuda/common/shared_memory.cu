// What kernels are allowed of dynamic shared memory.
#include <algorithm>
#include <mutex>
#include <vector>

#include "cuda/common/torch.cuh"

namespace turboquant::cuda {
namespace {

struct Allowed {
  const void* kernel;
  int device, bytes;
};

Allowed* find(std::vector<Allowed>& list, const void* kernel, int device) {
  const auto at = std::find_if(list.begin(), list.end(),
                               [&](const Allowed& a) { return a.kernel == kernel && a.device == device; });
  return at == list.end() ? &list.emplace_back(Allowed{kernel, device, 0}) : &*at;
}

}  // namespace

void allow_shared_memory(const void* kernel, int device, int bytes, bool fully) {
  static thread_local std::vector<Allowed> known;  // to this thread, which needs no lock for it
  Allowed* const mine = find(known, kernel, device);
  if (mine->bytes >= bytes) return;
  // The limit must never shrink, because another thread may be about to launch with it.
  static std::mutex mutex;
  static std::vector<Allowed> all;
  const std::lock_guard<std::mutex> lock(mutex);
  Allowed* const limit = find(all, kernel, device);
  if (limit->bytes == 0 && fully) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                    cudaSharedmemCarveoutMaxShared),
               "cudaFuncSetAttribute");
  }
  if (limit->bytes < bytes) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
               "cudaFuncSetAttribute");
    limit->bytes = bytes;
  }
  mine->bytes = limit->bytes;
}

}  // namespace turboquant::cuda
