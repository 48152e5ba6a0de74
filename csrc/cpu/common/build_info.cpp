// The origin of this library as JSON. `python -m torch_turboquant info` prints it, with the levels of dispatch.cpp.
#include <string>

#include "format.h"

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

extern "C" __attribute__((visibility("default"))) const char* turboquant_cpu_build_info() {
  static const std::string info = std::string("{\"version\": \"" TURBOQUANT_VERSION "\", \"format_version\": ") +
                                  std::to_string(turboquant::format::kVersion) +
                                  ", \"compiler\": \"g++ " __VERSION__
                                  "\", \"torch_target\": \"" TEXT(TORCH_TARGET_VERSION) "\"}";
  return info.c_str();
}
