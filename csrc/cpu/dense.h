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
  check_dtype(packed, "packed", {ScalarType::Byte});
  check_contiguous(packed, "packed");
  STD_TORCH_CHECK(signs.dim() == 1, "signs has shape ", shape_text(signs), ", expected [d]");
  const int64_t d = signs.size(0);
  const format::Split split = check_vector_dim(d, "signs");
  check_constant(signs, packed, "signs", ScalarType::Float, {d});
  const int64_t row_bytes = format::dense_row_bytes(d, bits);
  STD_TORCH_CHECK(packed.dim() >= 1 && packed.size(packed.dim() - 1) == row_bytes, "packed has shape ",
                  shape_text(packed), ", expected [..., ", row_bytes, "] for d = ", d, " at ", bits, " bits");
  check_device(scale, packed, "scale");
  check_dtype(scale, "scale", {ScalarType::Half});
  check_contiguous(scale, "scale");
  bool same = scale.dim() == packed.dim() - 1;
  for (int64_t i = 0; same && i < scale.dim(); ++i) same = scale.size(i) == packed.size(i);
  STD_TORCH_CHECK(same, "scale has shape ", shape_text(scale), ", expected the leading dimensions of packed ",
                  shape_text(packed));
  return {static_cast<const uint8_t*>(packed.data_ptr()),
          static_cast<const uint16_t*>(scale.data_ptr()),
          static_cast<const float*>(signs.data_ptr()),
          LevelTable(static_cast<int>(bits), checked_levels(levels, packed, bits, "levels")),
          split,
          packed.numel() / row_bytes,
          d,
          row_bytes,
          static_cast<int>(bits)};
}

}  // namespace turboquant::cpu
