// Gathers the kernels of one level in its table. Each file in levels/ includes this header once.
#pragma once

#include "cpu/kernels.h"
#include "cpu/kernels/attention.h"
#include "cpu/kernels/cache.h"
#include "cpu/kernels/codec.h"
#include "cpu/kernels/convert.h"
#include "cpu/kernels/group.h"
#include "cpu/kernels/hadamard.h"
#include "cpu/kernels/linear.h"
#include "cpu/kernels/mass.h"
#include "cpu/kernels/mla.h"
#include "cpu/kernels/move.h"
#include "cpu/kernels/pack.h"
#include "cpu/kernels/qjl.h"
#include "cpu/kernels/score.h"

namespace turboquant::cpu::TURBOQUANT_LEVEL {

extern const Kernels kTable;
constexpr Kernels make_table(const char* level) {
  return {
      .level = level,
      .to_float = to_float,
      .from_float = from_float,
      .add_scaled = add_scaled,
      .hadamard = hadamard,
      .rotate = rotate,
      .rotate_back = rotate_back,
      .pack = pack,
      .unpack = unpack,
      .codes_fit = codes_fit,
      .encode = encode,
      .decode = decode,
      .group_encode = group_encode,
      .group_decode = group_decode,
      .store_tokens = store_tokens,
      .load_tokens = load_tokens,
      .take_token = take_token,
      .put_token = put_token,
      .query_factor_bytes = query_factor_bytes,
      .query_factors = query_factors,
      .attend_scratch_bytes = attend_scratch_bytes,
      .attend_pages = attend_pages,
      .attend_exact = attend_exact,
      .mass_of_pages = mass_of_pages,
      .mass_of_exact = mass_of_exact,
      .store_latents = store_latents,
      .load_latents = load_latents,
      .attend_latents_scratch_bytes = attend_latents_scratch_bytes,
      .attend_latents = attend_latents,
      .score_rows = score_rows,
      .prescale = prescale,
      .project = project,
      .sign_bits = sign_bits,
      .sketch_panels = sketch_panels,
      .sketch_signs = sketch_signs,
      .encode_weight = encode_weight,
      .decode_weight = decode_weight,
      .pack_weight = pack_weight,
      .unpack_weight = unpack_weight,
      .linear_factor_bytes = linear_factor_bytes,
      .linear_inputs = linear_inputs,
      .linear_tiles = linear_tiles,
  };
}

}  // namespace turboquant::cpu::TURBOQUANT_LEVEL
