// The launch of a kernel of tiles, in clusters, behind the kernel that rotates activations.
#include "cuda/linear/tiles/launch.cuh"

#include <map>
#include <mutex>

#include "cuda/attention/counters.cuh"
#include "cuda/common/torch.cuh"
#include "cuda/linear/known_plans.cuh"
#include "cuda/linear/tiles/activations.cuh"
#include "cuda/linear/tiles/kernel.cuh"
#include "cuda/linear/tiles/plan.cuh"
#include "cuda/linear/tiles/stream_k.cuh"

namespace turboquant::cuda::linear::tiles {
namespace {

template <int TOKENS, bool BYTES>
const void* kernel_of() {
  if constexpr (in_streams(TOKENS)) {
    return reinterpret_cast<const void*>(&stream_k_kernel<TOKENS, BYTES>);
  } else {
    return reinterpret_cast<const void*>(&tiles_kernel<TOKENS, BYTES>);
  }
}
template <int TOKENS>
const void* kernel_of(const format::WeightBlock& block) {
  return format::levels_are_codes(block.width()) ? kernel_of<TOKENS, true>() : kernel_of<TOKENS, false>();
}
const void* kernel_of(int tokens, const format::WeightBlock& block) {
  switch (tokens) {
    case 64: return kernel_of<64>(block);
    case 128: return kernel_of<128>(block);
    case 160: return kernel_of<160>(block);
    case 192: return kernel_of<192>(block);
    case 224: return kernel_of<224>(block);
    default: return kernel_of<256>(block);
  }
}

// What a launch of clusters of `parts` thread blocks has, which begins before the previous kernel has ended. Its grid,
// one cluster here, and its stream are still to be set.
struct ClusterLaunch {
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};

  ClusterLaunch(int parts, int threads, int shared_bytes) {
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = parts, attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = dim3(parts), config.blockDim = dim3(threads), config.dynamicSmemBytes = shared_bytes;
    config.attrs = attributes, config.numAttrs = 2;
  }
  ClusterLaunch(const ClusterLaunch&) = delete;  // config points to attributes
};

// Multiprocessors of a cluster are neighbours, so a device may have room for fewer clusters than their number of
// thread blocks tells. Each device is asked once, for the smallest kernel: all of them fill a multiprocessor.
Clusters clusters_of(const Device& device) {
  static std::mutex mutex;
  static std::map<int, Clusters> known;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto at = known.find(device.index);
  if (at != known.end()) return at->second;
  const void* const kernel = reinterpret_cast<const void*>(&tiles_kernel<64, false>);
  const int bytes = device.facts.shared_per_block;
  allow_shared_memory(kernel, device.index, bytes);
  Clusters clusters{};
  for (int parts = 1; parts <= kMostParts; ++parts) {
    ClusterLaunch launch(parts, kTileThreads, bytes);
    check_cuda(cudaOccupancyMaxActiveClusters(&clusters.count[parts], kernel, &launch.config), "linear_packed");
  }
  return known[device.index] = clusters;
}

Plan known_plan_of(const Call& call, const Device& device) {
  static thread_local KnownPlans<Plan> known;
  const format::WeightBlock& block = call.block;
  return known.find({call.n, call.tokens, call.groups, block.group, block.bits, block.sub, device.index},
                    [&] { return plan_of(call, device.facts, clusters_of(device)); });
}

}  // namespace

TilesLaunch::TilesLaunch(const Call& call, const Device& device)
    : call_(call), device_(device), plan_(known_plan_of(call, device)) {}

int64_t TilesLaunch::operand_bytes() const {
  return int64_t{plan_.column_tiles} * plan_.tokens * call_.groups * call_.block.group * 2;
}
int64_t TilesLaunch::factor_bytes() const {
  return int64_t{plan_.column_tiles} * plan_.tokens * static_cast<int64_t>(sizeof(float));
}
int64_t TilesLaunch::partial_bytes() const {
  return int64_t{2 * plan_.workers} * kStreamBlocks * slabs_of(plan_.tokens) * format::kWeightRows * plan_.tokens *
         static_cast<int64_t>(sizeof(float));
}
int TilesLaunch::num_counters() const { return plan_.whole_tiles ? 0 : plan_.workers * kStreamQuarters; }
int64_t TilesLaunch::workspace_bytes() const {
  return operand_bytes() + factor_bytes() + partial_bytes() + num_counters() * static_cast<int64_t>(sizeof(uint32_t));
}

void TilesLaunch::run(void* workspace, cudaStream_t stream) {
  plan_.operands = static_cast<uint8_t*>(workspace);
  uint8_t* const behind = plan_.operands + operand_bytes();
  plan_.factors = reinterpret_cast<float*>(behind);
  plan_.partial = reinterpret_cast<float*>(behind + factor_bytes());
  if (num_counters() > 0) {
    auto* const own = reinterpret_cast<uint32_t*>(behind + factor_bytes() + partial_bytes());
    plan_.arrivals = zeroed_counters(device_.index, stream, num_counters(), own);
  }
  void* arguments[] = {const_cast<Call*>(&call_), &plan_};
  const int64_t channels = int64_t{call_.groups} * call_.block.group;
  check_cuda(launch_early(reinterpret_cast<const void*>(&rotate_activations), num_blocks(call_.tokens, 1),
                          32 * rotate_warps(channels), 0, arguments, stream, device_.facts.major),
             "linear_packed");
  const void* const kernel = kernel_of(plan_.tokens, call_.block);
  allow_shared_memory(kernel, device_.index, plan_.bytes);
  const bool in_workers = in_streams(plan_.tokens);
  ClusterLaunch launch(in_workers ? kStreamBlocks : plan_.parts, in_workers ? kStreamThreads : kTileThreads,
                       plan_.bytes);
  const int64_t blocks =
      in_workers ? int64_t{plan_.workers} * kStreamBlocks : int64_t{plan_.parts} * plan_.column_tiles * plan_.row_tiles;
  launch.config.gridDim = dim3(num_blocks(blocks, 1));
  launch.config.stream = stream;
  check_cuda(cudaLaunchKernelExC(&launch.config, kernel, arguments), "linear_packed");
}

}  // namespace turboquant::cuda::linear::tiles
