// The kernels in plain C++, for processors without AVX2. Tests compare the other levels with these.
#define TURBOQUANT_LEVEL portable
#include "cpu/levels/level.h"

const turboquant::cpu::Kernels turboquant::cpu::portable::kTable = make_table("portable");
