// The launch of the kernels of experts, which are compiled here together: what their code has in common is compressed
// once.
#include "cuda/linear/experts/launch.cuh"

#include "cuda/common/torch.cuh"
#include "cuda/linear/experts/arrange.cuh"
#include "cuda/linear/experts/kernel.cuh"
#include "cuda/linear/experts/plan.cuh"
#include "cuda/linear/known_plans.cuh"
#include "cuda/linear/launch.cuh"

namespace turboquant::cuda::linear::experts {
namespace {

template <Codes CODES>
const void* kernel_of(int tiles) {
  return tiles == 1   ? reinterpret_cast<const void*>(&experts_kernel<CODES, 1>)
         : tiles == 2 ? reinterpret_cast<const void*>(&experts_kernel<CODES, 2>)
                      : reinterpret_cast<const void*>(&experts_kernel<CODES, 4>);
}
const void* kernel_of(const format::WeightBlock& unit, bool uniform, int tiles) {
  if (format::levels_are_codes(unit.width())) return kernel_of<Codes::kBytes>(tiles);
  return uniform ? kernel_of<Codes::kUniform>(tiles) : kernel_of<Codes::kLloyd>(tiles);
}

Plan known_plan_of(const Call& call, const format::WeightBlock& unit, const Device& device) {
  static thread_local KnownPlans<Plan> known;
  const int64_t few = int64_t{unit.group} << 16 | device.index;
  return known.find({call.n, call.pairs.count, call.pairs.choices.value, call.pairs.experts, call.groups,
                     unit.block_bytes(), few},
                    [&] { return plan_of(call, unit, device.facts); });
}

}  // namespace

ExpertsLaunch::ExpertsLaunch(const Call& call, const format::WeightBlock& unit, bool uniform, const Device& device)
    : call_(call), device_(device), plan_(known_plan_of(call, unit, device)),
      kernel_(kernel_of(unit, uniform, plan_.record.tiles)) {
  checked_int(most_pieces() * plan_.slabs, "the number of 16 rows of the weights of all pieces of tokens");
}

void ExpertsLaunch::run(void* workspace, cudaStream_t stream) {
  if (plan_.arranged == 0) {
    call_.arranged = arrangement_in(workspace, call_.pairs.count, most_pieces(), 1);
    arrange(call_.pairs, call_.arranged, plan_.record.columns, device_, stream);
  }
  allow_shared_memory(kernel_, device_.index, plan_.bytes);
  void* arguments[] = {&call_, &plan_};
  check_cuda(launch_early(kernel_, plan_.blocks, 32 * kWarps, plan_.bytes, arguments, stream, device_.facts.major),
             "linear_experts");
}

}  // namespace turboquant::cuda::linear::experts
