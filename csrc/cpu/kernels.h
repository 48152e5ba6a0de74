// The seam between the ops, compiled for any machine, and the kernels, compiled once per instruction set ("level"):
// plain structs and function pointers, no torch. A level is chosen once, by what the processor can do.
//
// This file has data only, and functions that are always inlined. Any other function would be compiled for every level
// under one name, and the linker could keep the AVX-512 copy for a machine without it.
#pragma once

#include <cstdint>

#include "cpu/layout.h"
#include "dtype.h"
#include "format.h"

namespace turboquant::cpu {

// Levels of a table, whatever its width, and nodes of a search tree over its boundaries. Kernels read all of them.
constexpr int kTableLevels = 1 << format::num_bits(format::kWidestTable);
constexpr int kTreeNodes = 64;

// ---- attention ---------------------------------------------------------------------------------------------------

constexpr int kBlockTokens = 128;  // keys that share one running maximum and one unit of their weights
constexpr int kGroupTokens = 16;   // tokens of a value block, and keys scored at once
constexpr int kMaxPatterns = 8;    // of ValuePanels

// Value blocks as panels of 64 bytes: 16 words of codes, each of four tokens. PanelMap (attention/panels.h) derives
// them from format.h.
struct ValuePanels {
  int panels;              // of a block, in which spread codes are nibbles by now
  int patterns;            // the number of different orders of token quads, up to kMaxPatterns
  const int32_t* quads;    // [patterns, 16]: the quad of tokens that a word belongs to
  const int32_t* pattern;  // [panels]
  int fields;              // codes of a byte
  const int32_t* words;    // [head_dim, 4]: the words of the sums, [panels, fields, 16], that make up a channel
};

// What attention must know of keys and values, wherever they lie.
struct AttendedKeys {
  int head_dim;
  ValuePanels panels;
  int8_t key_levels[kTableLevels];    // unless codes are levels
  int8_t value_levels[kTableLevels];  // unless codes are levels
  float soft_cap;                     // 0: none
  int rope_dim;                       // raw channels beside the codes; 0: none
  float rope_factor;                  // of their share of a score
};

// All work of a paged_attention call shares this.
struct PagedKeys {
  format::Record record;
  AttendedKeys attended;
  const uint8_t* pages;  // [num_pages, kv_heads, record_bytes]
  int64_t page_stride;   // in bytes
};

// All work of an mla_attention call shares this. The values are the latents, whose levels have panels of their own
// (LatentPanelMap): bytes, of which 16 neighbouring channels of four tokens are a panel.
struct LatentKeys {
  format::LatentRecord record;
  AttendedKeys attended;
  const uint8_t* pages;  // [num_pages, record_bytes]
  int64_t page_stride;   // in bytes
  Dtype rope_dtype;
};

// Queries that share keys: one KV head, all its query heads and new tokens.
struct QueryRows {
  int count;
  const void* factors;        // [count, query_factor_bytes]: rotated queries as integers
  const float* unit;          // [count]: the value of an integer of 1, times softmax_scale / 32
  const int32_t* correction;  // [count]
  const float* shift;         // [count]: softmax_scale * (q . center)
  const float* rope;          // [count, rope_dim], rope_stride floats apart; not read without such channels
  int64_t rope_stride;
  const int64_t* first;  // [count]: attends to packed keys first .. end - 1
  const int64_t* end;
};

// The softmax of some keys in progress: sums are relative to the greatest logit so far.
struct PartialRows {
  float* max;   // [count]
  float* sum;   // [count]
  float* sums;  // [count, stride]: of weighted values
  int64_t stride;
};

// Where the attention mass of one sequence's keys for one KV head is added up, and the queries' softmax denominators.
struct MassRows {
  const float* lse;  // [count]: their natural logarithms; -inf: the query adds nothing
  float* mass;       // [keys]
  int64_t keys;
};

// The exact keys of the same queries: rows of the tail before position `new_begin`, and from there on the call's own
// tokens.
struct ExactKeys {
  const void* tail;                 // [rows, tail_row] of one sequence and KV head
  int64_t tail_row, tail_value_at;  // elements of a row, which begins with a key, and where its value begins
  const void* new_keys;
  const void* new_values;
  int64_t new_begin, new_key_stride, new_value_stride;  // from token to token, in elements
  Dtype dtype;
  int64_t key_dim, value_dim, sink_tokens, ring;
  const float* q;         // [count, key_dim], plain
  const int64_t* first;   // [count]
  const int64_t* sinks;   // [count]: attends to exact keys first .. sinks - 1
  const int64_t* recent;  // [count]: and recent .. position
  const int64_t* position;
};

// ---- Vectors -------------------------------------------------------------------------------------------------------

// Rows of d channels to rotate: `stride` elements apart, written one after the other.
struct HadamardRows {
  Dtype dtype;
  int64_t count, stride;
  format::Split split;
  const float* signs;  // [d]
  bool inverse;
};

// An encoder's arguments besides the rotation (docs/format.md sections 4 and 5).
struct Quantiser {
  format::Width width;
  format::ScaleMode scale_mode;
  int num_steps;
  const float* steps;  // [num_steps]
  // [num_steps, kTreeNodes]: of codes with a table, in units of 2^-8 sigma, as search trees: the children of node k =
  // 1, 2, .. are nodes 2k and 2k + 1.
  const int16_t* boundaries;
  const int8_t* levels;      // [kTableLevels]
  float units, over, times;  // float32 of 4096 sqrt(d), 32 / sqrt(d), 32 sqrt(d)
};

struct EncodeRows {
  const void* x;  // [count, d], rows `stride` elements apart
  Dtype dtype;
  int64_t count, stride;
  format::Split split;
  const float* signs;         // [d]
  format::Channels channels;  // [d]
};

struct DecodeRows {
  const uint8_t* packed;  // [count, row_bytes]
  const uint16_t* scale;  // [count]
  int64_t count;
  format::Width width;
  const int8_t* levels;  // [kTableLevels], unless codes are levels
  format::Split split;
  const float* signs;         // [d]
  format::Channels channels;  // [d]
  Dtype dtype;                // of the output
};

// Rows of quantisation groups (affine).
struct GroupRows {
  Dtype dtype;
  int group, bits;
  int64_t count, d;
};

// ---- Cache ----------------------------------------------------------------------------------------------------------

// All work of a cache_store call shares this. An item is a token of a KV head.
struct StoredTokens {
  struct Kind {                         // keys or values
    const void* x;                      // [tokens, kv_heads, d]
    int64_t token_stride, head_stride;  // in elements
    const float* signs;                 // [d]
    Quantiser quantiser;
  };
  format::Record record;
  Kind keys, values;
  format::Channels channels;  // [kv_heads, d] of keys
  Dtype dtype;
  uint8_t* pages;       // [num_pages, kv_heads, record_bytes]
  int64_t page_stride;  // in bytes
  int64_t kv_heads;
  const int64_t* slots;  // [tokens]
};

// All work of a cache_load call shares this. An item is a KV head of a token of a sequence.
struct LoadedTokens {
  format::Record record;
  const uint8_t* pages;        // [num_pages, kv_heads, record_bytes]
  int64_t page_stride;         // in bytes
  const int32_t* block_table;  // [seqs, max_pages]
  int64_t table_stride;        // from one row to the next
  const int64_t* lengths;      // [seqs]
  int64_t kv_heads, max_seq_len;
  const int8_t* key_levels;    // [kTableLevels], unless codes are levels
  const int8_t* value_levels;  // the same
  const float* key_signs;      // [d]
  const float* value_signs;
  format::Channels channels;  // [kv_heads, d] of keys
  Dtype dtype;                // of the output
};

// All work of an mla_store call shares this. An item is a token.
struct StoredLatents {
  format::LatentRecord record;
  const void* latent;  // rows of latent_dim elements, latent_stride apart
  const void* rope;    // rows of rope_dim elements, rope_stride apart
  int64_t latent_stride, rope_stride;
  Dtype dtype, rope_dtype;  // of the tensors, of the raw channels in a record
  const float* signs;       // [latent_dim]; null: no rotation
  Quantiser quantiser;
  format::Channels channels;  // [latent_dim]
  uint8_t* pages;             // [num_pages, record_bytes]
  int64_t page_stride;        // in bytes
  const int64_t* slots;       // [tokens]
};

// All work of an mla_load call shares this. An item is a token of a sequence.
struct LoadedLatents {
  format::LatentRecord record;
  const uint8_t* pages;        // [num_pages, record_bytes]
  int64_t page_stride;         // in bytes
  const int32_t* block_table;  // [seqs, max_pages]
  int64_t table_stride;        // from one row to the next
  const int64_t* lengths;      // [seqs]
  int64_t max_seq_len;
  const int8_t* levels;       // [kTableLevels], unless codes are levels
  const float* signs;         // [latent_dim]; null: no rotation
  format::Channels channels;  // [latent_dim]
  Dtype rope_dtype, dtype;    // of the raw channels in a record, of the output
};

// ---- score and qjl -----------------------------------------------------------------------------------------------

// Rows of codes, each with a scale: standalone vectors, or sign bits with the lengths of their residuals.
struct DenseRows {
  const uint8_t* rows;  // [count, row_bytes]
  int64_t row_bytes;
  const uint8_t* end;  // of the memory that may be read
  int d;
  format::Width width;
  int8_t levels[kTableLevels];  // unless codes are levels
  const uint16_t* half_scale;   // [count]: float16, or null for
  const float* scale;           // [count]
};

struct ScoreQueries {
  int count;
  const void* factors;        // [count, query_factor_bytes]
  const float* unit;          // [count]: the value of an integer of 1, times that of a level of 1
  const int32_t* correction;  // [count]
  const float* shift;         // [count]: added to every score
};

struct Scores {
  float* scores;   // [queries, stride]
  int64_t stride;  // keys of the whole row
  bool add;        // to what is there
};

// What became of a vector that was divided by a power of two, so that no sum of its squares over- or underflows.
struct Prescaled {
  float length;  // after the division; NaN if it had a NaN or an infinity: its channels are zeros now
  float up;      // the power of two
};

// A dense projection as the estimates of sketches take it. Sixteen rows are the lanes of a vector.
constexpr int kPanelRows = 16;
struct SketchPanels {
  const float* matrix;  // [rows, d]
  int64_t rows;
  format::Split split;
  float* panels;  // [ceil(rows / 16), d, 16]; zeros where there are no rows
  float* bounds;  // [ceil(rows / 16), 16]: times a vector's length, how far from zero an estimated sum is trusted
};
constexpr int kSketchVectors = 12;  // vectors of estimates come in multiples of this

constexpr int kQueryMargin = 128;  // elements behind those of a query in the scratch of query_factors

// ---- linear --------------------------------------------------------------------------------------------------------

// Blocks of a weight [n, k]. Block number i is that of tile i / groups and group i % groups.
struct WeightBlocks {
  format::WeightBlock block;
  int64_t n, groups;
};

// An encoder's arguments for weights. With multipliers, `quantiser` has kMultiplierCodes steps for each candidate: the
// candidate times each multiplier.
struct WeightEncoder {
  WeightBlocks blocks;
  const void* w;  // [n, k]
  Dtype dtype;
  int64_t stride;              // of rows, in elements
  const float* signs;          // [group]
  const float* channel_scale;  // [k], or null
  Quantiser quantiser;
  float over;  // float32 of 512 / sqrt(group), for scales with multipliers
};

struct WeightDecoder {
  WeightBlocks blocks;
  const int8_t* levels;          // [kTableLevels], unless codes are levels
  const float* signs;            // [group]
  const float* channel_inverse;  // [k], or null
  Dtype dtype;                   // of the output
};

// Codes of a weight one by one, instead of in blocks.
struct WeightCodes {
  uint8_t* codes;        // [n, k]
  uint16_t* scale;       // [n, groups]
  uint8_t* multipliers;  // [n, k / 32]
};

// All work of a linear_packed call shares this.
struct LinearWeight {
  WeightBlocks blocks;
  const uint8_t* packed;        // [tiles, groups, block_bytes]
  int8_t levels[kTableLevels];  // unless codes are levels
  const uint8_t* channels;      // [2 group]: of the bytes of factors (LinearMap)
};

// Tokens that are multiplied with the weight at once.
constexpr int kLinearTokens = 32;

// Activations of `count` tokens as the integers that meet codes, group by group: [groups, count] each.
struct LinearInputs {
  int64_t count;
  void* factors;  // [groups, count, linear_factor_bytes]
  float* unit;    // [groups, count]: the value of an integer of 1
};

struct ActivationRows {
  const void* x;  // [count, k]
  Dtype dtype;
  int64_t count, stride;         // rows, and elements from one to the next
  const float* signs;            // [group]
  const float* channel_inverse;  // [k], or null
};

struct LinearOutputs {
  void* y;           // [count, n]
  const void* bias;  // [n], or null
  Dtype dtype;
};

struct Kernels {
  const char* level;

