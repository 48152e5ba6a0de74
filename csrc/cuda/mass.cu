// nvcc: -fmad=true
//
// paged_mass: the softmax weights that the queries of a call give each key, summed over queries and query heads
// (mass/kernel.cuh).
#include "cuda/attention/arguments.cuh"
#include "cuda/common/device_facts.cuh"
#include "cuda/mass/kernel.cuh"

namespace turboquant::cuda {
namespace {

using mass::MassArguments;

// False where the device has too little shared memory for 8 N rows.
template <int N, bool EXACT>
bool launch_rows(MassArguments m, int64_t keys, const Device& device, cudaStream_t stream) {
  const auto kernel = mass::mass_kernel<N, EXACT>;
  const mass::LaunchPlan launch = plan_launch(m, N, EXACT, mass::kOwnBytes<N>, device.facts);
  if (launch.warps == 0) return false;
  if (!EXACT) cut_spans(m, keys, launch);
  allow_shared_memory(reinterpret_cast<const void*>(kernel), device.index, launch.bytes);
  const int64_t heads = int64_t{m.x.a.seqs} * m.x.a.kv_heads;
  kernel<<<num_blocks(heads * m.spans, 1), 32 * launch.warps, launch.bytes, stream>>>(m);
  check_cuda(cudaGetLastError(), "paged_mass");
  return true;
}

// Up to 8, 32 or 64 rows at a time, as many as there are or the device has shared memory for. There are so few exact
// keys that a kernel for 32 rows is not worth its bytes in the library.
template <bool EXACT>
bool launch_any(const MassArguments& m, int64_t keys, const Device& device, cudaStream_t stream) {
  const int64_t rows = int64_t{m.x.a.max_q_len} * m.x.a.group;
  if (rows > (EXACT ? 8 : 32) && launch_rows<8, EXACT>(m, keys, device, stream)) return true;
  if constexpr (!EXACT) {
    if (rows > 8 && launch_rows<4, false>(m, keys, device, stream)) return true;
  }
  return launch_rows<1, EXACT>(m, keys, device, stream);
}

void add_mass(const AttentionCall& c, const format::Record& record, const Tensor& lse, const Tensor& mass) {
  check_alignment(c);
  if (c.q.numel() == 0 || mass.numel() == 0) return;
  const Launch launch(c.q);
  const AttentionArguments arguments(c, record);
  const Attention& a = arguments.call;
  const Device& device = device_of(c.q.get_device_index());
  const MassArguments m{.x = general::Arguments(a),
                        .lse = static_cast<const float*>(lse.data_ptr()),
                        .mass = static_cast<float*>(mass.data_ptr()),
                        .keys = mass.size(2),
                        .spans = 1,
                        .span_keys = 0,
                        .stage = {},
                        .stages = 0,
                        .warp_bytes = 0};
  const int64_t keys = std::min<int64_t>(m.keys, int64_t{a.max_pages} * record.page_size);
  const bool launched = launch_any<false>(m, keys, device, launch.stream()) &&
                        ((!a.tail && !a.new_keys) || launch_any<true>(m, keys, device, launch.stream()));
  if (!launched) refuse_head_dim("paged_mass", record.head_dim, device.facts);
}

}  // namespace
}  // namespace turboquant::cuda

STABLE_TORCH_LIBRARY_IMPL(turboquant, CUDA, m) {
  using namespace turboquant;
  m.impl("paged_mass", boxed<&paged_mass<turboquant::cuda::add_mass>>);
}
