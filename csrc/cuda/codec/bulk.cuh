// What codec/encode_bulk.cu and codec/decode_bulk.cu do for the ops: encode and decode many vectors at the speed of memory, where they
// can.
#pragma once

#include "cuda/codec/record.cuh"

namespace turboquant::cuda {

// Vectors of `heads` heads of tokens, strides in bytes; rows start at multiples of 16 bytes.
struct TileSource {
  const uint8_t* data;
  int64_t token_stride, head_stride;
  Codebook book;
  const float* signs;
  format::Channels channels;  // [d] of the first head
  int64_t channel_stride;     // between heads, in elements
};

struct TileArguments {
  TileSource source[2];  // keys and values, or vectors
  int sources;
  int64_t tokens;
  int heads;
  Dtype dtype;
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

// Codes to be decoded, of keys and values or of vectors.
struct LoadTileSource {
  int bits;
  const int8_t* levels;
  const float* signs;
  format::Channels channels;  // [heads, d]
  void* out;                  // [seqs, max_length, heads, d]
};

struct LoadTileArguments {
  LoadTileSource source[2];
  int sources, heads;
  Dtype dtype;  // of what is decoded
  int64_t seqs, max_length;

  // From pages,
  Pages pages;
  RecordLayout layout;
  const int32_t* table;    // [seqs, max_pages]
  const int32_t* lengths;  // [seqs]
  int64_t max_pages;

  // or from dense rows [max_length, row_bytes] that start at multiples of 8 bytes, and scales.
  const uint8_t* packed;
  const uint16_t* scale;
  int row_bytes;

  int tiles_of_sequence;  // filled in by the launch
};

// fn(log2 d, Tag<dtype>) for the vectors that tiles are made of; false for others.
template <typename Fn>
bool dispatch_tiles(Dtype dtype, format::Split split, Fn&& fn) {
  const auto of_type = [&](auto tag) {
    switch (split.blocks * split.block) {
      case 64: return fn(std::integral_constant<int, 6>{}, tag);
      case 128: return fn(std::integral_constant<int, 7>{}, tag);
      case 256: return fn(std::integral_constant<int, 8>{}, tag);
      default: return false;
    }
  };
  if (dtype == Dtype::kBFloat16) return of_type(Tag<__nv_bfloat16>{});
  return dtype == Dtype::kFloat16 && of_type(Tag<__half>{});
}

// False where there are too few vectors, or no kernel for them.
bool launch_decode_bulk(const LoadTileArguments& arguments, format::Split split, cudaStream_t stream);

// False where there are too few vectors to fill the device, or no kernel for them: then nothing was launched.
bool launch_encode_bulk(const TileArguments& arguments, format::Split split, cudaStream_t stream);

// The same for the keys and values of few tokens: false where there is no kernel for them.
bool launch_encode_step(const TileArguments& arguments, format::Split split, cudaStream_t stream);

}  // namespace turboquant::cuda
