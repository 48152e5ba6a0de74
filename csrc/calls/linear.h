// Calls of weight_encode, weight_pack, weight_unpack, weight_decode, linear_packed and linear_experts: their arguments
// and their checks, which both backends share. A weight is a matrix [n, k] (outputs, inputs) in blocks (docs/format.md
// section 13).
#pragma once

#include <string>
#include <tuple>

#include "calls/boxed.h"
#include "checks.h"
#include "memory.h"

namespace turboquant {

// The arguments of weight_encode in the order of its schema (csrc/ops.cpp).
struct WeightEncodeCall {
  Tensor w;               // [n, k], stride 1 in k
  Tensor signs;           // float32 [group]
  OptionalTensor levels;  // int8 [2^bits]; absent: the uniform grid
  Tensor steps;           // float32 [S]
  int64_t bits, sub;
  OptionalTensor channel_scale;  // float32 [k]
};

// The arguments of weight_pack in the order of its schema.
struct WeightPackCall {
  Tensor codes;                // uint8 [n, k]
  Tensor scale;                // float16 [n, k / group]
  OptionalTensor multipliers;  // uint8 [n, k / 32]
  int64_t bits;
};

// The arguments of weight_unpack in the order of its schema.
struct WeightUnpackCall {
  Tensor packed;  // uint8 [tiles, k / group, block_bytes]
  int64_t n, group, bits, sub;
};

// The arguments of weight_decode in the order of its schema.
struct WeightDecodeCall {
  Tensor packed;          // uint8 [tiles, k / group, block_bytes]
  Tensor signs;           // float32 [group]
  OptionalTensor levels;  // int8 [2^bits]; absent: the uniform grid
  int64_t n, bits, sub;
  ScalarType dtype;                // of the result
  OptionalTensor channel_inverse;  // float32 [k]
};

// The arguments of linear_packed in the order of its schema.
struct LinearCall {
  Tensor x;               // [..., k], stride 1 in k
  Tensor packed;          // uint8 [tiles, k / group, block_bytes]
  Tensor signs;           // float32 [group]
  OptionalTensor levels;  // int8 [2^bits]; absent: the uniform grid
  int64_t n, bits, sub;
  OptionalTensor channel_inverse;  // float32 [k]
  OptionalTensor bias;             // [n] of x's dtype
};

// The arguments of linear_experts in the order of its schema.
struct ExpertsCall {
  Tensor x;               // [tokens, k], stride 1 in k
  Tensor packed;          // uint8 [experts, tiles, k / group, block_bytes]
  Tensor experts;         // int64 [tokens, choices]
  Tensor signs;           // float32 [group]
  OptionalTensor levels;  // int8 [2^bits]; absent: the uniform grid
  int64_t n, bits, sub;
  OptionalTensor bias;  // [experts, n] of x's dtype
};

// A weight whose tensors have been checked.
struct WeightShape {
  int64_t n, k;
  format::WeightBlock block;

