// Turns a function that takes its arguments as one aggregate, such as AttentionCall, into a kernel that torch can call.
//
// The fields of the aggregate stand in the order of the op's schema, so that the schema (csrc/ops.cpp) and the
// aggregate are the only two lists of these arguments in C++. TORCH_BOX does the same for functions with one parameter
// per argument. A kernel that is boxed with the name of its op refuses inputs that are differentiated.
#pragma once

#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "calls/derivatives.h"

namespace turboquant {

// One argument on torch's stack. It converts itself to the type of the field that it initialises. The conversion takes
// ownership of what the stack holds, which must happen once: a field is initialised once. Before that, add_to says
// which tensors it holds.
struct TensorArgument {
  StableIValue value;
  operator torch::stable::Tensor() const { return torch::stable::detail::to<torch::stable::Tensor>(value); }
  void add_to(Differentiable& tensors) const { tensors.add(torch::stable::detail::to<AtenTensorHandle>(value)); }
};
struct OptionalArgument {
  StableIValue value;
  using Field = std::optional<torch::stable::Tensor>;
  operator Field() const { return torch::stable::detail::to<Field>(value); }
  void add_to(Differentiable& tensors) const {
    if (const auto* held = torch::stable::detail::to<const StableIValue*>(value)) TensorArgument{*held}.add_to(tensors);
  }
};
struct ListArgument {
  StableIValue value;
  using Field = std::vector<torch::stable::Tensor>;
  operator Field() const { return torch::stable::detail::to<Field>(value); }
  void add_to(Differentiable& tensors) const {
    const auto list = torch::stable::detail::to<StableListHandle>(value);
    size_t size = 0;
    TORCH_ERROR_CODE_CHECK(torch_list_size(list, &size));
    for (size_t i = 0; i < size; ++i) {
      TensorArgument item{};
      TORCH_ERROR_CODE_CHECK(torch_list_get_item(list, i, &item.value));
      item.add_to(tensors);
    }
  }
};
struct NumberArgument {
  StableIValue value;
  template <typename T>
    requires(std::is_arithmetic_v<T> || std::is_enum_v<T>)
  operator T() const {
    return torch::stable::detail::to<T>(value);
  }
  void add_to(Differentiable&) const {}
};
// Otherwise the constructor of optional that takes a value would make an optional field of its argument as a tensor.
static_assert(!std::is_constructible_v<torch::stable::Tensor, OptionalArgument>);

// Finds the kind of every field of an aggregate, one after the other, by trying which argument can initialise it.
template <typename Call, typename... Known>
constexpr auto find_arguments() {
  if constexpr (requires { Call{std::declval<Known>()..., std::declval<NumberArgument>()}; }) {
    return find_arguments<Call, Known..., NumberArgument>();
  } else if constexpr (requires { Call{std::declval<Known>()..., std::declval<OptionalArgument>()}; }) {
    return find_arguments<Call, Known..., OptionalArgument>();
  } else if constexpr (requires { Call{std::declval<Known>()..., std::declval<ListArgument>()}; }) {
    return find_arguments<Call, Known..., ListArgument>();
  } else if constexpr (requires { Call{std::declval<Known>()..., std::declval<TensorArgument>()}; }) {
    return find_arguments<Call, Known..., TensorArgument>();
  } else {
    return std::type_identity<std::tuple<Known...>>{};
  }
}
template <typename Call>
using ArgumentsOf = typename decltype(find_arguments<Call>())::type;
template <typename Call>
constexpr size_t kNumArguments = std::tuple_size_v<ArgumentsOf<Call>>;

// stack: [kNumArguments<Call>]
template <typename Call>
Call from_stack(const StableIValue* stack) {
  return [&]<size_t... I>(std::index_sequence<I...>) {
    return Call{std::tuple_element_t<I, ArgumentsOf<Call>>{stack[I]}...};
  }(std::make_index_sequence<kNumArguments<Call>>{});
}

// An output that a kernel writes is a tensor, or may be absent.
template <typename Output>
using OutputArgument =
    std::conditional_t<std::is_same_v<Output, torch::stable::Tensor>, TensorArgument, OptionalArgument>;

// Adds the tensors of a stack that nothing has taken ownership of.
template <typename Call, typename... Outputs>
void add_tensors(const StableIValue* stack, Differentiable& tensors) {
  constexpr size_t fields = kNumArguments<Call>;
  [&]<size_t... I>(std::index_sequence<I...>) {
    (std::tuple_element_t<I, ArgumentsOf<Call>>{stack[I]}.add_to(tensors), ...);
  }(std::make_index_sequence<fields>{});
  [&]<size_t... I>(std::index_sequence<I...>) {
    (OutputArgument<Outputs>{stack[fields + I]}.add_to(tensors), ...);
  }(std::index_sequence_for<Outputs...>{});
}

// The tensors that a kernel returns.
template <typename Result>
struct Results {
  static constexpr size_t kCount = 1;
  static void put(StableIValue* stack, const Result& result) { stack[0] = torch::stable::detail::from(result); }
};
template <>
struct Results<void> {
  static constexpr size_t kCount = 0;
};
template <typename... Tensors>
struct Results<std::tuple<Tensors...>> {
  static constexpr size_t kCount = sizeof...(Tensors);
  static void put(StableIValue* stack, const std::tuple<Tensors...>& results) {
    std::apply([&](const auto&... result) { ((*stack++ = torch::stable::detail::from(result)), ...); }, results);
  }
};

// The names of ops that have no kernel at the Autograd key (calls/derivatives.h), as template arguments.
inline constexpr char kPagedAttention[] = "paged_attention", kPagedAttentionOut[] = "paged_attention_out";
inline constexpr char kCacheStore[] = "cache_store", kCacheStoreLayers[] = "cache_store_layers";
inline constexpr char kStoreAndAttend[] = "store_and_attend";
inline constexpr char kMlaStore[] = "mla_store", kMlaAttention[] = "mla_attention";
inline constexpr char kMlaAttentionOut[] = "mla_attention_out";
inline constexpr char kLinearPacked[] = "linear_packed", kLinearExperts[] = "linear_experts";
inline constexpr char kOther[] = "";  // an op that has one

// A kernel takes a call. That of an _out variant also takes the tensors that it writes, the last ones of the schema.
template <auto kernel, const char* op, typename Result, typename Call, typename... Outputs>
void run_boxed(Result (*)(const Call&, const Outputs&...), StableIValue* stack, uint64_t num_arguments,
               uint64_t num_results) {
  constexpr size_t fields = kNumArguments<Call>, arguments = fields + sizeof...(Outputs);
  STD_TORCH_CHECK(num_arguments == arguments && num_results == Results<Result>::kCount, "the schema of this op has ",
                  num_arguments, " arguments and ", num_results, " results, but its kernel has ", arguments, " and ",
                  Results<Result>::kCount);
  const auto run = [&]<size_t... I>(std::index_sequence<I...>) {
    const bool ask = op[0] != '\0' && may_be_differentiated();
    Differentiable tensors;
    if (ask) add_tensors<Call, Outputs...>(stack, tensors);
    const Call call = from_stack<Call>(stack);
    const std::tuple<Outputs...> outputs{torch::stable::detail::to<Outputs>(stack[fields + I])...};
    if (ask) tensors.refuse(op);
    return kernel(call, std::get<I>(outputs)...);
  };
  if constexpr (std::is_void_v<Result>) {
    run(std::index_sequence_for<Outputs...>{});
  } else {
    Results<Result>::put(stack, run(std::index_sequence_for<Outputs...>{}));
  }
}

// What StableLibrary::impl takes.
template <auto kernel, const char* op = kOther>
void boxed(StableIValue* stack, uint64_t num_arguments, uint64_t num_results) {
  run_boxed<kernel, op>(kernel, stack, num_arguments, num_results);
}

}  // namespace turboquant
