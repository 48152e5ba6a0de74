// The kernels that gather older tokens, of the head_dims and codes that bulk decoding has.
#include "cuda/attention/row_tiles.cuh"
#include "cuda/attention/row_tiles/gather.cuh"

namespace turboquant::cuda::row_tiles {
namespace {

template <int D>
GatherEntry entry_of(Dtype dtype) {
  const auto of_type = [](auto type) {
    using T = typename decltype(type)::type;
    using S = GatherShape<D, T>;
    return GatherEntry{reinterpret_cast<const void*>(&gather_kernel<D, T>), S::kThreads, S::Traits::kBlocks};
  };
  return dtype == Dtype::kFloat16 ? of_type(Tag<__half>{}) : of_type(Tag<__nv_bfloat16>{});
}

}  // namespace

GatherEntry find_gather_kernel(int head_dim, format::Width values, Dtype dtype) {
  if (format::levels_are_codes(values)) return {};  // as choose_load
  switch (head_dim) {
    case 64: return entry_of<64>(dtype);
    case 128: return entry_of<128>(dtype);
    case 256: return entry_of<256>(dtype);
    default: return {};
  }
}

}  // namespace turboquant::cuda::row_tiles