  // Elements of `dtype` to float32, and back.
  void (*to_float)(const void* x, Dtype dtype, int64_t count, float* out);
  void (*from_float)(const float* x, Dtype dtype, int64_t count, void* out);
  // out = by_a * a + by_b * b, all of `dtype`. What has a factor of 0 is not read.
  void (*add_scaled)(const void* a, float by_a, const void* b, float by_b, Dtype dtype, int64_t count, void* out);

  // x, out: rows of one dtype
  void (*hadamard)(const void* x, void* out, const HadamardRows& rows);
  // One vector in place, y: [d]
  void (*rotate)(float* y, const float* signs, format::Split split);
  void (*rotate_back)(float* y, const float* signs, format::Split split);

  // codes: [rows, d], packed: [rows, dense_row_bytes(d, bits)]
  void (*pack)(const uint8_t* codes, uint8_t* packed, int64_t rows, int64_t d, int bits);
  void (*unpack)(const uint8_t* packed, uint8_t* codes, int64_t rows, int64_t d, int bits);
  // Whether all codes are below 2^bits.
  bool (*codes_fit)(const uint8_t* codes, int64_t count, int bits);

  // packed: [rows, row_bytes], scale: [rows]
  void (*encode)(const EncodeRows& rows, const Quantiser& quantiser, uint8_t* packed, uint16_t* scale);
  // out: [rows, d]
  void (*decode)(const DecodeRows& rows, void* out);

