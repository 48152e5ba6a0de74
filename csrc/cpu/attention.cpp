// paged_attention, store_and_attend, merge_attention: softmax attention straight from packed pages.
//
// Keys are never rotated back: with R the rotation and s the scales of channels, q . key = (R (q / s)) . (scale / 32 *
// levels) + q . center, so the query is rotated once. Values are summed in the rotated space, and the sum is rotated
// back once. Exact keys (sinks and recent window of the tail, docs/format.md section 9, and the call's own tokens where
// they are given) are scored and summed unrotated and join in the end.
#include "calls/step.h"

#include "cpu/attention/paged.h"
#include "cpu/cache.h"
#include "cpu/common/torch.h"

namespace turboquant::cpu {
namespace {

void attend(const AttentionCall& call, const format::Record& record, const Tensor& out, const Tensor& lse,
            const Store& store) {
  const PagedAttention a(call, record);
  if (store) store();
  dispatch_float(dtype_of(call.q), [&](auto tag) {
    using T = typename decltype(tag)::type;
    SpanAttention<PagedAttention>(a).run(data_of<T>(out), data_of<float>(lse), call.tokens());
  });
}

// out_a, out_b: [..., d] of one dtype, lse_a, lse_b: float32 [...], all contiguous -> merged out and lse
std::tuple<Tensor, Tensor> merge_attention(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                                           const Tensor& lse_b) {
  check_merge(out_a, lse_a, out_b, lse_b);
  const int64_t d = out_a.size(out_a.dim() - 1);

  Tensor out = new_tensor(out_a, leading_shape(out_a, 0, {}), out_a.scalar_type());
  Tensor lse = new_tensor(out_a, leading_shape(out_a, 1, {}), ScalarType::Float);
  const float* la = data_of<float>(lse_a);
  const float* lb = data_of<float>(lse_b);
  float* l = data_of<float>(lse);
  dispatch_float(dtype_of(out_a), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* a = data_of<T>(out_a);
    const T* b = data_of<T>(out_b);
    T* to = data_of<T>(out);
    parallel_for(lse.numel(), 64, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const float top = std::max(la[r], lb[r]);
        const bool none = top == -INFINITY;  // neither side saw a key
        const float wa = none ? 0 : std::exp(la[r] - top), wb = none ? 0 : std::exp(lb[r] - top), total = wa + wb;
        l[r] = none ? top : top + std::log(total);
        const float fa = none ? 0 : wa / total, fb = none ? 0 : wb / total;
        for (int64_t c = r * d; c < (r + 1) * d; ++c) {
          // a side without keys has weight 0 and is not read: its output may be anything
          const float x = fa == 0 ? 0 : fa * static_cast<float>(a[c]), y = fb == 0 ? 0 : fb * static_cast<float>(b[c]);
          to[c] = static_cast<T>(x + y);
        }
      }
    });
  });
  return {out, lse};
}

}  // namespace
}  // namespace turboquant::cpu

STABLE_TORCH_LIBRARY_IMPL(turboquant, CPU, m) {
  using namespace turboquant;
  m.impl("paged_attention", boxed<&paged_attention<cpu::attend>, kPagedAttention>);
  m.impl("paged_attention_out", boxed<&paged_attention_out<cpu::attend>, kPagedAttentionOut>);
  m.impl("store_and_attend", boxed<&store_and_attend<cpu::attend, cpu::prepare_store>, kStoreAndAttend>);
  m.impl("merge_attention", TORCH_BOX(&cpu::merge_attention));
}
