// What other rooms need of the room `cache`.
#pragma once

#include "calls/step.h"

namespace turboquant::cuda {

// Checks a layer's keys and values; returns what launches their kernel.
Store prepare_store(const StoreLayer& layer, const StoreCall& call);

}  // namespace turboquant::cuda
