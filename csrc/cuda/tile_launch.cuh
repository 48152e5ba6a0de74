// What tiles.cu does for the ops: encodes many vectors at the speed of memory, where it can.
#pragma once

#include "cache.cuh"

namespace turboquant::cuda {

// Vectors of `heads` heads of tokens, strides in bytes; rows start at multiples of 16 bytes.
struct TileSource {
  const uint8_t* data;
  int64_t token_stride, head_stride;
  Codebook book;
  const float* signs;
  const float* center;    // float32, or null
  int64_t center_stride;  // between heads, in elements
};

struct TileArguments {
  TileSource source[2];  // keys and values, or vectors
  int sources;
  int64_t tokens;
  int heads;
  ScalarType dtype;
  EncodeConstants constants;

  // Keys and values go to pages and to the tail,
  Pages pages;
  RecordLayout layout;
  const int64_t* slots;
  Tail tail;

  // vectors to dense rows [tokens, heads, row_bytes] and scales [tokens, heads].
  uint8_t* packed;
  uint16_t* scale;
  int row_bytes;
};

// False where there are too few vectors to fill the device, or no kernel for them: then nothing was launched.
bool launch_tiles(const TileArguments& arguments, format::Split split, cudaStream_t stream);

}  // namespace turboquant::cuda
