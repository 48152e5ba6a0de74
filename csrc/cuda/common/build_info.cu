// What this library was built from, as JSON: `python -m torch_turboquant info` prints it.
#include <cuda_runtime_api.h>

#include "format.h"

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

static_assert(turboquant::format::kVersion == 1, "the text below names the format version");

extern "C" __attribute__((visibility("default"))) const char* turboquant_cuda_build_info() {
  return "{\"version\": \"" TURBOQUANT_VERSION
         "\", \"format_version\": 1"
         ", \"compiler\": \"nvcc " TEXT(__CUDACC_VER_MAJOR__) "." TEXT(__CUDACC_VER_MINOR__) "." TEXT(__CUDACC_VER_BUILD__) "\", \"torch_target\": \"" TEXT(
             TORCH_TARGET_VERSION) "\", \"cuda\": \"" TEXT(__CUDACC_VER_MAJOR__) "." TEXT(__CUDACC_VER_MINOR__) "\", \"architectures\": \"" TURBOQUANT_CUDA_ARCHITECTURES
                                                                                                                "\"}";
}
