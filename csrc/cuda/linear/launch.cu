// The launch of the kernel of few columns: which instance, the plan, and whether another kernel quantises activations
// before.
#include "cuda/linear/launch.cuh"

#include "cuda/attention/counters.cuh"
#include "cuda/common/torch.cuh"
#include "cuda/linear/known_plans.cuh"
#include "cuda/linear/plan.cuh"

namespace turboquant::cuda::linear {
namespace {

KernelEntry find(const format::WeightBlock& unit, bool uniform, int columns, bool warpgroup_products) {
  const bool sub = unit.sub > 0;
  if (format::levels_are_codes(unit.width())) return find_kernel<Codes::kBytes>(sub, columns, warpgroup_products);
  return uniform ? find_kernel<Codes::kUniform>(sub, columns, warpgroup_products)
                 : find_kernel<Codes::kLloyd>(sub, columns, warpgroup_products);
}

// Weights are read before the previous kernel has ended: in a graph into shared memory, which is right only where that
// kernel does not write them (docs/ops.md says so to callers); else into the L2 cache, which sees later writes.
Early early(int major, cudaStream_t stream) {
  return major < 9 ? Early::kNo : is_captured(stream) ? Early::kRing : Early::kPrefetch;
}

Plan known_plan_of(const Call& call, const format::WeightBlock& unit, const Device& device) {
  static thread_local KnownPlans<Plan> known;
  return known.find({call.n, call.columns, call.groups, unit.group, unit.block_bytes(), device.index},
                    [&] { return plan_of(call, unit, device.facts); });
}

}  // namespace

LinearLaunch::LinearLaunch(const Call& call, const format::WeightBlock& unit, bool uniform, const Device& device)
    : call_(call), device_(device), plan_(known_plan_of(call, unit, device)),
      entry_(find(unit, uniform, plan_.record.columns, device.facts.warpgroup_products)),
      quantises_first_(quantises_first(call, plan_)) {}

int LinearLaunch::column_blocks() const { return parts_of(call_.columns, plan_.record.columns); }
int64_t LinearLaunch::record_bytes() const {
  return quantises_first_ ? int64_t{column_blocks()} * call_.groups * plan_.record.bytes() : 0;
}
int64_t LinearLaunch::partial_bytes() const {
  return plan_.parts > 1 ? int64_t{column_blocks()} * plan_.parts * plan_.slabs * kSumBytes * plan_.record.tiles : 0;
}
int64_t LinearLaunch::num_counters() const { return plan_.parts > 1 ? int64_t{column_blocks()} * plan_.slabs : 0; }

void LinearLaunch::run(void* workspace, cudaStream_t stream) {
  auto* const memory = static_cast<uint8_t*>(workspace);
  const int major = device_.facts.major, blocks = column_blocks();
  if (num_counters() > 0) {
    plan_.partial = reinterpret_cast<float*>(memory + record_bytes());
    auto* own = reinterpret_cast<uint32_t*>(memory + record_bytes() + partial_bytes());
    plan_.arrivals = zeroed_counters(device_.index, stream, static_cast<int>(num_counters()), own);
  }
  plan_.early = early(major, stream);
  void* arguments[] = {const_cast<Call*>(&call_), &plan_};
  if (quantises_first_) {
    plan_.records = memory;
    const int64_t pieces = int64_t{quantise_pieces(call_.groups, call_.group)} * plan_.record.columns;
    const dim3 grid(num_blocks(pieces, kQuantiseWarps * kPiecesAtOnce), blocks);
    check_cuda(launch_early(entry_.quantise, grid, 32 * kQuantiseWarps, 0, arguments, stream, major), "linear_packed");
  }
  allow_shared_memory(entry_.kernel, device_.index, plan_.bytes, true);  // beside a block that quantises
  const dim3 grid(plan_.parts, plan_.row_blocks, blocks);
  check_cuda(launch_early(entry_.kernel, grid, 32 * kWarps, plan_.bytes, arguments, stream, major), "linear_packed");
}

}  // namespace turboquant::cuda::linear
