// Plans of the latest calls. Comparing plans takes microseconds, and the layers of a model have few shapes. Host only.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace turboquant::cuda::linear {

// What a plan follows from. No shape is all zeros.
using PlanShape = std::array<int64_t, 7>;

// One for each thread: a shape has a place that follows from it, and keeps it until another one takes it.
template <typename Plan>
class KnownPlans {
 public:
  // make(): the plan of this shape.
  template <typename F>
  const Plan& find(const PlanShape& shape, F&& make) {
    uint64_t place = 0;
    for (const int64_t x : shape) place = (place ^ static_cast<uint64_t>(x)) * 0x9E3779B97F4A7C15;
    Known& k = known_[place >> 58];
    if (k.shape != shape) k = {shape, make()};
    return k.plan;
  }

 private:
  struct Known {
    PlanShape shape{};
    Plan plan;
  };
  std::array<Known, 64> known_;
};

}  // namespace turboquant::cuda::linear
