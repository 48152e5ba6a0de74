// The kernels that gather older tokens, of the head_dims that bulk decoding has.
#include "cuda/attention/row_tiles.cuh"
#include "cuda/attention/row_tiles/gather.cuh"

namespace turboquant::cuda::row_tiles {

GatherEntry find_gather_kernel(int head_dim, Dtype dtype) {
  GatherEntry found{};
  if (choices::against_vectors(head_dim, dtype)) return found;
  dispatch_bulk(dtype, head_dim, [&](auto log_d, auto tag) {
    using Traits = DecodeTraits<log_d>;
    using T = typename decltype(tag)::type;
    found = {reinterpret_cast<const void*>(&gather_kernel<Traits, T>), 32 * Traits::kWarps, Traits::kBlocks};
  });
  return found;
}

}  // namespace turboquant::cuda::row_tiles