  int64_t group() const { return block.group; }
  int64_t groups() const { return k / block.group; }  // of a row
  int64_t tiles() const { return format::weight_tiles(n); }
  int64_t block_bytes() const { return block.block_bytes(); }
  int64_t subs() const { return block.sub ? k / block.sub : 0; }  // multipliers of a row
  std::vector<int64_t> packed() const { return {tiles(), groups(), block_bytes()}; }
};

// ---- checks: shapes, dtypes and devices -----------------------------------------------------------------------------

inline format::WeightBlock check_weight_block(int64_t group, int64_t bits, int64_t sub) {
  STD_TORCH_CHECK(format::valid_weight_group(group), "group is ", group, ", supported for weights: 64, 128");
  STD_TORCH_CHECK(format::valid_weight_bits(bits), "bits is ", bits, ", supported for weights: 4, 8");
  STD_TORCH_CHECK(format::valid_weight_sub(format::as_width(bits), sub), "sub is ", sub, ", supported at ", bits,
                  " bits: ", format::valid_weight_sub(format::as_width(bits), format::kSubChannels) ? "0, 32" : "0");
  return {static_cast<int>(group), static_cast<int>(bits), static_cast<int>(sub)};
}

// signs: float32 [group]. Returns group.
inline int64_t check_weight_signs(const Tensor& signs, const Tensor& first) {
  check_constant(signs, first, "signs", ScalarType::Float, {-1});
  const int64_t group = signs.size(0);
  STD_TORCH_CHECK(format::valid_weight_group(group), "signs has ", group,
                  " channels, supported: 64 or 128, the group of the weight");
  return group;
}

// Bounds the sizes of a weight, so that no offset overflows. name: of the tensor that has them
inline WeightShape check_weight_size(int64_t n, int64_t k, const format::WeightBlock& block, const char* name) {
  STD_TORCH_CHECK(n >= 0 && n <= format::kMaxWeightRows, name, " has ", n, " rows, supported: 0 to ",
                  format::kMaxWeightRows);
  STD_TORCH_CHECK(k >= block.group && k % block.group == 0 && k / block.group <= format::kMaxWeightGroups, name,
                  " has ", k, " channels, supported: multiples of the group of ", block.group, " up to ",
                  int64_t{format::kMaxWeightGroups} * block.group);
  return {n, k, block};
}

// packed: uint8 [tiles, groups, block_bytes], contiguous, of a weight of n rows; several: [experts, ...]
inline WeightShape check_packed_weight(const Tensor& packed, const Tensor& first, int64_t n, int64_t group,
                                       int64_t bits, int64_t sub, bool several = false) {
  const format::WeightBlock block = check_weight_block(group, bits, sub);
  check_device(packed, first, "packed");
  check_dtype(packed, "packed", {ScalarType::Byte});
  if (several) {
    check_shape(packed, "packed", {-1, -1, -1, block.block_bytes()});
  } else {
    check_shape(packed, "packed", {-1, -1, block.block_bytes()});
  }
  check_contiguous(packed, "packed");
  const int64_t groups = packed.size(several + 1), tiles = packed.size(several);
  STD_TORCH_CHECK(groups >= 1 && groups <= format::kMaxWeightGroups, "packed has ", groups,
                  " groups of channels, supported: 1 to ", format::kMaxWeightGroups);
  const WeightShape shape = check_weight_size(n, groups * group, block, "the weight");
  STD_TORCH_CHECK(tiles == shape.tiles(), "packed has ", tiles, " tiles of ", format::kWeightRows, " rows, but n is ",
                  n, ", which takes ", shape.tiles());
  return shape;
}

inline void check_channels(const OptionalTensor& t, const Tensor& first, const char* name, int64_t k) {
  if (t) check_constant(*t, first, name, ScalarType::Float, {k});
}

// Checks all but levels and steps.
inline WeightShape check_weight_encode(const WeightEncodeCall& c) {
  check_float(c.w, "w");
  check_shape(c.w, "w", {-1, -1});
  check_unit_last_stride(c.w, "w");
  const format::WeightBlock block = check_weight_block(check_weight_signs(c.signs, c.w), c.bits, c.sub);
  const WeightShape shape = check_weight_size(c.w.size(0), c.w.size(1), block, "w");
  check_channels(c.channel_scale, c.w, "channel_scale", shape.k);
  return shape;
}

inline WeightShape check_weight_pack(const WeightPackCall& c) {
  check_dtype(c.codes, "codes", {ScalarType::Byte});
  check_shape(c.codes, "codes", {-1, -1});
  check_contiguous(c.codes, "codes");
  const int64_t n = c.codes.size(0), k = c.codes.size(1);
  check_constant(c.scale, c.codes, "scale", ScalarType::Half, {n, -1});
  const int64_t groups = c.scale.size(1);
  STD_TORCH_CHECK(groups >= 1 && k % groups == 0 && format::valid_weight_group(k / groups), "codes has shape ",
                  shape_text(c.codes), " and scale ", shape_text(c.scale),
                  ", supported: a scale for every 64 or every 128 codes of a row");
  const format::WeightBlock block = check_weight_block(k / groups, c.bits, c.multipliers ? format::kSubChannels : 0);
  const WeightShape shape = check_weight_size(n, k, block, "codes");
  if (c.multipliers) check_constant(*c.multipliers, c.codes, "multipliers", ScalarType::Byte, {n, shape.subs()});
  return shape;
}

inline WeightShape check_weight_unpack(const WeightUnpackCall& c) {
  check_defined(c.packed, "packed");
  return check_packed_weight(c.packed, c.packed, c.n, c.group, c.bits, c.sub);
}

// Checks all but levels.
inline WeightShape check_weight_decode(const WeightDecodeCall& c) {
  check_defined(c.packed, "packed");
  check_output_dtype(c.dtype);
  const int64_t group = check_weight_signs(c.signs, c.packed);
  const WeightShape shape = check_packed_weight(c.packed, c.packed, c.n, group, c.bits, c.sub);
  check_channels(c.channel_inverse, c.packed, "channel_inverse", shape.k);
  return shape;
}

// Checks all but levels.
inline WeightShape check_linear(const LinearCall& c) {
  check_float(c.x, "x");
  check_unit_last_stride(c.x, "x");
  const int64_t group = check_weight_signs(c.signs, c.x);
  const WeightShape shape = check_packed_weight(c.packed, c.x, c.n, group, c.bits, c.sub);
  STD_TORCH_CHECK(c.x.size(c.x.dim() - 1) == shape.k, "x has shape ", shape_text(c.x), ", expected [..., ", shape.k,
                  "] for the ", shape.groups(), " groups of the weight");
  check_channels(c.channel_inverse, c.x, "channel_inverse", shape.k);
  if (c.bias) check_constant(*c.bias, c.x, "bias", float_type_of(c.x), {shape.n});
  return shape;
}

// A packed weight for each expert.
struct ExpertsShape {
  WeightShape weight;
  int64_t tokens, choices, experts;

