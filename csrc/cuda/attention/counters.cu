// Every launch finds its counters at 0 and leaves them at 0, so they are cleared once, when the module is loaded.
// Launches that may run at the same time must not share counters: a stream, which runs its launches one after the
// other, has counters of its own; a captured launch gets counters that no other launch will ever have, because its
// graph may be replayed on any stream.
#include "cuda/attention/counters.cuh"

#include <algorithm>
#include <mutex>
#include <vector>

#include "cuda/common/torch.cuh"

namespace turboquant::cuda {
namespace {

constexpr int kCounters = 1 << 20;
__device__ uint32_t counters[kCounters];

class Counters {
 public:
  // Null: there are none left.
  static uint32_t* take(int device, cudaStream_t stream, int count) {
    if (is_captured(stream)) return take_locked(device, stream, count, true);
    // A thread that launches into one stream after the other finds its counters without the lock.
    static thread_local struct {
      int device;
      Stream of;
    } latest{-1, {}};
    if (latest.device != device || latest.of.stream != stream || latest.of.count < count) {
      uint32_t* const found = take_locked(device, stream, count, false);
      if (!found) return nullptr;
      latest = {device, {stream, count, found}};
    }
    return latest.of.counters;
  }

 private:
  struct Stream {
    cudaStream_t stream;
    int count;
    uint32_t* counters;
  };

  static uint32_t* take_locked(int device, cudaStream_t stream, int count, bool captured) {
    static std::mutex mutex;
    static std::vector<Counters> all;
    const std::lock_guard<std::mutex> lock(mutex);
    auto own = std::find_if(all.begin(), all.end(), [&](const Counters& c) { return c.device_ == device; });
    if (own == all.end()) {
      void* memory = nullptr;
      check_cuda(cudaGetSymbolAddress(&memory, counters), "cudaGetSymbolAddress");
      all.push_back(Counters{device, static_cast<uint32_t*>(memory)});
      own = all.end() - 1;
    }
    if (!captured) {
      for (const Stream& s : own->streams_) {
        if (s.stream == stream && s.count >= count) return s.counters;
      }
    }
    if (own->used_ + count > kCounters) return nullptr;
    uint32_t* fresh = own->memory_ + own->used_;
    own->used_ += count;
    if (!captured) own->streams_.push_back({stream, count, fresh});
    return fresh;
  }

  Counters(int device, uint32_t* memory) : device_(device), memory_(memory) {}

  int device_;
  uint32_t* memory_;
  int used_ = 0;
  std::vector<Stream> streams_;
};

}  // namespace

uint32_t* zeroed_counters(int device, cudaStream_t stream, int count, uint32_t* own) {
  if (uint32_t* found = Counters::take(device, stream, count)) return found;
  // After thousands of captured launches, or many that needed more than the one before, or for one that needs too many.
  check_cuda(cudaMemsetAsync(own, 0, int64_t{count} * 4, stream), "cudaMemsetAsync");
  return own;
}

}  // namespace turboquant::cuda
