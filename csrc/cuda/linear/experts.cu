// linear_experts: asks choices/linear.h how a call is computed. Pairs of a token and one of its experts are multiplied
// all at once, by one of two kernels (experts/kernel.cuh, tiles/kernel.cuh), or those of one expert after the other,
// each as a call of linear_packed.
#include "calls/linear.h"

#include <array>
#include <vector>

#include "choices/linear.h"
#include "cuda/linear/experts/arrange.cuh"
#include "cuda/linear/experts/launch.cuh"
#include "cuda/linear/multiply.cuh"
#include "cuda/linear/tiles/launch.cuh"

namespace turboquant::cuda {
namespace {

using linear::Piece;

Tensor rows(Tensor t, int64_t first, int64_t count) { return torch::stable::narrow(t, 0, first, count); }

// Rows of a tensor, in the order of an index: int64 [rows]
Tensor select_rows(const Tensor& t, const Tensor& index) {
  using torch::stable::detail::from;
  std::array<StableIValue, 3> stack{from(t), from(int64_t{0}), from(index)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::index_select", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// Waits for the device, to know the experts that are chosen.
Tensor multiply_one_by_one(const ExpertsCall& c, const ExpertsShape& of, const linear::Pairs& pairs,
                           const Device& device, cudaStream_t stream) {
  const auto numbers = [&](const char* name) { return new_tensor(c.x, {of.pairs()}, ScalarType::Long, name); };
  const Tensor tokens = numbers("the order of tokens"), places = numbers("the places of pairs");
  const int64_t most = linear::most_pieces(pairs, INT32_MAX), bytes = linear::arrangement_bytes(pairs.count, most, 0);
  const Tensor memory = new_tensor(c.x, {bytes}, ScalarType::Byte, "the work space");
  linear::Arrangement to = linear::arrangement_in(memory.data_ptr(), pairs.count, most, 0);
  to.tokens = static_cast<int64_t*>(tokens.data_ptr()), to.places = static_cast<int64_t*>(places.data_ptr());
  linear::arrange(pairs, to, INT32_MAX, device, stream);
  std::vector<Piece> found(static_cast<size_t>(1 + most));
  check_cuda(cudaMemcpyAsync(found.data(), memory.data_ptr(), static_cast<size_t>(bytes), cudaMemcpyDeviceToHost,
                             stream),
             "linear_experts");
  check_cuda(cudaStreamSynchronize(stream), "linear_experts");
  // Entry 0 is no piece: it holds how many pieces there are, and how many pairs have an expert.
  const int pieces = found[0].expert, with_expert = found[0].first;
  const Tensor x = select_rows(c.x, tokens);
  const Tensor y = new_tensor(c.x, {of.pairs(), of.weight.n}, float_type_of(c.x), "results in the order of experts");
  for (int i = 1; i <= pieces; ++i) {
    const Piece& p = found[static_cast<size_t>(i)];
    OptionalTensor bias = c.bias;
    if (bias) bias = torch::stable::view(rows(*bias, p.expert, 1), {of.weight.n});
    const Tensor weight = torch::stable::view(rows(c.packed, p.expert, 1), of.weight.packed());
    linear::multiply({rows(x, p.first, p.count), weight, c.signs, c.levels, c.n, c.bits, c.sub, {}, bias}, of.weight,
                     rows(y, p.first, p.count));
  }
  if (with_expert < of.pairs()) {
    Tensor rest = rows(y, with_expert, of.pairs() - with_expert);
    torch::stable::zero_(rest);
  }
  return torch::stable::view(select_rows(y, places), {of.tokens, of.choices, of.weight.n});
}

// What both kinds of kernels are told.
class ExpertsArguments {
 public:
  ExpertsArguments(const ExpertsCall& c, const ExpertsShape& of, const Tensor& y)
      : c_(c), of_(of), y_(y), x_(c.x), signs_(c.signs), levels_(c.levels) {
    STD_TORCH_CHECK(aligned(c.packed.data_ptr(), 16), "packed must start at a multiple of 16 bytes");
  }

  template <typename Call>
  Call call(const linear::Pairs& pairs) const {
    Call call{};
    call.packed = bytes_of(c_.packed), call.weight_bytes = of_.weight_bytes();
    call.x = x_.data(), call.x_stride = x_.stride(), call.dtype = dtype_of(c_.x);
    call.signs = signs_.data(), call.levels = levels_.data();
    call.bias = c_.bias ? c_.bias->data_ptr() : nullptr;
    call.y = y_.data_ptr(), call.n = of_.weight.n;
    call.groups = checked_int(of_.weight.groups(), "the number of groups");
    call.pairs = pairs;
    return call;
  }

 private:
  const ExpertsCall& c_;
  const ExpertsShape& of_;
  const Tensor& y_;
  const linear::Activations x_;
  const Constant<float> signs_;
  const Constant<int8_t> levels_;
};

// Tokens that tiles multiply at a time, so that their operands take no more memory than this: 2 bytes for each channel
// of a pair, of which pieces leave up to half empty.
int64_t tokens_of_tiles(const ExpertsShape& of) {
  constexpr int64_t kOperandBytes = int64_t{512} << 20;
  return std::max<int64_t>(kOperandBytes / (4 * of.weight.k * of.choices), 1);
}

Tensor linear_experts(const ExpertsCall& c) {
  const ExpertsShape of = check_experts(c);
  check_levels(c.levels, c.x, c.bits, "levels");
  Tensor y = new_experts_result(c, of);
  if (y.numel() == 0) return y;
  STD_TORCH_CHECK(of.experts <= kMostExperts, "packed has ", of.experts, " experts, supported on CUDA: up to ",
                  kMostExperts);
  const Launch launch(c.x);
  const Device& device = device_of(c.x.get_device_index());
  const auto pairs_of = [&](int64_t first, int64_t tokens) {
    return linear::Pairs{.chosen = static_cast<const int64_t*>(c.experts.data_ptr()) + first * of.choices,
                         .count = checked_int(tokens * of.choices, "the number of tokens times choices"),
                         .experts = static_cast<int>(of.experts),
                         .choices = Divisor(static_cast<int>(of.choices))};
  };
  const ExpertsFacts facts{.pairs = of.pairs(),
                           .experts = of.experts,
                           .k = of.weight.k,
                           .dtype = dtype_of(c.x),
                           .captured = is_captured(launch.stream())};
  const ExpertsKernel kernel = choose_experts(facts, device.facts).kernel;
  if (kernel == ExpertsKernel::kOneByOne) {
    STD_TORCH_CHECK(!facts.captured, "x has ", of.weight.k,
                    " channels, for which shared memory has no room, and a CUDA graph cannot wait for the chosen "
                    "experts, supported: calls for which kernel_choice(\"linear_experts\", ...) is not one_by_one");
    return multiply_one_by_one(c, of, pairs_of(0, of.tokens), device, launch.stream());
  }
  if (kernel == ExpertsKernel::kCodes) {
    const ExpertsArguments arguments(c, of, y);
    auto call = arguments.call<linear::experts::Call>(pairs_of(0, of.tokens));
    call.group = of.weight.block.group;
    linear::launch_with_memory(linear::experts::ExpertsLaunch(call, of.weight.block, !c.levels, device), c.x,
                               launch.stream());
    return y;
  }
  const int64_t at_once = tokens_of_tiles(of);
  for (int64_t first = 0; first < of.tokens; first += at_once) {
    const int64_t tokens = std::min(at_once, of.tokens - first);
    ExpertsCall part = c;
    part.x = rows(c.x, first, tokens);
    const Tensor results = rows(y, first, tokens);
    const ExpertsArguments arguments(part, of, results);
    auto call = arguments.call<linear::tiles::Call>(pairs_of(first, tokens));
    call.block = of.weight.block, call.tokens = tokens;
    linear::launch_with_memory(linear::tiles::TilesLaunch(call, device), c.x, launch.stream());
  }
  return y;
}

}  // namespace
}  // namespace turboquant::cuda

STABLE_TORCH_LIBRARY_IMPL(turboquant, CUDA, m) {
  using namespace turboquant;
  m.impl("linear_experts", boxed<&turboquant::cuda::linear_experts, kLinearExperts>);
}