  // scale, zero: [rows, d / group]
  void (*group_encode)(const GroupRows& rows, const void* x, int64_t stride, uint8_t* packed, uint16_t* scale,
                       uint16_t* zero);
  void (*group_decode)(const GroupRows& rows, const uint8_t* packed, const uint16_t* scale, const uint16_t* zero,
                       void* out);

  // Items [begin, end); those of slot -1 are left out.
  void (*store_tokens)(const StoredTokens& tokens, int64_t begin, int64_t end);
  // k, v: [items, d], zero behind the end of a sequence
  void (*load_tokens)(const LoadedTokens& tokens, int64_t begin, int64_t end, void* k, void* v);
  // The bytes that a token owns in its record, and nothing else. bytes: [record.token_bytes()]
  void (*take_token)(const format::Record& r, const uint8_t* record, int token, uint8_t* bytes);
  void (*put_token)(const format::Record& r, uint8_t* record, int token, const uint8_t* bytes);

  // Bytes of the integers of one query that meets rows of `layout`, a multiple of 64.
  int64_t (*query_factor_bytes)(int d, Layout layout);
  // q: [d], rotated -> its integers. Returns their unit, 0 for a zero query, NaN for one with a NaN or an infinity.
  // scratch: int16 [d + kQueryMargin]
  float (*query_factors)(const float* q, int d, Layout layout, int max_level, void* factors, int32_t* correction,
                         int16_t* scratch);

