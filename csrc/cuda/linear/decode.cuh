// weight_decode for other ops: products with many tokens decode slices of a weight. Host only.
#pragma once

#include "calls/linear.h"

namespace turboquant::cuda {

// The op, of a whole weight or of a slice of its tiles.
Tensor weight_decode(const WeightDecodeCall& c);

}  // namespace turboquant::cuda
