// The launch of the decode kernel: which kernel, how its shared memory is cut, and counters that need no clearing.
#include "cuda/attention/split_kv.cuh"

#include <algorithm>
#include <mutex>
#include <vector>

#include "cuda/attention/split_kv_kernel.cuh"
#include "cuda/common/torch.cuh"

namespace turboquant::cuda {
namespace {

constexpr int kMaxRows = 16;  // beyond it, another kernel reads the codes fewer times

DecodeKernel kernel_of(const Attention& a) {
  const int rows = a.max_q_len * a.group;
  const bool key_uniform = !a.key_levels, value_uniform = !a.value_levels;
  const format::Record& r = a.record;
  switch (r.head_dim) {
    case 64: return find_split_kv<64>(r.key_bits, key_uniform, r.value_bits, value_uniform, rows);
    case 80: return find_split_kv<80>(r.key_bits, key_uniform, r.value_bits, value_uniform, rows);
    case 96: return find_split_kv<96>(r.key_bits, key_uniform, r.value_bits, value_uniform, rows);
    case 112: return find_split_kv<112>(r.key_bits, key_uniform, r.value_bits, value_uniform, rows);
    case 128: return find_split_kv<128>(r.key_bits, key_uniform, r.value_bits, value_uniform, rows);
    case 160: return find_split_kv<160>(r.key_bits, key_uniform, r.value_bits, value_uniform, rows);
    case 192: return find_split_kv<192>(r.key_bits, key_uniform, r.value_bits, value_uniform, rows);
    case 256: return find_split_kv<256>(r.key_bits, key_uniform, r.value_bits, value_uniform, rows);
    case 512: return find_split_kv<512>(r.key_bits, key_uniform, r.value_bits, value_uniform, rows);
    case 576: return find_split_kv<576>(r.key_bits, key_uniform, r.value_bits, value_uniform, rows);
    default: return {};
  }
}

// What launches need to know about the current device.
struct Device {
  int index, major, multiprocessors, shared_per_multiprocessor, shared_per_block;

  static Device current() {
    static std::mutex mutex;
    static std::vector<Device> known;
    int index = 0;
    check_cuda(cudaGetDevice(&index), "cudaGetDevice");
    const std::lock_guard<std::mutex> lock(mutex);
    for (const Device& d : known) {
      if (d.index == index) return d;
    }
    const auto attribute = [&](cudaDeviceAttr name) {
      int value = 0;
      check_cuda(cudaDeviceGetAttribute(&value, name, index), "cudaDeviceGetAttribute");
      return value;
    };
    known.push_back({index, attribute(cudaDevAttrComputeCapabilityMajor), attribute(cudaDevAttrMultiProcessorCount),
                     attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor),
                     attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin)});
    return known.back();
  }
};

SlotLayout slot_layout(const Attention& a) { return {a.record, a.dtype == Dtype::kFloat32 ? 4 : 2}; }

