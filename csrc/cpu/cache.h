// What other rooms need of the room `cache`.
#pragma once

#include "calls/step.h"

namespace turboquant::cpu {

// Checks a layer's keys and values; returns what stores them.
Store prepare_store(const StoreLayer& layer, const StoreCall& call);

}  // namespace turboquant::cpu
