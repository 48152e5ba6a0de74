// Packed standalone vectors as the codec and the score ops read them: rows of codes, a scale each, one rotation.
#pragma once

#include "codec.h"
#include "pack.h"
#include "runtime.h"

namespace turboquant::cpu {

struct DenseVectors {
  const uint8_t* packed;  // [count, row_bytes]
  const uint16_t* scale;  // [count]
  const float* signs;     // [d]
  LevelTable table;
  format::Split split;
  int64_t count, d, row_bytes;
  int bits;

  // y: [d], vector r in the rotated space; codes: [d] scratch.
  void decode_rotated(int64_t r, uint8_t* codes, float* y) const {
    unpack_row(packed + r * row_bytes, codes, d, bits);
    table.decode(codes, half_value(scale[r]), y, d);
  }
};

// d is the length of signs; packed: uint8 [..., row_bytes], scale: float16 [...]
inline DenseVectors checked_dense_vectors(const Tensor& packed, const Tensor& scale, const Tensor& signs,
                                          const OptionalTensor& levels, int64_t bits) {
  const int64_t d = check_dense_vectors(packed, scale, signs, bits), row_bytes = format::dense_row_bytes(d, bits);
  return {static_cast<const uint8_t*>(packed.data_ptr()),
          static_cast<const uint16_t*>(scale.data_ptr()),
          static_cast<const float*>(signs.data_ptr()),
          LevelTable(static_cast<int>(bits), checked_levels(levels, packed, bits, "levels")),
          format::split_dim(d),
          packed.numel() / row_bytes,
          d,
          row_bytes,
          static_cast<int>(bits)};
}

}  // namespace turboquant::cpu