int up_to(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

// As many warps as possible, up to `most`, then as many slots, then room for the states of all warps instead of half; no warps: there is
// not enough shared memory.
DecodePlan plan_of(const DecodeKernel& k, int most, int per_multiprocessor, const SlotLayout& layout,
                   const Device& device, int d) {
  constexpr int kReserved = 1024;  // of every block, by CUDA
  const int limit =
      std::min(device.shared_per_block, device.shared_per_multiprocessor / per_multiprocessor - kReserved);
  DecodePlan best{};
  for (int warps = most; warps >= 1 && best.warps == 0; --warps) {
    for (const int states : {warps, (warps + 1) / 2}) {
      // States; or what groups of threads have of a segment; or a row of exact keys for each warp.
      const int join = 4 * std::max({states * k.join_floats, std::max(128 * warps / d, k.rows) * (d + 4), warps * d});
      const int result = 4 * k.rows * (d + 4);
      const int rows = up_to(k.rows * static_cast<int>(sizeof(DecodeRow)) + 8, 16);
      const int notes = (warps + 1) * static_cast<int>(sizeof(DecodeNotes));
      const int plain = k.rows * layout.exact_bytes / 2, signs = 2 * 4 * d + 2 * kMaxLevels;
      const int fixed = k.query_bytes + plain + signs + up_to(join, 16) + result + rows + notes, slot = layout.stride;
      const int slots = std::min((limit - fixed) / (warps * slot), 8) / kUnitSteps * kUnitSteps;
      if (slots < kUnitSteps || slots <= best.slots) continue;
      best.warps = warps, best.states = states, best.slots = slots, best.ring = slots * slot;
      best.queries = warps * best.ring;
      best.plain = best.queries + k.query_bytes;
      best.signs = best.plain + plain;
      best.join = best.signs + signs;
      best.result = best.join + up_to(join, 16);
      best.rows = best.result + result;
      best.notes = best.rows + rows;
      best.bytes = best.notes + notes;
    }
  }
  return best;
}

struct Shape {
  DecodePlan plan;
  int grid;
};

// Few segments want blocks of eight warps, because there are fewer parts to be joined; many want blocks of four, because what a border
// costs one of them, others on its multiprocessor can use.
Shape shape_of(const DecodeKernel& k, const Device& device, const SlotLayout& layout, const Attention& a) {
  const int d = a.record.head_dim;
  const auto shape = [&](int warps, int per_multiprocessor) {
    return Shape{plan_of(k, warps, per_multiprocessor, layout, device, d),
                 std::min(kMaxDecodeGrid, per_multiprocessor * device.multiprocessors)};
  };
  const int64_t blocks = (int64_t{a.max_q_len} * a.group + k.rows - 1) / k.rows;
  if (int64_t{a.seqs} * a.kv_heads * blocks > device.multiprocessors) {
    const Shape small = shape(kMaxWarps / 2, k.small_blocks);
    if (small.plan.warps == kMaxWarps / 2) return small;
  }
  const Shape large = shape(kMaxWarps, k.blocks);
  STD_TORCH_CHECK(large.plan.warps > 0, "paged_attention: a record of ", layout.bytes,
                  " bytes for 32 tokens does not fit into the ", device.shared_per_block,
                  " bytes of shared memory that a block can have");
  return large;
}

// ---- Counters of arrivals ---------------------------------------------------------------------------------------------
//
// They are 0 before and after every launch, so they are cleared once, by the loader, and never again. Launches that may run at the same
// time must not share them: a stream runs its launches one after the other and has counters of its own; a captured launch gets
// counters that no other launch will have, because its graph may be replayed on any stream.

constexpr int kCounters = 1 << 20;
__device__ uint32_t counters[kCounters];

class Counters {
 public:
  // Null: there are none left.
  static uint32_t* take(const Device& device, cudaStream_t stream, int count) {
    static std::mutex mutex;
    static std::vector<Counters> all;
    cudaStreamCaptureStatus status;
    check_cuda(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
    const std::lock_guard<std::mutex> lock(mutex);
    auto own = std::find_if(all.begin(), all.end(), [&](const Counters& c) { return c.device_ == device.index; });
    if (own == all.end()) {
      void* memory = nullptr;
      check_cuda(cudaGetSymbolAddress(&memory, counters), "cudaGetSymbolAddress");
      all.push_back(Counters{device.index, static_cast<uint32_t*>(memory)});
      own = all.end() - 1;
    }
    if (status == cudaStreamCaptureStatusNone) {
      for (const Stream& s : own->streams_) {
        if (s.stream == stream && s.count >= count) return s.counters;
      }
    }
    if (own->used_ + count > kCounters) return nullptr;
    uint32_t* fresh = own->memory_ + own->used_;
    own->used_ += count;
    if (status == cudaStreamCaptureStatusNone) own->streams_.push_back({stream, count, fresh});
    return fresh;
  }

 private:
  struct Stream {
    cudaStream_t stream;
    int count;
    uint32_t* counters;
  };
  Counters(int device, uint32_t* memory) : device_(device), memory_(memory) {}

  int device_;
  uint32_t* memory_;
  int used_ = 0;
  std::vector<Stream> streams_;
};

}  // namespace

bool split_kv_takes(const Attention& a) {
  constexpr int kLeastMajor = 8;  // copies that end in a barrier, see common/async_copy.cuh
  const bool exact_in_halves = !a.tail || a.dtype != Dtype::kFloat32;  // what its products of exact keys take
  return static_cast<int64_t>(a.max_q_len) * a.group <= kMaxRows && exact_in_halves && kernel_of(a).kernel &&
         Device::current().major >= kLeastMajor;
}

int64_t split_kv_workspace_bytes(const Attention& a) {
  const DecodeKernel k = kernel_of(a);
  const int64_t grid = shape_of(k, Device::current(), slot_layout(a), a).grid;
  return grid * (2 * k.rows * (a.record.head_dim + 4) + 1) * 4;
}

void attend_split_kv(const Attention& a, void* workspace, cudaStream_t stream) {
  const DecodeKernel k = kernel_of(a);
  const Device device = Device::current();
  const SlotLayout layout = slot_layout(a);
  auto [plan, grid] = shape_of(k, device, layout, a);
  const int64_t blocks = (int64_t{a.max_q_len} * a.group + k.rows - 1) / k.rows;
  const int64_t units =
      int64_t{a.max_pages} * a.record.page_size / kUnitTokens + 2 + a.sink_tokens + int64_t{a.ring} + kBorderUnits;
  STD_TORCH_CHECK(units * blocks * a.kv_heads * a.seqs <= INT32_MAX, "paged_attention: ", a.seqs,
                  " sequences of up to ", int64_t{a.max_pages} * a.record.page_size,
                  " tokens are more work than one call can count");

  const int64_t page_bytes = int64_t{a.kv_heads} * a.record.record_bytes();
  STD_TORCH_CHECK(a.num_pages * page_bytes <= int64_t{UINT32_MAX} * kPlaceBytes, "paged_attention: ", a.num_pages,
                  " pages of ", page_bytes, " bytes are more than one call can address");

  plan.codes = k.codes;
  plan.per_group = (65536 + a.group - 1) / a.group;
  plan.early = device.major >= 9 && a.seqs <= 32;  // more than a warp looks at at once are better looked at once
  plan.parts = static_cast<float*>(workspace);
  plan.arrivals = Counters::take(device, stream, grid);
  if (!plan.arrivals) {  // thousands of captured launches: this one clears its own
    plan.arrivals = static_cast<uint32_t*>(workspace) + int64_t{grid} * 2 * k.rows * (a.record.head_dim + 4);
    check_cuda(cudaMemsetAsync(plan.arrivals, 0, int64_t{grid} * 4, stream), "cudaMemsetAsync");
  }
  check_cuda(cudaFuncSetAttribute(k.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.bytes),
             "paged_attention");
  void* arguments[] = {const_cast<Attention*>(&a), const_cast<SlotLayout*>(&layout), &plan};
  check_cuda(launch_early(k.kernel, grid, plan.warps * 32, plan.bytes, arguments, stream, device.major),
             "paged_attention");
}

}  // namespace turboquant::cuda
