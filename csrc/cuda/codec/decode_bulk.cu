// The kernel that decodes many vectors of 64, 128 or 256 channels (codec/decode_bulk_spans.cuh).
#include <algorithm>

#include "cuda/codec/decode_bulk_spans.cuh"
#include "cuda/common/device_facts.cuh"
#include "cuda/common/torch.cuh"

namespace turboquant::cuda {
namespace {

template <typename Traits, typename T>
__global__ void __launch_bounds__(32 * Traits::kWarps, Traits::kBlocks)
    decode_bulk_kernel(const __grid_constant__ DecodeArguments a) {
  decode_spans<Traits, T>(a, [&](int warps) { return AllSpans(a, warps); });
}

// ---- Host side ------------------------------------------------------------------------------------------------------

template <typename Traits, typename T>
void launch(DecodeArguments a, cudaStream_t stream) {
  const int64_t of_sequence = (a.max_length + kTokens - 1) / kTokens;
  const int64_t warps = a.seqs * of_sequence * a.heads * a.sources;
  const int64_t most = current_device().facts.multiprocessors * Traits::kBlocks;
  const int64_t blocks = std::min<int64_t>(most, (warps + Traits::kWarps - 1) / Traits::kWarps);
  a.spans_of_sequence = static_cast<int>(of_sequence);
  decode_bulk_kernel<Traits, T><<<static_cast<unsigned>(blocks), 32 * Traits::kWarps, 0, stream>>>(a);
}

}  // namespace

void launch_decode_bulk(const DecodeArguments& a, int head_dim, cudaStream_t stream) {
  dispatch_bulk(a.dtype, head_dim,
                [&](auto log_d, auto tag) { launch<DecodeTraits<log_d>, typename decltype(tag)::type>(a, stream); });
}

}  // namespace turboquant::cuda
