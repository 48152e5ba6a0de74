// Turns a function that takes its arguments as one aggregate, such as AttentionCall, into a kernel that torch can call.
//
// The fields of the aggregate stand in the order of the op's schema, so that the schema (csrc/ops.cpp) and the
// aggregate are the only two lists of these arguments in C++. TORCH_BOX does the same for functions with one parameter
// per argument.
#pragma once

#include <tuple>
#include <type_traits>
#include <utility>

#include <torch/csrc/stable/library.h>

namespace turboquant {

// One argument on torch's stack. It converts itself to the type of the field that it initialises. The conversion takes
// ownership of what the stack holds, which must happen once: a field is initialised once.
struct TensorArgument {
  StableIValue value;
  operator torch::stable::Tensor() const { return torch::stable::detail::to<torch::stable::Tensor>(value); }
};
struct OtherArgument {
  StableIValue value;
  template <typename T>
    requires(!std::is_same_v<T, torch::stable::Tensor> && !std::is_pointer_v<T>)
  operator T() const {
    return torch::stable::detail::to<T>(value);
  }
};
// Otherwise the constructor of optional that takes a value would make an optional field of its argument as a tensor.
static_assert(!std::is_constructible_v<torch::stable::Tensor, OtherArgument>);

// Finds the kind of every field of an aggregate, one after the other, by trying which argument can initialise it.
template <typename Call, typename... Known>
constexpr auto find_arguments() {
  if constexpr (requires { Call{std::declval<Known>()..., std::declval<OtherArgument>()}; }) {
    return find_arguments<Call, Known..., OtherArgument>();
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

// A kernel takes a call. That of an _out variant also takes the tensors that it writes, the last ones of the schema.
template <auto kernel, typename Result, typename Call, typename... Outputs>
void run_boxed(Result (*)(const Call&, const Outputs&...), StableIValue* stack, uint64_t num_arguments,
               uint64_t num_results) {
  constexpr size_t fields = kNumArguments<Call>, arguments = fields + sizeof...(Outputs);
  STD_TORCH_CHECK(num_arguments == arguments && num_results == Results<Result>::kCount, "the schema of this op has ",
                  num_arguments, " arguments and ", num_results, " results, but its kernel has ", arguments, " and ",
                  Results<Result>::kCount);
  const auto run = [&]<size_t... I>(std::index_sequence<I...>) {
    const Call call = from_stack<Call>(stack);
    const std::tuple<Outputs...> outputs{torch::stable::detail::to<Outputs>(stack[fields + I])...};
    return kernel(call, std::get<I>(outputs)...);
  };
  if constexpr (std::is_void_v<Result>) {
    run(std::index_sequence_for<Outputs...>{});
  } else {
    Results<Result>::put(stack, run(std::index_sequence_for<Outputs...>{}));
  }
}

// What StableLibrary::impl takes.
template <auto kernel>
void boxed(StableIValue* stack, uint64_t num_arguments, uint64_t num_results) {
  run_boxed<kernel>(kernel, stack, num_arguments, num_results);
}

}  // namespace turboquant
