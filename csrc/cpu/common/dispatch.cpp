// Chooses the level of kernels, once: the best that this processor runs. Tests choose another through the functions
// below; nothing else does.
#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "cpu/kernels.h"

namespace turboquant::cpu {

namespace portable {
extern const Kernels kTable;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Kernels kTable;
}
namespace avx512 {
extern const Kernels kTable;
}
#endif

namespace {

// The levels that run here, best first.
const std::vector<const Kernels*>& levels() {
  static const std::vector<const Kernels*> list = [] {
    std::vector<const Kernels*> found;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool v2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
                    __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
    const bool v4 = v2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                    __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi");
    if (v4) found.push_back(&avx512::kTable);
    if (v2) found.push_back(&avx2::kTable);
#endif
    found.push_back(&portable::kTable);
    return found;
  }();
  return list;
}

std::atomic<const Kernels*> chosen{nullptr};

}  // namespace

const Kernels& kernels() {
  const Kernels* k = chosen.load(std::memory_order_relaxed);
  if (!k) chosen = k = levels().front();
  return *k;
}

}  // namespace turboquant::cpu

// The levels that run here, best first, separated by spaces.
extern "C" __attribute__((visibility("default"))) const char* turboquant_cpu_levels() {
  static const std::string text = [] {
    std::string names;
    for (const auto* k : turboquant::cpu::levels()) names += (names.empty() ? "" : " ") + std::string(k->level);
    return names;
  }();
  return text.c_str();
}

// The level in use.
extern "C" __attribute__((visibility("default"))) const char* turboquant_cpu_level() {
  return turboquant::cpu::kernels().level;
}

// For tests: uses the named level from now on, or the best one for an empty name. Returns false if it does not run
// here.
extern "C" __attribute__((visibility("default"))) bool turboquant_cpu_force_level(const char* name) {
  for (const auto* k : turboquant::cpu::levels()) {
    if (*name == '\0' || std::strcmp(k->level, name) == 0) {
      turboquant::cpu::chosen = k;
      return true;
    }
  }
  return false;
}
