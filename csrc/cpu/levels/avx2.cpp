// The kernels for AVX2 with FMA, F16C and BMI2: Haswell, Zen and later.
// cxx x86_64: -mavx2 -mfma -mf16c -mbmi -mbmi2
#if defined(__AVX2__)
#define TURBOQUANT_LEVEL avx2
#define TURBOQUANT_AVX2
#include "cpu/levels/level.h"

const turboquant::cpu::Kernels turboquant::cpu::avx2::kTable = make_table("avx2");
#endif
