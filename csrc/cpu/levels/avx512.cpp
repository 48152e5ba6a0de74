// The kernels for AVX-512 with VNNI and VBMI: Ice Lake, Zen 4 and later.
// cxx x86_64: -mavx2 -mfma -mf16c -mbmi -mbmi2 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mavx512vbmi
#if defined(__AVX512VBMI__)
#define TURBOQUANT_LEVEL avx512
#define TURBOQUANT_AVX512
#include "cpu/levels/level.h"

const turboquant::cpu::Kernels turboquant::cpu::avx512::kTable = make_table("avx512");
#endif
