// The kernels in plain C++: for processors without AVX2, and what the other levels are compared with.
#define TURBOQUANT_LEVEL portable
#include "cpu/levels/level.h"

const turboquant::cpu::Kernels turboquant::cpu::portable::kTable = make_table("portable");
