#include "cuda/linear/experts.cuh"
#include "cuda/linear/launch.cuh"

namespace turboquant::cuda::linear {

const void* find_experts_kernel(Codes codes, bool sub) {
  const auto entry = [](auto* kernel) { return reinterpret_cast<const void*>(kernel); };
  switch (codes) {
    case Codes::kLloyd:
      return sub ? entry(&experts_kernel<Codes::kLloyd, true>) : entry(&experts_kernel<Codes::kLloyd, false>);
    case Codes::kUniform:
      return sub ? entry(&experts_kernel<Codes::kUniform, true>) : entry(&experts_kernel<Codes::kUniform, false>);
    case Codes::kBytes: break;  // which have no multipliers
  }
  return entry(&experts_kernel<Codes::kBytes, false>);
}

}  // namespace turboquant::cuda::linear