  int64_t (*attend_scratch_bytes)(const PagedKeys& keys);
  // Adds keys [begin, end) of a sequence; begin is a multiple of kBlockTokens. block_table: the sequence's row.
  // The queries' factors have key_layout(keys.record). out.sums: [count, panels * fields * 16], by lanes of the panels.
  void (*attend_pages)(const PagedKeys& keys, const int32_t* block_table, int64_t kv_head, int64_t begin, int64_t end,
                       const QueryRows& rows, const PartialRows& out, void* scratch);
  // out.sums: [count, value_dim]; scratch: float [16, key_dim + value_dim]
  void (*attend_exact)(const ExactKeys& keys, int count, float softmax_scale, float soft_cap, const PartialRows& out,
                       float* scratch);

  // Adds the weights of keys [begin, end) to their masses, as attend_pages attends to them.
  void (*mass_of_pages)(const PagedKeys& keys, const int32_t* block_table, int64_t kv_head, int64_t begin, int64_t end,
                        const QueryRows& rows, const MassRows& to, void* scratch);
  // scratch: float [16, key_dim]
  void (*mass_of_exact)(const ExactKeys& keys, int count, float softmax_scale, float soft_cap, const MassRows& to,
                        float* scratch);

  // Items [begin, end); those of slot -1 are left out.
  void (*store_latents)(const StoredLatents& tokens, int64_t begin, int64_t end);
  // latent: [items, latent_dim], rope: [items, rope_dim], zero behind the end of a sequence
  void (*load_latents)(const LoadedLatents& tokens, int64_t begin, int64_t end, void* latent, void* rope);
  int64_t (*attend_latents_scratch_bytes)(const LatentKeys& keys);
  // As attend_pages. The queries' factors have row_layout(keys.record.row()).
  void (*attend_latents)(const LatentKeys& keys, const int32_t* block_table, int64_t begin, int64_t end,
                         const QueryRows& rows, const PartialRows& out, void* scratch);

