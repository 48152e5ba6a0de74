// How Python tells this library who differentiates (calls/derivatives.h).
#include "calls/derivatives.h"

extern "C" __attribute__((visibility("default"))) void turboquant_cpu_set_forward_mode(turboquant::InForwardMode* ask) {
  turboquant::in_forward_mode = ask;
}
