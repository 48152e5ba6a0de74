// The launch of a kernel of tiles, in clusters, behind the kernel that rotates activations.
#include "cuda/linear/tiles/launch.cuh"

#include <map>
#include <mutex>

#include "cuda/attention/counters.cuh"
#include "cuda/common/torch.cuh"
#include "cuda/linear/experts/arrange.cuh"
#include "cuda/linear/known_plans.cuh"
#include "cuda/linear/tiles/activations.cuh"
#include "cuda/linear/tiles/kernel.cuh"
#include "cuda/linear/tiles/plan.cuh"

namespace turboquant::cuda::linear::tiles {
namespace {

template <int TOKENS>
const void* kernel_of(const format::WeightBlock& block) {
  return format::levels_are_codes(block.width()) ? reinterpret_cast<const void*>(&stream_k_kernel<TOKENS, true>)
                                                 : reinterpret_cast<const void*>(&stream_k_kernel<TOKENS, false>);
}
const void* kernel_of(int tokens, const format::WeightBlock& block) {
  switch (tokens) {
    case 32: return kernel_of<32>(block);
    case 64: return kernel_of<64>(block);
    case 96: return kernel_of<96>(block);
    case 128: return kernel_of<128>(block);
    case 160: return kernel_of<160>(block);
    case 192: return kernel_of<192>(block);
    case 224: return kernel_of<224>(block);
    default: return kernel_of<256>(block);
  }
}

// A launch of workers that begins before the previous kernel has ended. Its grid, one worker here, and its stream are
// still to be set.
struct WorkerLaunch {
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};

  WorkerLaunch(int threads, int shared_bytes) {
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = kBlocks, attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = dim3(kBlocks), config.blockDim = dim3(threads), config.dynamicSmemBytes = shared_bytes;
    config.attrs = attributes, config.numAttrs = 2;
  }
  WorkerLaunch(const WorkerLaunch&) = delete;  // config points to attributes
};

// Workers that a device has room for. A cluster needs multiprocessors that are neighbours, so there may be room for
// fewer workers than half of their number. Each device is asked once, for one kernel: the registers of any of them fill
// a multiprocessor.
int most_workers(const Device& device) {
  static std::mutex mutex;
  static std::map<int, int> known;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto at = known.find(device.index);
  if (at != known.end()) return at->second;
  constexpr int kTokens = 256;
  const void* const kernel = reinterpret_cast<const void*>(&stream_k_kernel<kTokens, false>);
  const int bytes = device.facts.shared_per_block;
  allow_shared_memory(kernel, device.index, bytes);
  int count = 0;
  WorkerLaunch launch(threads_of(kTokens), bytes);
  check_cuda(cudaOccupancyMaxActiveClusters(&count, kernel, &launch.config), "linear_packed");
  STD_TORCH_CHECK(count > 0, "linear_packed needs two multiprocessors that are neighbours, which the device lacks");
  return known[device.index] = count;
}

Plan known_plan_of(const Call& call, const Device& device) {
  static thread_local KnownPlans<Plan> known;
  const format::WeightBlock& block = call.block;
  const int64_t few = int64_t{block.group} << 32 | block.bits << 24 | block.sub << 16 | device.index;
  return known.find({call.n, call.tokens, call.groups, call.pairs.count, call.pairs.experts, few, 0},
                    [&] { return plan_of(call, device.facts, most_workers(device)); });
}

}  // namespace

TilesLaunch::TilesLaunch(const Call& call, const Device& device)
    : call_(call), device_(device), plan_(known_plan_of(call, device)) {}

int64_t TilesLaunch::order_bytes() const {
  return call_.has_experts() ? arrangement_bytes(call_.pairs.count, plan_.column_tiles, 2) : 0;
}
int64_t TilesLaunch::operand_bytes() const {
  return int64_t{plan_.column_tiles} * plan_.tokens * call_.groups * call_.block.group * 2;
}
int64_t TilesLaunch::factor_bytes() const {
  return int64_t{plan_.column_tiles} * plan_.tokens * static_cast<int64_t>(sizeof(float));
}
int64_t TilesLaunch::partial_bytes() const {
  return int64_t{2 * plan_.workers} * kBlocks * slabs_of(plan_.tokens) * format::kWeightRows * plan_.tokens *
         static_cast<int64_t>(sizeof(float));
}
int TilesLaunch::num_counters() const { return plan_.whole_tiles ? 0 : plan_.workers * pieces_of(plan_.tokens); }
int64_t TilesLaunch::workspace_bytes() const {
  return order_bytes() + operand_bytes() + factor_bytes() + partial_bytes() +
         num_counters() * static_cast<int64_t>(sizeof(uint32_t));
}

void TilesLaunch::run(void* workspace, cudaStream_t stream) {
  if (call_.has_experts()) {
    call_.arranged = arrangement_in(workspace, call_.pairs.count, plan_.column_tiles, 2);
    arrange(call_.pairs, call_.arranged, plan_.tokens, device_, stream);
  }
  plan_.operands = static_cast<uint8_t*>(workspace) + order_bytes();
  uint8_t* const behind = plan_.operands + operand_bytes();
  plan_.factors = reinterpret_cast<float*>(behind);
  plan_.partial = reinterpret_cast<float*>(behind + factor_bytes());
  if (num_counters() > 0) {
    auto* const own = reinterpret_cast<uint32_t*>(behind + factor_bytes() + partial_bytes());
    plan_.arrivals = zeroed_counters(device_.index, stream, num_counters(), own);
  }
  void* arguments[] = {&call_, &plan_};
  const int64_t channels = int64_t{call_.groups} * call_.block.group;
  const int64_t rows = call_.has_experts() ? call_.pairs.count : call_.tokens;
  check_cuda(launch_early(reinterpret_cast<const void*>(&rotate_activations), num_blocks(rows, 1),
                          32 * rotate_warps(channels), 0, arguments, stream, device_.facts.major),
             "linear_packed");
  const void* const kernel = kernel_of(plan_.tokens, call_.block);
  allow_shared_memory(kernel, device_.index, plan_.bytes);
  WorkerLaunch launch(threads_of(plan_.tokens), plan_.bytes);
  launch.config.gridDim = dim3(num_blocks(int64_t{plan_.workers} * kBlocks, 1));
  launch.config.stream = stream;
  check_cuda(cudaLaunchKernelExC(&launch.config, kernel, arguments), "linear_packed");
}

}  // namespace turboquant::cuda::linear::tiles
