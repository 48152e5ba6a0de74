// From a head_dim to the code that is compiled for it. Host code.
#pragma once

#include <iterator>
#include <type_traits>
#include <utility>

namespace turboquant::cuda {

// What f(std::integral_constant<int, d>{}) returns for the element d of DIMS, a list of choices/attention.h, that is
// head_dim; an empty result if there is none.
template <const auto& DIMS, typename F>
auto with_head_dim(int head_dim, F&& f) {
  decltype(f(std::integral_constant<int, DIMS[0]>{})) found{};
  const auto try_all = [&]<size_t... I>(std::index_sequence<I...>) {
    const auto take = [&](auto d) {
      if (d == head_dim) found = f(d);
    };
    (take(std::integral_constant<int, DIMS[I]>{}), ...);
  };
  try_all(std::make_index_sequence<std::size(DIMS)>{});
  return found;
}

}  // namespace turboquant::cuda
