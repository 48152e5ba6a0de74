// Which CUDA kernel takes a call of encode, decode, cache_store or cache_load, and why: the one place that knows the
// conditions. Plain C++ without torch and CUDA, so that the launch, a test and a report of the machine ask the same
// function.
//
// The bulk kernels (cuda/codec/encode_bulk.cu, decode_bulk.cu) run at the speed of memory, once there are enough
// vectors to fill the device; the step kernel (encode_step.cu) stores the few tokens of a decode step; the generic
// kernels (generic.cuh, lanes.cuh) take every length, dtype and width.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "choices/device.h"
#include "dtype.h"
#include "format.h"

namespace turboquant {

enum class CodecKernel { kBulk, kStep, kGeneric };

struct CodecChoice {
  CodecKernel kernel;
  const char* reason;  // the condition that decided
};

// Vectors to be encoded: their codebook, and the bytes between tokens and between heads.
struct EncodeSourceShape {
  format::Width width;
  int candidates;
  int64_t token_stride, head_stride;
};

// A call of encode. Its vectors are [tokens, heads, head_dim].
struct EncodeShape {
  int head_dim;
  Dtype dtype;
  int64_t tokens, heads;
  EncodeSourceShape source;
};

// A call of decode: dense rows, which start at a multiple of 8 bytes (aligned) or do not.
struct DecodeShape {
  int head_dim;
  Dtype dtype;
  int64_t vectors;
  bool aligned;
};

// A call of cache_store: keys and values [tokens, heads, head_dim].
struct StoreShape {
  int head_dim;
  Dtype dtype;
  int64_t tokens, heads;
  EncodeSourceShape keys, values;
  int64_t num_pages;
  int tile_bytes;
  bool has_tail, tail_aligned;  // the tail starts at a multiple of 8 bytes
  int64_t tail_seqs, tail_max_seqs;
};

// A call of cache_load, of [seqs, max_length] tokens.
struct LoadShape {
  int head_dim;
  Dtype dtype;
  int64_t seqs, max_length, heads;
};

namespace choices {

// ---- The bulk encoder: the sizes of its shared memory, which codec/encode_bulk.cuh shares ---------------------------

constexpr int kMostCandidates = 8;  // of the bulk and the step kernel
constexpr int kMostWarps = 16;      // of a block of the bulk encoder: as many as have the registers that they need
constexpr int kLeastWarps = 8;      // fewer warps would leave memory latency exposed
constexpr int kLaneChannels = 64;   // of a vector that a lane holds
constexpr int kSharedCodebookBytes = 4416;  // sizeof(SharedCodebook)
constexpr int kSignStride = 68;             // words between the signs of the lanes of a vector

// Tokens of a span, which a warp encodes at a time; vectors of 256 channels take two passes for one.
constexpr int encode_span_tokens(int d) { return d == kLaneChannels ? 32 : 16; }
constexpr int encode_vectors(int d) { return 32 * kLaneChannels / d; }  // of a warp
constexpr int encode_stage_stride(int d) { return d / 2 + 4; }          // words between staged vectors

// Cells u >> 4 on either side of zero that a vector can reach, a multiple of 4: |u| <= 4096 sqrt(d), plus rounding.
constexpr int encode_table_reach(int d) {
  int below = 0;  // the largest integer below 256 sqrt(d); found bit by bit, because every call of an op asks for it
  for (int bit = 4096; bit > 0; bit /= 2) {
    if ((below + bit) * (below + bit) < 65536 * d) below += bit;
  }
  constexpr int kReached = 1, kRounding = 2;  // the cell of the largest |u|; how many more rounding can add
  return (below + kReached + kRounding + 3) / 4 * 4;
}
static_assert(encode_table_reach(64) == 2052 && encode_table_reach(128) == 2900 && encode_table_reach(256) == 4100);
// Words of a table: an entry of a byte for every cell, or with several candidates (search) of a word.
constexpr int encode_table_words(int d, bool search) {
  const int cells = 2 * encode_table_reach(d);
  return (search ? cells / 4 : cells / 16) * 4 + 4;
}

constexpr int encode_source_words(int d, bool search) {
  return encode_table_words(d, search) + d / kLaneChannels * kSignStride;
}
constexpr int encode_stage_words(int d) { return encode_vectors(d) * encode_stage_stride(d); }  // of a warp
constexpr int encode_shared_bytes(int d, bool search, int sources, int warps) {
  return 4 * (sources * encode_source_words(d, search) + warps * encode_stage_words(d));
}

// Warps of a block that fit into shared memory, a multiple of kLeastWarps: as many for keys as for values on each
// scheduler.
constexpr int encode_warps(int d, bool search, int sources, const DeviceFacts& device) {
  const int room = device.shared_per_block - 2 * kSharedCodebookBytes - kReservedSharedBytes;
  const int fixed = encode_shared_bytes(d, search, sources, 0);
  return std::min(kMostWarps, (room - fixed) / (4 * encode_stage_words(d))) / kLeastWarps * kLeastWarps;
}

// ---- The bulk decoder -----------------------------------------------------------------------------------------------

constexpr int kDecodeSpanTokens = 16;
constexpr int decode_warps(int d) { return d <= 128 ? 4 : 2; }  // of a block

// ---- The generic kernels --------------------------------------------------------------------------------------------

// Fewer vectors than this do not fill a device with large blocks.
constexpr int64_t kFewVectors = 2048;

// The lanes that share a vector of d = m * n channels and hold it in registers (cuda/codec/lanes.cuh). 0: a warp holds
// it in shared memory.
constexpr int kMostElements = 16;  // of a lane
constexpr int vector_lanes(format::Split split) {
  for (int lanes = 8; lanes <= 32; lanes *= 2) {
    if (split.blocks * split.block <= kMostElements * lanes && split.block % (2 * lanes) == 0) return lanes;
  }
  return 0;
}

// ---- Conditions: the reason against a kernel, or null ---------------------------------------------------------------

constexpr bool fits_int32(int64_t n) { return n >= 0 && n <= INT32_MAX; }

// Both bulk kernels and the step kernel are compiled for these.
constexpr const char* against_vectors(int head_dim, Dtype dtype) {
  if (head_dim != 64 && head_dim != 128 && head_dim != 256) return "head_dim is not 64, 128 or 256";
  if (dtype == Dtype::kFloat32) return "dtype is float32";
  return nullptr;
}

// Whether a table must hold several candidates. 8-bit codes have no table.
constexpr bool searches_table(format::Width width, int candidates) {
  return candidates > 1 && !format::levels_are_codes(width);
}

// Whether keys and values of many tokens are a launch each: no kernel has both 8-bit codes and tables.
constexpr bool encodes_apart(format::Width keys, format::Width values) {
  return format::levels_are_codes(keys) != format::levels_are_codes(values);
}

constexpr const char* against_codebook(const EncodeSourceShape& source) {
  if (source.candidates > kMostCandidates) return "a codebook has more than 8 candidate steps";
  return nullptr;
}

// sources: 1 of encode; 2, keys and values, of cache_store
inline const char* against_encode_bulk(int head_dim, Dtype dtype, int64_t tokens, int64_t heads,
                                       std::initializer_list<EncodeSourceShape> sources, const DeviceFacts& device) {
  if (const char* reason = against_vectors(head_dim, dtype)) return reason;
  bool search = false;
  for (const EncodeSourceShape& source : sources) {
    if (const char* reason = against_codebook(source)) return reason;
    search = search || searches_table(source.width, source.candidates);
  }
  const bool apart = sources.size() == 2 && encodes_apart(sources.begin()[0].width, sources.begin()[1].width);
  const int count = apart ? 1 : static_cast<int>(sources.size());  // of a launch
  const int warps = encode_warps(head_dim, search, count, device);
  if (warps < kLeastWarps) return "shared memory of the device holds too few warps";
  const int span = encode_span_tokens(head_dim), passes = span / encode_vectors(head_dim);
  const int64_t items = (tokens + span - 1) / span * passes * heads * count;
  if (2 * items < int64_t{device.multiprocessors} * warps) return "too few vectors to fill the device";
  if (std::max(items, tokens) > INT32_MAX / 2) return "too many vectors for 32-bit counters";
  for (const EncodeSourceShape& source : sources) {
    if (std::max(source.token_stride, source.head_stride) > INT32_MAX) return "a stride of 2 GiB or more";
  }
  return nullptr;
}

inline const char* against_encode_step(const StoreShape& s) {
  if (!fits_int32(s.tokens)) return "2^31 tokens or more";
  if (!fits_int32(s.num_pages * s.heads)) return "2^31 records or more";
  if (s.tile_bytes > UINT16_MAX) return "tiles of 64 KiB or more";
  for (const EncodeSourceShape& source : {s.keys, s.values}) {
    if (const char* reason = against_codebook(source)) return reason;
    if (!fits_int32(source.token_stride) || !fits_int32(source.head_stride)) return "a stride of 2 GiB or more";
  }
  if (s.has_tail && (!fits_int32(s.tail_seqs) || !fits_int32(s.tail_max_seqs * s.heads))) {
    return "2^31 sequences in the exact tail or more";
  }
  if (s.has_tail && !s.tail_aligned) return "the exact tail does not start at a multiple of 8 bytes";
  return against_vectors(s.head_dim, s.dtype);
}

inline const char* against_decode_bulk(int head_dim, Dtype dtype, int64_t seqs, int64_t max_length, int64_t heads,
                                       int sources, const DeviceFacts& device) {
  if (const char* reason = against_vectors(head_dim, dtype)) return reason;
  const int64_t items = seqs * ((max_length + kDecodeSpanTokens - 1) / kDecodeSpanTokens) * heads;
  if (items > INT32_MAX / 2 || max_length > INT32_MAX - kDecodeSpanTokens) {
    return "too many vectors for 32-bit counters";
  }
  if (items * sources < device.multiprocessors * decode_warps(head_dim)) return "too few vectors to fill the device";
  return nullptr;
}

constexpr const char* kEnoughVectors = "enough vectors to fill the device";
constexpr CodecChoice bulk_unless(const char* reason) {
  return reason ? CodecChoice{CodecKernel::kGeneric, reason} : CodecChoice{CodecKernel::kBulk, kEnoughVectors};
}

}  // namespace choices

// ---- The choices ----------------------------------------------------------------------------------------------------

inline CodecChoice choose_encode(const EncodeShape& s, const DeviceFacts& device) {
  return choices::bulk_unless(choices::against_encode_bulk(s.head_dim, s.dtype, s.tokens, s.heads, {s.source}, device));
}

inline CodecChoice choose_decode(const DecodeShape& s, const DeviceFacts& device) {
  if (!s.aligned) return {CodecKernel::kGeneric, "packed does not start at a multiple of 8 bytes"};
  return choices::bulk_unless(choices::against_decode_bulk(s.head_dim, s.dtype, 1, s.vectors, 1, 1, device));
}

inline CodecChoice choose_store(const StoreShape& s, const DeviceFacts& device) {
  const char* against_bulk =
      choices::against_encode_bulk(s.head_dim, s.dtype, s.tokens, s.heads, {s.keys, s.values}, device);
  if (!against_bulk) return {CodecKernel::kBulk, choices::kEnoughVectors};
  const char* against_step = choices::against_encode_step(s);
  return against_step ? CodecChoice{CodecKernel::kGeneric, against_step}
                      : CodecChoice{CodecKernel::kStep, against_bulk};
}

inline CodecChoice choose_load(const LoadShape& s, const DeviceFacts& device) {
  return choices::bulk_unless(
      choices::against_decode_bulk(s.head_dim, s.dtype, s.seqs, s.max_length, s.heads, 2, device));
}

}  // namespace turboquant
