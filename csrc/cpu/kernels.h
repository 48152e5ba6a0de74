// The seam between the ops, compiled for any machine, and the kernels, compiled once per instruction set ("level"): plain
// structs and function pointers, no torch. A level is chosen once, by what the processor can do.
//
// Only data here: a function defined in this file would be compiled for every level under one name, and the linker could
// keep the AVX-512 copy for a machine without it.
#pragma once

#include <cstdint>

#include "../format.h"

namespace turboquant::cpu {

// ---- attention ---------------------------------------------------------------------------------------------------

constexpr int kBlockTokens = 128;  // keys that share one running maximum and one unit of their weights
constexpr int kGroupTokens = 16;   // tokens of a value block, and keys scored at once

// Value blocks as panels of 64 bytes: 16 words of codes, each of four tokens. Derived from format.h by value_panels().
struct ValuePanels {
  int panels;              // of a block (after three-bit codes became nibbles)
  int patterns;            // how many different orders of token quads there are
  const int32_t* quads;    // [patterns, 16]: which quad of tokens a word belongs to
  const int32_t* pattern;  // [panels]
  int fields;              // codes of a byte
  const int32_t* words;    // [head_dim, 4]: the words of the sums, [panels, fields, 16], that make up a channel
};

// What all work of a paged_attention call shares.
struct PagedKeys {
  format::Record record;
  ValuePanels panels;
  const uint8_t* pages;  // [num_pages, kv_heads, record_bytes]
  int64_t kv_heads;
  int8_t key_levels[32];    // of codes up to 5 bits; 8-bit codes are levels
  int8_t value_levels[16];  // of codes up to 4 bits
  float soft_cap;           // 0: none
};

// Queries that share keys: one KV head, all its query heads and new tokens.
struct QueryRows {
  int count;
  const void* factors;        // [count, query_factor_bytes]: rotated queries as integers
  const float* unit;          // [count]: what an integer stands for, times softmax_scale / 32
  const int32_t* correction;  // [count]
  const float* shift;         // [count]: softmax_scale * (q . center)
  const int64_t* first;       // [count]: attends to packed keys first .. end - 1
  const int64_t* end;
};

// The softmax of some keys in progress: sums are relative to the greatest logit so far.
struct PartialRows {
  float* max;   // [count]
  float* sum;   // [count]
  float* sums;  // [count, stride]: of weighted values
  int64_t stride;
};

// The exact keys of the same queries: rows of the tail.
struct ExactKeys {
  const void* tail;  // [rows, 2, d] of one sequence and KV head
  int dtype;         // 0 float32, 1 float16, 2 bfloat16
  int64_t d, sink_tokens, ring;
  const float* q;         // [count, d], plain
  const int64_t* first;   // [count]
  const int64_t* sinks;   // [count]: attends to exact keys first .. sinks - 1
  const int64_t* recent;  // [count]: and recent .. position
  const int64_t* position;
};

// ---- score and qjl -----------------------------------------------------------------------------------------------

constexpr int kBitString = 16;  // plus 1, 3 or 5: the layout of rows that are bit strings; other layouts are the width

// Rows of codes, each with a scale: standalone vectors, or sign bits with the lengths of their residuals.
struct DenseRows {
  const uint8_t* rows;  // [count, row_bytes]
  int64_t row_bytes;
  const uint8_t* end;  // of the memory that may be read
  int d;
  int layout;
  int8_t levels[32];           // of codes up to 5 bits
  const uint16_t* half_scale;  // [count]: float16, or null for
  const float* scale;          // [count]
};

struct ScoreQueries {
  int count;
  const void* factors;        // [count, query_factor_bytes]
  const float* unit;          // [count]: what an integer stands for, times what a level stands for
  const int32_t* correction;  // [count]
  const float* shift;         // [count]: added to every score
};

struct Scores {
  float* scores;   // [queries, stride]
  int64_t stride;  // keys of the whole row
  bool add;        // to what is there
};

constexpr int kQueryMargin = 128;  // of query_factors' scratch

struct Kernels {
  const char* level;

  // Bytes of the integers of one query that meets packed keys of `bits` (a layout), a multiple of 64.
  int64_t (*query_factor_bytes)(int d, int bits);
  // q: [d], rotated -> its integers; returns their unit, 0 for a zero query, NaN for one with a NaN or an infinity.
  // scratch: int16 [d + kQueryMargin]
  float (*query_factors)(const float* q, int d, int bits, int max_level, void* factors, int32_t* correction,
                         int16_t* scratch);

  int64_t (*attend_scratch_bytes)(const PagedKeys& keys);
  // Adds keys [begin, end) of a sequence; begin is a multiple of kBlockTokens. block_table: the sequence's row.
  // out.sums: [count, panels * fields * 16], words of the panels' lanes.
  void (*attend_pages)(const PagedKeys& keys, const int32_t* block_table, int64_t kv_head, int64_t begin, int64_t end,
                       const QueryRows& rows, const PartialRows& out, void* scratch);
  // out.sums: [count, d]; scratch: float [32, d]
  void (*attend_exact)(const ExactKeys& keys, int count, float softmax_scale, float soft_cap, const PartialRows& out,
                       float* scratch);

  // out.scores[i, key] for keys [begin, end) = integer product * unit[i] * scale[key] + shift[i].
  // scratch: [16 * row_bytes + 64]
  void (*score_rows)(const DenseRows& keys, int64_t begin, int64_t end, const ScoreQueries& queries, const Scores& out,
                     uint8_t* scratch);

  // out[i] = matrix[i] . x by the fixed tree. matrix: [rows, d]
  void (*project)(const float* matrix, int64_t rows, format::Split split, const float* x, float* out);
  // Bit i: x[i] >= 0. x: [count], a multiple of 8
  void (*sign_bits)(const float* x, int64_t count, uint8_t* bits);
};

// The level in use. Chosen at the first call.
const Kernels& kernels();

}  // namespace turboquant::cpu
