// The cases of kernels.cpp: each makes its arguments, calls kernels and keeps the bytes that they wrote.
#pragma once

#include "arguments.h"

namespace sanitized {

using Case = void(const Kernels& k, Random& random, Written& written);

// attention_kernels.cpp
Case query_factors, attend_pages, attend_exact, score_rows, latents;

// codec_kernels.cpp
Case convert, project, sketch, hadamard, rotate, pack, encode, decode, cache, group, move, weights;

}  // namespace sanitized
