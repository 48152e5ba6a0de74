// paged_attention, store_and_attend: describes a call for the kernels (attention/arguments.cuh) and launches those that
//   choices/attention.h chooses, behind the store.
// merge_attention: joins the attention of the same queries over two disjoint sets of keys.
#include <optional>

#include "calls/step.h"
#include "choices/attention.h"
#include "cuda/attention/arguments.cuh"
#include "cuda/attention/counters.cuh"
#include "cuda/attention/general.cuh"
#include "cuda/attention/key_tiles.cuh"
#include "cuda/attention/row_tiles.cuh"
#include "cuda/attention/split_kv.cuh"
#include "cuda/cache.cuh"

namespace turboquant::cuda {
namespace {

// ---- paged_attention -----------------------------------------------------------------------------------------------

AttentionShape shape_of(const Attention& a) {
  const auto grid = [](const int8_t* levels) { return levels ? format::Grid::kLevels : format::Grid::kUniform; };
  return {.head_dim = a.record.head_dim,
          .keys = {a.record.key_width(), grid(a.key_levels)},
          .values = {a.record.value_width(), grid(a.value_levels)},
          .kv_heads = a.kv_heads,
          .group = a.group,
          .max_q_len = a.max_q_len,
          .seqs = a.seqs,
          .tokens = a.tokens,
          .room = a.room,
          .dtype = a.dtype,
          .has_exact = a.tail || a.new_keys};
}

// Launches the kernels of a call. Where several share its sequences, split-KV clears the results of tokens behind the
// last one. `store` is launched immediately before them, so that the split-KV kernel can run beside it.
void start(Attention& a, const Tensor& q, const Device& device, cudaStream_t stream, const Store& store) {
  const AttentionChoice choice = choose_attention(shape_of(a), device.facts);
  using Kernel = AttentionKernel;
  // The other kernels divide their blocks among the sequences, so they need one.
  if (choice.kernel == Kernel::kGeneral || a.seqs == 0) {
    const GeneralLaunch general(a, device.facts);
    if (store) store();
    return general.run(stream);
  }
  const int most = static_cast<int>(choice.split_kv_queries), few_most = static_cast<int>(choice.few_queries);
  a.most_queries = few_most > 0 ? few_most : most;
  Attention of_some = a;
  of_some.least_queries = few_most + 1, of_some.most_queries = most;
  std::optional<split_kv::SplitKvLaunch> few, some;
  std::optional<key_tiles::KeyTilesLaunch> more;
  std::optional<row_tiles::RowTilesLaunch> many;
  const bool both = choice.kernel == Kernel::kSplitKvAndKeyTiles || choice.kernel == Kernel::kSplitKvAndRowTiles;
  const int least = both ? most + 1 : 0;
  if (choice.kernel == Kernel::kSplitKv || both) few.emplace(a, device, choice.pair);
  if (few_most > 0) some.emplace(of_some, device, choice.pair);
  if (choice.kernel == Kernel::kKeyTiles || choice.kernel == Kernel::kSplitKvAndKeyTiles) {
    more.emplace(a, device, choice.pair, least);
  }
  if (choice.kernel == Kernel::kRowTiles || choice.kernel == Kernel::kSplitKvAndRowTiles)
    many.emplace(a, device, least);
  // They run beside each other, so each has memory and counters of its own.
  int64_t bytes = 0;
  int num_counters = 0;
  const auto add = [&](const auto& launch) {
    if (launch) bytes += round_up(launch->workspace_bytes(), 128), num_counters += launch->num_counters();
  };
  add(few), add(some), add(more), add(many);
  const Tensor workspace = new_tensor(q, {bytes + 4 * num_counters}, ScalarType::Byte, "the work space");
  uint8_t* memory = static_cast<uint8_t*>(workspace.data_ptr());
  uint32_t* counters = zeroed_counters(device.index, stream, num_counters, reinterpret_cast<uint32_t*>(memory + bytes));
  const auto run = [&](auto& launch, auto... how) {
    launch->run(memory, counters, stream, how...);
    memory += round_up(launch->workspace_bytes(), 128), counters += launch->num_counters();
  };
  if (store) store();
  using split_kv::Before;
  const bool others = more || many;
  if (few) run(few, store ? Before::kOwnStore : Before::kAnything, Overlap{false, some || others});
  if (some) run(some, Before::kAnything, Overlap{true, others});
  if (more) run(more, Overlap{few.has_value(), false});
  if (many) run(many, few.has_value());
}

void attend(const AttentionCall& c, const format::Record& record, const Tensor& out, const Tensor& lse,
            const Store& store) {
  check_alignment(c);
  if (out.numel() == 0) {
    if (store) store();
    return;
  }
  const Launch launch(c.q);
  AttentionArguments arguments(c, record);
  Attention& a = arguments.call;
  a.out = out.data_ptr();
  a.lse = static_cast<float*>(lse.data_ptr());
  start(a, c.q, device_of(c.q.get_device_index()), launch.stream(), store);
}

// ---- merge_attention -----------------------------------------------------------------------------------------------

constexpr int kThreads = 256;

// Weights of the two sides and the merged logarithm of the softmax denominator. A side without keys (-inf) has weight
// 0.
struct Weights {
  float a, b, lse;

