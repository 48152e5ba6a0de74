// Calls of query_energy and learn_center: checks of their arguments, and the constants of the rule, which both backends
// share.
#pragma once

#include "checks.h"

namespace turboquant {

constexpr int kPriorTokens = 8;          // tokens of average channels that count besides the tokens of the prompt
constexpr float kMeanInVariance = 0.5f;  // RoPE turns later keys, so that this share of the squared mean varies
constexpr int64_t kMostLayerDim = 1024;  // channels
constexpr int64_t kMostLayerHeads = 65535;
constexpr int kMean = 0, kScale = 1, kInverse = 2, kCenterParts = 3;  // of a center with scales

// Queries or keys of layers that are alike, without the first tokens of every sequence.
struct LayerVectors {
  int64_t layers, batch, heads, tokens, d;
};

// x: for every layer [batch, heads, tokens, d], strides as they are but 1 in the last dimension
inline LayerVectors check_layers(const std::vector<Tensor>& x, const char* name, int64_t skip) {
  STD_TORCH_CHECK(!x.empty(), name, " has no layers");
  const Tensor& first = x[0];
  check_float(first, name);
  check_shape(first, name, {-1, -1, -1, -1});
  for (const Tensor& t : x) {
    check_device(t, first, name);
    check_dtype(t, name, {first.scalar_type()});
    check_shape(t, name, {first.size(0), first.size(1), first.size(2), first.size(3)});
    check_unit_last_stride(t, name);
  }
  const int64_t batch = first.size(0), heads = first.size(1), tokens = first.size(2), d = first.size(3);
  const bool fits = batch >= 1 && tokens >= 1 && heads >= 1 && heads <= kMostLayerHeads && d >= 1;
  STD_TORCH_CHECK(fits && d <= kMostLayerDim, name, " has shape ", shape_text(first),
                  ", supported: [batch, heads, tokens, d] of one sequence and token or more, with 1 to ",
                  kMostLayerHeads, " heads and d from 1 to ", kMostLayerDim);
  STD_TORCH_CHECK(skip >= 0 && skip < tokens, "skip is ", skip, ", supported for the ", tokens, " tokens of ", name,
                  ": 0 to tokens - 1");
  return {static_cast<int64_t>(x.size()), batch, heads, tokens - skip, d};
}

// Returns the query heads of a KV head.
inline int64_t check_query_group(const LayerVectors& queries, int64_t kv_heads) {
  STD_TORCH_CHECK(kv_heads >= 1 && queries.heads % kv_heads == 0, "kv_heads is ", kv_heads,
                  ", supported: divisors of the ", queries.heads, " query heads");
  return queries.heads / kv_heads;
}

// energies: of every layer float32 [heads, d], or none; partners: int64 [d], with energies only
inline void check_energies(const std::vector<Tensor>& energies, const OptionalTensor& partners, const Tensor& first,
                           const LayerVectors& shape) {
  STD_TORCH_CHECK(energies.empty() || static_cast<int64_t>(energies.size()) == shape.layers, "energies are of ",
                  energies.size(), " layers, keys of ", shape.layers);
  STD_TORCH_CHECK(energies.empty() != partners.has_value(), "energies and partners belong together");
  for (const Tensor& t : energies) check_constant(t, first, "energies", ScalarType::Float, {shape.heads, shape.d});
  if (partners) check_constant(*partners, first, "partners", ScalarType::Long, {shape.d});
}

}  // namespace turboquant
