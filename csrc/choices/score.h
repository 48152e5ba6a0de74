// Which CUDA kernel takes a call of score, qjl_score or qjl_sketch, and why: the one place that knows the conditions.
// Plain C++ without torch and CUDA, so that the launch, a test and a report of the machine ask the same function.
#pragma once

#include <cstdint>

#include "choices/device.h"
#include "dtype.h"
#include "format.h"

namespace turboquant {

// ---- score, qjl_score -----------------------------------------------------------------------------------------------

enum class ScoreKernel {
  kOneQuery,  // one query of 128 channels, with most sizes known when it is compiled
  kGeneral,   // everything
};

// What the choice depends on, of a call.
struct ScoreFacts {
  bool has_codes, has_sketch, dense_sketch;
  format::Codes codes;  // of the keys, if there are any
  int64_t sketch_bits;
  int64_t head_dim, batch, queries, keys;
  bool word_rows;            // rows of codes and sketches start at multiples of what a load takes
  bool aligned_constants;    // signs, center and structured projection start at multiples of 16 bytes
  int64_t four_query_bytes;  // shared memory that a block of the general kernel needs for four queries
};

struct ScoreChoice {
  ScoreKernel kernel;
  const char* reason;  // the condition that decided
  int query_pairs;     // of a block; two queries share the columns of a product
};

constexpr int kOneQueryDim = 128;              // channels of a vector, and bits of a sketch
constexpr int kOneQueryLeastKeys = 32;         // that a warp takes at a time
constexpr int kOneQueryMaxBatch = 65535;       // the second dimension of a grid
constexpr int kDefaultSharedBytes = 48 << 10;  // what a block has without opting in to more

// The one-query kernel is not compiled for a table of 5-bit levels, which expands slowly anyway, nor for 8-bit codes
// with a sketch, for which registers do not suffice.
constexpr bool has_one_query_kernel(bool has_codes, const format::Codes& codes, bool has_sketch) {
  if (!has_codes) return has_sketch;
  if (format::has_plane(codes.width)) return codes.grid == format::Grid::kUniform;
  return !(has_sketch && format::levels_are_codes(codes.width));
}

// Nor is the general kernel for four queries with both codes and a sketch, again because of registers.
constexpr bool has_four_query_kernel(bool has_codes, bool has_sketch) { return !(has_codes && has_sketch); }

// Why the one-query kernel does not take a call; null: it does.
constexpr const char* one_query_obstacle(const ScoreFacts& call) {
  if (call.queries != 1) return "more than one query";
  if (call.head_dim != kOneQueryDim) return "head_dim is not 128";
  if (call.keys < kOneQueryLeastKeys) return "fewer than 32 keys";
  if (call.batch > kOneQueryMaxBatch) return "more than 65535 rows of keys";
  if (!call.aligned_constants) return "signs, center or projection are not aligned to 16 bytes";
  if (call.has_sketch && call.dense_sketch) return "the projection is dense";
  if (call.has_sketch && call.sketch_bits != kOneQueryDim) return "sketches do not have 128 bits";
  if (!has_one_query_kernel(call.has_codes, call.codes, call.has_sketch)) {
    return "the one-query kernel is not compiled for these codes";
  }
  return nullptr;
}

constexpr ScoreChoice choose_score(const ScoreFacts& call) {
  if (!call.word_rows) return {ScoreKernel::kGeneral, "rows do not start at multiples of a load", 1};
  const char* obstacle = one_query_obstacle(call);
  if (!obstacle) return {ScoreKernel::kOneQuery, "one query, head_dim 128", 1};
  const bool four = call.queries > 2 && has_four_query_kernel(call.has_codes, call.has_sketch) &&
                    call.four_query_bytes <= kDefaultSharedBytes;
  return {ScoreKernel::kGeneral, obstacle, four ? 2 : 1};
}

// ---- qjl_sketch -----------------------------------------------------------------------------------------------------

enum class SketchKernel {
  kDenseTiles,  // a dense projection, on tensor cores (cuda/score/dense_sketch.cu)
  kDense,       // a dense projection of any head_dim
  kBulk,        // many vectors, on tensor cores (cuda/score/sketch_bulk.cu)
  kLanes,       // a few lanes per vector, which stays in registers
  kGeneral,     // any head_dim
};

struct SketchFacts {
  bool dense;
  int64_t head_dim, vectors;
  Dtype dtype;
};

struct SketchChoice {
  SketchKernel kernel;
  const char* reason;
};

// What kBulk and kLanes are compiled for.
constexpr int kSketchBulkDims[] = {64, 128, 256};
constexpr int kSketchLaneDims[] = {64, 80, 96, 112, 128, 160, 192, 256, 512, 576};

// A warp of kBulk takes 16 vectors at a time, the rows of a product; with fewer than one such batch per warp of one
// block on each multiprocessor the other kernels are faster.
constexpr int kSketchBulkVectors = 16, kSketchBulkWarps = 4;

template <int N>
constexpr bool is_one_of(const int (&dims)[N], int64_t d) {
  for (const int dim : dims) {
    if (dim == d) return true;
  }
  return false;
}

constexpr SketchChoice choose_sketch(const SketchFacts& call, const DeviceFacts& device) {
  if (call.dense) {
    if (device.major < 8) return {SketchKernel::kDense, "compute capability below 8.0"};
    if (call.head_dim % 8 != 0) return {SketchKernel::kDense, "head_dim is not a multiple of 8"};
    return {SketchKernel::kDenseTiles, "the projection is dense"};
  }
  if (!is_one_of(kSketchLaneDims, call.head_dim)) {
    return {SketchKernel::kGeneral, "the other kernels are not compiled for this head_dim"};
  }
  const auto lanes = [](const char* reason) { return SketchChoice{SketchKernel::kLanes, reason}; };
  if (!is_one_of(kSketchBulkDims, call.head_dim)) return lanes("head_dim is not 64, 128 or 256");
  if (call.dtype == Dtype::kFloat32) return lanes("vectors are float32");
  if (device.major < 8) return lanes("compute capability below 8.0");
  const int64_t batches = (call.vectors + kSketchBulkVectors - 1) / kSketchBulkVectors;
  if (batches < int64_t{device.multiprocessors} * kSketchBulkWarps) return lanes("too few vectors to fill the device");
  return {SketchKernel::kBulk, "many 16-bit vectors"};
}

}  // namespace turboquant
