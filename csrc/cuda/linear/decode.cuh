// weight_decode for other ops: products with many tokens decode slices of a weight. Host only.
#pragma once

#include "calls/linear.h"

namespace turboquant::cuda {

// weight_decode, of a whole weight or of a slice of its tiles. reads_early: the previous kernel of the stream does not
// write the packed weight, so that its first bytes may be read before that kernel has ended.
Tensor decode_weight(const WeightDecodeCall& c, bool reads_early);

}  // namespace turboquant::cuda
