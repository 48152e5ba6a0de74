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
  SpanAttention<PagedAttention>(a).run(out, data_of<float>(lse));
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
  const Dtype dtype = dtype_of(out_a);
  const int64_t row_bytes = d * element_size(dtype);
  const uint8_t* a = static_cast<const uint8_t*>(out_a.data_ptr());
  const uint8_t* b = static_cast<const uint8_t*>(out_b.data_ptr());
  uint8_t* to = static_cast<uint8_t*>(out.data_ptr());
  parallel_for(lse.numel(), row_grain(d, 8), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const bool none = la[r] == -INFINITY && lb[r] == -INFINITY;  // neither side saw a key
      const float top = std::max(la[r], lb[r]);                    // NaN on either side makes both factors NaN
      const float wa = none ? 0 : std::exp(la[r] - top), wb = none ? 0 : std::exp(lb[r] - top), total = wa + wb;
      l[r] = none ? top : top + std::log(total);
      const float fa = none ? 0 : wa / total, fb = none ? 0 : wb / total;
      // A side without keys has a factor of 0 and is not read: its output may be anything.
      kernels().add_scaled(a + r * row_bytes, fa, b + r * row_bytes, fb, dtype, d, to + r * row_bytes);
    }
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