  // out.scores[i, key] for keys [begin, end) = integer product * unit[i] * scale[key] + shift[i].
  // scratch: [16 * row_bytes + 64]
  void (*score_rows)(const DenseRows& keys, int64_t begin, int64_t end, const ScoreQueries& queries, const Scores& out,
                     uint8_t* scratch);

  Prescaled (*prescale)(float* x, format::Split split);
  // out[i] = matrix[i] . x by the fixed tree. matrix: [rows, d]
  void (*project)(const float* matrix, int64_t rows, format::Split split, const float* x, float* out);
  // Bit i: x[i] >= 0. x: [count], a multiple of 8
  void (*sign_bits)(const float* x, int64_t count, uint8_t* bits);
  // Fills panels [begin, end) and their bounds.
  void (*sketch_panels)(const SketchPanels& panels, int64_t begin, int64_t end);
  // The bits that `project` and `sign_bits` would give. x: [count up to a multiple of kSketchVectors, d], where what
  // stands behind the last vector does not matter; length: [count], of these vectors; of NaN bits are 0.
  // bits: [count, rows / 8]
  void (*sketch_signs)(const SketchPanels& panels, const float* x, const float* length, int64_t count, uint8_t* bits);

  // Blocks [begin, end) of a weight. packed: of all blocks
  void (*encode_weight)(const WeightEncoder& encoder, int64_t begin, int64_t end, uint8_t* packed);
  // out: [n, k]
  void (*decode_weight)(const WeightDecoder& decoder, const uint8_t* packed, int64_t begin, int64_t end, void* out);
  void (*pack_weight)(const WeightBlocks& blocks, const WeightCodes& codes, int64_t begin, int64_t end,
                      uint8_t* packed);
  void (*unpack_weight)(const WeightBlocks& blocks, const uint8_t* packed, int64_t begin, int64_t end,
                        const WeightCodes& codes);

  // Bytes of the integers of one token and group.
  int64_t (*linear_factor_bytes)(const format::WeightBlock& block);
  // Rows first .. first + rows.count - 1 of the inputs. rows.x: of the first of them
  void (*linear_inputs)(const LinearWeight& weight, const ActivationRows& rows, const LinearInputs& inputs,
                        int64_t first);
  // Tiles [begin, end) of the weight times all inputs.
  void (*linear_tiles)(const LinearWeight& weight, const LinearInputs& inputs, int64_t begin, int64_t end,
                       const LinearOutputs& outputs);
};

// The level in use. Chosen at the first call.
const Kernels& kernels();

}  // namespace turboquant::cpu