  __device__ __forceinline__ Weights(float lse_a, float lse_b) {
    if (lse_a == -INFINITY && lse_b == -INFINITY) {
      a = b = 0, lse = -INFINITY;
      return;
    }
    const float top = lse_a < lse_b ? lse_b : lse_a;  // NaN on either side makes both weights NaN
    const float wa = expf(lse_a - top), wb = expf(lse_b - top), total = wa + wb;
    a = __fdiv_rn(wa, total), b = __fdiv_rn(wb, total), lse = top + logf(total);
  }
};

// x * weight, 0 where the weight is: what a side without keys holds may be anything.
__device__ __forceinline__ float weighted(float weight, float x) { return weight == 0 ? 0 : __fmul_rn(weight, x); }

// rows of d channels, WIDTH of them per thread
template <int WIDTH, typename T>
__global__ void __launch_bounds__(kThreads)
    merge_kernel(const T* out_a, const float* lse_a, const T* out_b, const float* lse_b, int64_t rows, int64_t d,
                 T* out, float* lse) {
  const int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * WIDTH;
  if (i >= rows * d) return;
  const int64_t row = i / d;
  const Weights w(lse_a[row], lse_b[row]);
  if constexpr (WIDTH == 1) {
    out[i] = static_cast<T>(
        __fadd_rn(weighted(w.a, static_cast<float>(out_a[i])), weighted(w.b, static_cast<float>(out_b[i]))));
  } else {
    float a[WIDTH], b[WIDTH];
    load_floats<WIDTH>(out_a + i, a);
    load_floats<WIDTH>(out_b + i, b);
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) a[k] = __fadd_rn(weighted(w.a, a[k]), weighted(w.b, b[k]));
    store_floats<WIDTH>(a, out + i);
  }
  if (i == row * d) lse[row] = w.lse;
}

// out_a, out_b: [..., d] of one dtype, lse_a, lse_b: float32 [...], all contiguous -> merged out and lse
std::tuple<Tensor, Tensor> merge_attention(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                                           const Tensor& lse_b) {
  check_merge(out_a, lse_a, out_b, lse_b);
  const int64_t d = out_a.size(out_a.dim() - 1);

  Tensor out = new_tensor(out_a, leading_shape(out_a, 0, {}), out_a.scalar_type());
  Tensor lse = new_tensor(out_a, leading_shape(out_a, 1, {}), ScalarType::Float);
  const int64_t rows = lse.numel();
  if (out.numel() == 0) return {out, lse};
  const Launch launch(out_a);
  dispatch_float(dtype_of(out_a), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto start = [&](auto width) {
      merge_kernel<width><<<num_blocks(out.numel(), kThreads * width), kThreads, 0, launch.stream()>>>(
          static_cast<const T*>(out_a.data_ptr()), static_cast<const float*>(lse_a.data_ptr()),
          static_cast<const T*>(out_b.data_ptr()), static_cast<const float*>(lse_b.data_ptr()), rows, d,
          static_cast<T*>(out.data_ptr()), static_cast<float*>(lse.data_ptr()));
    };
    if (d % 8 == 0 && aligned(out_a.data_ptr(), 16) && aligned(out_b.data_ptr(), 16)) {
      start(std::integral_constant<int, 8>{});
    } else {
      start(std::integral_constant<int, 1>{});
    }
  });
  launch.check("merge_attention");
  return {out, lse};
}

}  // namespace
}  // namespace turboquant::cuda

STABLE_TORCH_LIBRARY_IMPL(turboquant, CUDA, m) {
  using namespace turboquant;
  m.impl("paged_attention", boxed<&paged_attention<turboquant::cuda::attend>, kPagedAttention>);
  m.impl("paged_attention_out", boxed<&paged_attention_out<turboquant::cuda::attend>, kPagedAttentionOut>);
  m.impl("store_and_attend",
         boxed<&store_and_attend<turboquant::cuda::attend, turboquant::cuda::prepare_store>, kStoreAndAttend>);
  m.impl("merge_attention", TORCH_BOX(&turboquant::cuda::merge_attention));
}