  int64_t pairs() const { return tokens * choices; }  // of a token and an expert
  int64_t weight_bytes() const { return weight.tiles() * weight.groups() * weight.block_bytes(); }
};

// Checks all but levels.
inline ExpertsShape check_experts(const ExpertsCall& c) {
  check_float(c.x, "x");
  check_shape(c.x, "x", {-1, -1});
  check_unit_last_stride(c.x, "x");
  const int64_t group = check_weight_signs(c.signs, c.x);
  const WeightShape shape = check_packed_weight(c.packed, c.x, c.n, group, c.bits, c.sub, true);
  STD_TORCH_CHECK(c.x.size(1) == shape.k, "x has shape ", shape_text(c.x), ", expected [any, ", shape.k, "] for the ",
                  shape.groups(), " groups of the weight");
  const int64_t tokens = c.x.size(0), experts = c.packed.size(0);
  STD_TORCH_CHECK(experts >= 1, "packed has no experts");
  check_constant(c.experts, c.x, "experts", ScalarType::Long, {tokens, -1});
  if (c.bias) check_constant(*c.bias, c.x, "bias", float_type_of(c.x), {experts, shape.n});
  return {shape, tokens, c.experts.size(1), experts};
}

// ---- results --------------------------------------------------------------------------------------------------------

inline Tensor new_packed_weight(const Tensor& like, const WeightShape& shape) {
  return new_tensor(like, shape.packed(), ScalarType::Byte, "a packed weight");
}

// What weight_unpack returns: codes uint8 [n, k], scale float16 [n, groups], multipliers uint8 [n, subs]
inline std::tuple<Tensor, Tensor, Tensor> new_unpacked_weight(const Tensor& like, const WeightShape& shape) {
  return {new_tensor(like, {shape.n, shape.k}, ScalarType::Byte, "codes"),
          new_tensor(like, {shape.n, shape.groups()}, ScalarType::Half, "scales"),
          new_tensor(like, {shape.n, shape.subs()}, ScalarType::Byte, "multipliers")};
}

inline Tensor new_linear_result(const LinearCall& c, const WeightShape& shape) {
  return new_tensor(c.x, leading_shape(c.x, 1, {shape.n}), float_type_of(c.x), "the result");
}

inline Tensor new_experts_result(const ExpertsCall& c, const ExpertsShape& shape) {
  return new_tensor(c.x, {shape.tokens, shape.choices, shape.weight.n}, float_type_of(c.x), "the result");
}

}  // namespace turboquant
