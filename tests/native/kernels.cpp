// Runs the kernels of every level with random arguments, for AddressSanitizer and UBSan (tests/test_sanitizers.py). No
// torch.
//
// A case makes its arguments in memory of exactly the promised size, calls kernels and keeps the bytes that they wrote,
// which must be the same at every level. A new kernel needs a function in attention_kernels.cpp or codec_kernels.cpp,
// declared in cases.h, and its name in CASES.
#include <pybind11/pybind11.h>

#include <map>
#include <stdexcept>
#include <string>

#include "cases.h"

extern "C" const char* turboquant_cpu_levels();
extern "C" bool turboquant_cpu_force_level(const char* name);

namespace py = pybind11;

namespace sanitized {
namespace {

const std::map<std::string, Case*> CASES = {
    {"convert", convert},
    {"query_factors", query_factors},
    {"attend_pages", attend_pages},
    {"attend_exact", attend_exact},
    {"score_rows", score_rows},
    {"project", project},
    {"sketch", sketch},
    {"hadamard", hadamard},
    {"rotate", rotate},
    {"pack", pack},
    {"encode", encode},
    {"decode", decode},
    {"group", group},
    {"cache", cache},
    {"move", move},
    {"latents", latents},
    {"weights", weights},
};

py::bytes run(const std::string& name, const std::string& level, uint64_t seed) {
  if (!turboquant_cpu_force_level(level.c_str())) throw std::invalid_argument("no level " + level);
  stale_byte = static_cast<uint8_t>(level.size() * 0x25 + 0x55);
  Random random(seed);
  Written written;
  CASES.at(name)(kernels(), random, written);
  return written.bytes();
}

// For the test that the sanitizers work.
int misbehave(const std::string& how, int n) {
  Memory<uint8_t> bytes(24, 64);
  Memory<int32_t> words(2, 64);
  if (how == "read beyond") return bytes[24 + n];
  if (how == "shift") return 1 << (32 + n);
  if (how == "misaligned") return reinterpret_cast<const int32_t*>(bytes.get() + 1 + n)[0];
  throw std::invalid_argument(how);
}

}  // namespace
}  // namespace sanitized

PYBIND11_MODULE(turboquant_sanitized, m) {
  using namespace sanitized;
  py::list cases;
  for (const auto& [name, fn] : CASES) cases.append(name);
  m.attr("CASES") = cases;
  m.attr("LEVELS") = py::str(turboquant_cpu_levels()).attr("split")();
  m.def("run", &run);
  m.def("misbehave", &misbehave);
}
