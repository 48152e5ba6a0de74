// What linear_packed and linear_experts share: a weight as kernels take it, and memory for activations.
#pragma once

#include <algorithm>
#include <iterator>

#include "calls/linear.h"
#include "cpu/codec/codebook.h"
#include "cpu/common/torch.h"
#include "cpu/linear/map.h"

namespace turboquant::cpu {

inline WeightBlocks blocks_of(const WeightShape& shape) {
  return {.block = shape.block, .n = shape.n, .groups = shape.groups()};
}

// Weights of one shape and codebook, whose constants are made once.
class ProductWeights {
 public:
  ProductWeights(const WeightShape& shape, const Levels& levels) : map_(shape.block) {
    weight_ = {.blocks = blocks_of(shape), .packed = nullptr, .levels = {}, .channels = map_.get()};
    std::copy(std::begin(levels.of), std::end(levels.of), weight_.levels);
  }
  ProductWeights(const ProductWeights&) = delete;  // weight_ points to map_

  // packed: [tiles, groups, block_bytes]; null where only activations are prepared
  LinearWeight of(const uint8_t* packed) const {
    LinearWeight weight = weight_;
    weight.packed = packed;
    return weight;
  }

 private:
  const LinearMap map_;
  LinearWeight weight_;
};

// Bytes of a token's integers in all groups.
inline int64_t input_bytes(const WeightShape& shape) {
  return shape.groups() * kernels().linear_factor_bytes(shape.block);
}

// As many tokens at once as have their integers in a cache of middle size, where all tiles read them.
inline int64_t tokens_at_once(const WeightShape& shape, int64_t tokens) {
  constexpr int64_t kCacheBytes = 512 << 10;
  const int64_t fit = std::max<int64_t>(1, kCacheBytes / input_bytes(shape) / kLinearTokens) * kLinearTokens;
  return std::min(tokens, fit);
}

// Memory for the integers and units of `tokens` tokens.
class InputMemory {
 public:
  InputMemory(const WeightShape& shape, int64_t tokens)
      : token_bytes_(input_bytes(shape)), groups_(shape.groups()), factors_(tokens * token_bytes_),
        units_(tokens * groups_ * static_cast<int64_t>(sizeof(float))) {}

  // The part of it for `count` tokens from `first` on.
  LinearInputs part(int64_t first, int64_t count) const {
    return {.count = count,
            .factors = factors_.as<uint8_t>() + first * token_bytes_,
            .unit = units_.as<float>() + first * groups_};
  }

 private:
  const int64_t token_bytes_, groups_;
  const Scratch factors_, units_;
};

}  // namespace turboquant::cpu
