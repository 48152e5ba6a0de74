// The seam between the codec's ops and its kernels: codec/encode_bulk.cu and codec/decode_bulk.cu for many vectors,
// codec/encode_step.cu for the keys and values of a decode step, codec/encode_any.cu and codec/decode_any.cu for
// everything. choices/codec.h says which calls they take.
#pragma once

#include "cuda/codec/record.cuh"

namespace turboquant::cuda {

// Vectors of tokens and heads, strides in bytes. A row starts at a multiple of what a load of eight channels takes, or
// of a block's channels where a block of the transform has fewer.
struct EncodeSource {
  const uint8_t* data;
  int64_t token_stride, head_stride;
  Codebook book;
  const float* signs;         // [d]
  format::Channels channels;  // [d] of the first head
  int64_t channel_stride;     // between heads, in elements
};

struct EncodeArguments {
  EncodeSource source[2];  // keys and values, one of them, or vectors
  int sources;
  int first;  // what source[0] is: keys (0) or values (1)
  int64_t tokens;
  int heads;
  Dtype dtype;
  EncodeConstants constants;

  // Keys and values are stored in pages and in the tail,
  Pages pages;
  RecordLayout layout;
  Slots slots;
  Tail tail;

  // vectors in dense rows [tokens, heads, row_bytes] with scales [tokens, heads].
  uint8_t* packed;  // null for keys and values
  uint16_t* scale;
  int row_bytes;
};

// Codes to be decoded: of keys, of values or of vectors.
struct DecodeSource {
  Width width;
  const int8_t* levels;       // [2^bits]; null: uniform grid
  const float* signs;         // [d]
  format::Channels channels;  // [heads, d]
  void* out;                  // [seqs, max_length, heads, d]
};

struct DecodeArguments {
  DecodeSource source[2];
  int sources, heads;
  Dtype dtype;  // of the decoded vectors
  int64_t seqs, max_length;

  // The codes are in pages,
  Pages pages;
  RecordLayout layout;
  const int32_t* table;    // [seqs, max_pages]
  const int32_t* lengths;  // [seqs]
  int64_t table_stride, max_pages;

  // or in dense rows [max_length, row_bytes] with scales [max_length]. For decode_bulk they start at multiples of 8
  // bytes.
  const uint8_t* packed;  // null for pages
  const uint16_t* scale;
  int row_bytes;

  int spans_of_sequence;  // filled in by the launch
};

// fn(log2 d, Tag<dtype>) for the vectors that these kernels are compiled for (choices::against_vectors).
template <typename Fn>
void dispatch_bulk(Dtype dtype, int head_dim, Fn&& fn) {
  const auto of_type = [&](auto tag) {
    switch (head_dim) {
      case 64: return fn(std::integral_constant<int, 6>{}, tag);
      case 128: return fn(std::integral_constant<int, 7>{}, tag);
      default: return fn(std::integral_constant<int, 8>{}, tag);
    }
  };
  dtype == Dtype::kBFloat16 ? of_type(Tag<__nv_bfloat16>{}) : of_type(Tag<__half>{});
}

// Each of these takes the calls that choices/codec.h gives to it, and no others.
void launch_encode_bulk(const EncodeArguments& arguments, int head_dim, cudaStream_t stream);
void launch_encode_any(const EncodeArguments& arguments, format::Split split, cudaStream_t stream);
void launch_encode_step(const EncodeArguments& arguments, int head_dim, cudaStream_t stream);
void launch_decode_bulk(const DecodeArguments& arguments, int head_dim, cudaStream_t stream);
void launch_decode_any(const DecodeArguments& arguments, format::Split split, cudaStream_t stream);

}  // namespace turboquant::cuda
