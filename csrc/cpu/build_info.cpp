// What this library was built from and what it can run here, as JSON: `python -m torch_turboquant info` prints it.
#include <string>

#include "format.h"

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

// A function and not a constant: kernels that dispatch at run time answer here for the machine they are on.
static const char* instruction_set() {
#if defined(__x86_64__)
  return "x86-64 baseline, portable C++";
#elif defined(__aarch64__)
  return "aarch64 baseline, portable C++";
#else
  return "portable C++";
#endif
}

extern "C" __attribute__((visibility("default"))) const char* turboquant_cpu_build_info() {
  static const std::string info = std::string("{\"version\": \"" TURBOQUANT_VERSION "\", \"format_version\": ") +
                                  std::to_string(turboquant::format::kVersion) +
                                  ", \"compiler\": \"g++ " __VERSION__
                                  "\", \"torch_target\": \"" TEXT(TORCH_TARGET_VERSION) +
                                  "\", \"instruction_set\": \"" + instruction_set() + "\"}";
  return info.c_str();
}
