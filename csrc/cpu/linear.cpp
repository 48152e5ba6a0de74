// weight_encode, weight_pack, weight_unpack, weight_decode: weights of linear layers in blocks; linear_packed: products
// with them, linear_experts: with those that a router has chosen for each token (docs/format.md section 13).
#include "calls/linear.h"

#include <atomic>
#include <cmath>

#include "cpu/codec/codebook.h"
#include "cpu/common/torch.h"
#include "cpu/linear/map.h"

namespace turboquant::cpu {
namespace {

WeightBlocks blocks_of(const WeightShape& shape) {
  return {.block = shape.block, .n = shape.n, .groups = shape.groups()};
}

// Blocks that are worth a thread when one code costs `work`.
int64_t block_grain(const WeightShape& shape, int64_t work) {
  return row_grain(shape.group() * format::kWeightRows, work);
}

// The steps of an encoder: the candidates, or with multipliers each of them times every multiplier.
std::vector<float> all_steps(const Tensor& steps, int64_t sub) {
  const float* candidates = data_of<float>(steps);
  std::vector<float> all;
  for (int64_t i = 0; i < steps.numel(); ++i) {
    if (sub == 0) {
      all.push_back(candidates[i]);
      continue;
    }
    for (int m = 0; m < format::kMultiplierCodes; ++m) {
      all.push_back(candidates[i] * static_cast<float>(format::multiplier(m)) * format::kMultiplierUnit);
    }
  }
  return all;
}

Tensor weight_encode(const WeightEncodeCall& c) {
  const WeightShape shape = check_weight_encode(c);
  const int8_t* levels = checked_levels(c.levels, c.w, c.bits, "levels");
  checked_codebook(c.w, c.levels, c.steps, c.bits, "levels", "steps");  // says what is wrong with the steps
  const std::vector<float> steps = all_steps(c.steps, c.sub);
  const Codebook book(shape.block.width(), levels, steps.data(), static_cast<int>(steps.size()));
  const float* signs = checked_signs(c.signs, "signs");
  const double root = std::sqrt(static_cast<double>(shape.group()));
  const WeightEncoder encoder{.blocks = blocks_of(shape),
                              .w = c.w.data_ptr(),
                              .dtype = dtype_of(c.w),
                              .stride = c.w.stride(0),
                              .signs = signs,
                              .channel_scale = data_of<float>(c.channel_scale),
                              .quantiser = book.quantiser(shape.group(), format::ScaleMode::kMse),
                              .over = static_cast<float>(1.0 / format::kLevelUnit / format::kMultiplierUnit / root)};
  Tensor packed = new_packed_weight(c.w, shape);
  uint8_t* to = data_of<uint8_t>(packed);
  parallel_for(shape.tiles() * shape.groups(), block_grain(shape, c.sub ? 64 : 16),
               [&](int64_t begin, int64_t end) { kernels().encode_weight(encoder, begin, end, to); });
  return packed;
}

Tensor weight_pack(const WeightPackCall& c) {
  const WeightShape shape = check_weight_pack(c);
  const auto check_codes_fit = [](const Tensor& t, const char* name, int bits) {
    std::atomic<bool> in_range{true};
    const uint8_t* codes = data_of<uint8_t>(t);
    parallel_for(t.numel(), 1 << 18, [&](int64_t begin, int64_t end) {
      if (!kernels().codes_fit(codes + begin, end - begin, bits)) in_range = false;
    });
    STD_TORCH_CHECK(in_range, name, " holds values of ", 1 << bits, " or more, which do not fit ", bits, " bits");
  };
  check_codes_fit(c.codes, "codes", shape.block.bits);
  static_assert(format::kMultiplierCodes == 1 << 4);
  if (c.multipliers) check_codes_fit(*c.multipliers, "multipliers", 4);

  Tensor packed = new_packed_weight(c.codes, shape);
  const WeightCodes from{.codes = data_of<uint8_t>(c.codes),
                         .scale = data_of<uint16_t>(c.scale),
                         .multipliers = c.multipliers ? data_of<uint8_t>(*c.multipliers) : nullptr};
  uint8_t* to = data_of<uint8_t>(packed);
  parallel_for(shape.tiles() * shape.groups(), block_grain(shape, 1),
               [&](int64_t begin, int64_t end) { kernels().pack_weight(blocks_of(shape), from, begin, end, to); });
  return packed;
}

std::tuple<Tensor, Tensor, Tensor> weight_unpack(const WeightUnpackCall& c) {
  const WeightShape shape = check_weight_unpack(c);
  auto result = new_unpacked_weight(c.packed, shape);
  const WeightCodes to{.codes = data_of<uint8_t>(std::get<0>(result)),
                       .scale = data_of<uint16_t>(std::get<1>(result)),
                       .multipliers = data_of<uint8_t>(std::get<2>(result))};
  const uint8_t* packed = data_of<uint8_t>(c.packed);
  parallel_for(shape.tiles() * shape.groups(), block_grain(shape, 1),
               [&](int64_t begin, int64_t end) { kernels().unpack_weight(blocks_of(shape), packed, begin, end, to); });
  return result;
}

Tensor weight_decode(const WeightDecodeCall& c) {
  const WeightShape shape = check_weight_decode(c);
  const Levels levels(shape.block.width(), checked_levels(c.levels, c.packed, c.bits, "levels"));
  const WeightDecoder decoder{.blocks = blocks_of(shape),
                              .levels = levels.of,
                              .signs = checked_signs(c.signs, "signs"),
                              .channel_inverse = data_of<float>(c.channel_inverse),
                              .dtype = dtype_of(c.dtype)};
  Tensor w = new_tensor(c.packed, {shape.n, shape.k}, c.dtype, "a decoded weight");
  const uint8_t* packed = data_of<uint8_t>(c.packed);
  parallel_for(shape.tiles() * shape.groups(), block_grain(shape, 4),
               [&](int64_t begin, int64_t end) { kernels().decode_weight(decoder, packed, begin, end, w.data_ptr()); });
  return w;
}

// ---- linear_packed --------------------------------------------------------------------------------------------------

// As many tokens at once as have their integers in a cache of middle size, where all tiles read them.
int64_t tokens_at_once(int64_t tokens, int64_t token_bytes) {
  constexpr int64_t kCacheBytes = 512 << 10;
  const int64_t fit = std::max<int64_t>(1, kCacheBytes / token_bytes / kLinearTokens) * kLinearTokens;
  return std::min(tokens, fit);
}

Tensor linear_packed(const LinearCall& c) {
  const WeightShape shape = check_linear(c);
  const Levels levels(shape.block.width(), checked_levels(c.levels, c.x, c.bits, "levels"));
  const float* signs = checked_signs(c.signs, "signs");
  const LinearMap map(shape.block);
  LinearWeight weight{.blocks = blocks_of(shape),
                      .packed = data_of<uint8_t>(c.packed),
                      .levels = {},
                      .channels = map.get()};
  std::copy(std::begin(levels.of), std::end(levels.of), weight.levels);

  Tensor y = new_linear_result(c, shape);
  const Rows rows(c.x);
  if (y.numel() == 0) return y;
  const int64_t token_bytes = shape.groups() * kernels().linear_factor_bytes(shape.block);
  const int64_t at_once = tokens_at_once(rows.count(), token_bytes);
  const Scratch factors(at_once * token_bytes), units(at_once * shape.groups() * static_cast<int64_t>(sizeof(float)));
  for (int64_t token = 0; token < rows.count(); token += at_once) {
    const LinearInputs inputs{.count = std::min(at_once, rows.count() - token),
                              .factors = factors.as<void>(),
                              .unit = units.as<float>()};
    parallel_for(inputs.count, row_grain(shape.k, 8), [&](int64_t begin, int64_t end) {
      rows.runs(token + begin, token + end, [&](int64_t first, int64_t count, int64_t offset, int64_t stride) {
        const ActivationRows some{.x = element(c.x, offset),
                                  .dtype = dtype_of(c.x),
                                  .count = count,
                                  .stride = stride,
                                  .signs = signs,
                                  .channel_inverse = data_of<float>(c.channel_inverse)};
        kernels().linear_inputs(weight, some, inputs, first - token);
      });
    });
    const LinearOutputs outputs{.y = element(y, token * shape.n),
                                .bias = c.bias ? c.bias->data_ptr() : nullptr,
                                .dtype = dtype_of(c.x)};
    const int64_t work = shape.k * format::kWeightRows * inputs.count;
    parallel_for(shape.tiles(), 1 + (1 << 18) / work,
                 [&](int64_t begin, int64_t end) { kernels().linear_tiles(weight, inputs, begin, end, outputs); });
  }
  return y;
}

// ---- linear_experts -------------------------------------------------------------------------------------------------

// Pairs of a token and an expert by their expert, and what of them is multiplied at once.
struct Piece {
  int64_t expert, first, count;  // of the pairs in their order
};

std::vector<int64_t> pairs_by_expert(const int64_t* experts, int64_t pairs, int64_t count, std::vector<int64_t>& ends) {
  ends.assign(static_cast<size_t>(count), 0);
  const auto exists = [&](int64_t pair) { return experts[pair] >= 0 && experts[pair] < count; };
  for (int64_t pair = 0; pair < pairs; ++pair) {
    if (exists(pair)) ++ends[static_cast<size_t>(experts[pair])];
  }
  std::vector<int64_t> next;
  int64_t total = 0;
  for (int64_t& end : ends) next.push_back(total), end = total += end;
  std::vector<int64_t> order(static_cast<size_t>(total));
  for (int64_t pair = 0; pair < pairs; ++pair) {
    if (exists(pair)) order[static_cast<size_t>(next[static_cast<size_t>(experts[pair])]++)] = pair;
  }
  return order;
}

Tensor linear_experts(const ExpertsCall& c) {
  const ExpertsShape of = check_experts(c);
  const WeightShape& shape = of.weight;
  const Levels levels(shape.block.width(), checked_levels(c.levels, c.x, c.bits, "levels"));
  const float* signs = checked_signs(c.signs, "signs");
  const LinearMap map(shape.block);
  LinearWeight weight{.blocks = blocks_of(shape), .packed = nullptr, .levels = {}, .channels = map.get()};
  std::copy(std::begin(levels.of), std::end(levels.of), weight.levels);

  Tensor y = new_experts_result(c, of);
  if (y.numel() == 0) return y;
  std::vector<int64_t> ends;
  const int64_t* chosen = data_of<int64_t>(c.experts);
  const std::vector<int64_t> order = pairs_by_expert(chosen, of.pairs(), of.experts, ends);
  const int64_t row_bytes = shape.n * static_cast<int64_t>(y.element_size());
  for (int64_t pair = 0; pair < of.pairs(); ++pair) {
    if (chosen[pair] < 0 || chosen[pair] >= of.experts) std::memset(element(y, pair * shape.n), 0, row_bytes);
  }

  const int64_t token_bytes = shape.groups() * kernels().linear_factor_bytes(shape.block);
  const int64_t of_piece = tokens_at_once(of.pairs(), token_bytes);
  // Threads share the tiles of all pieces of a turn, whose activations and results have memory of a bounded size.
  constexpr int64_t kTurnBytes = 32 << 20;
  const int64_t of_turn = std::min(of.pairs(), of_piece + kTurnBytes / (token_bytes + row_bytes));
  const Scratch factors(of_turn * token_bytes), units(of_turn * shape.groups() * static_cast<int64_t>(sizeof(float)));
  const Scratch results(of_turn * row_bytes);
  std::vector<Piece> pieces;
  int64_t turn = 0;  // the first pair of this turn
  const auto multiply = [&](int64_t end) {
    const auto inputs_of = [&](const Piece& p) {
      const int64_t at = p.first - turn;
      return LinearInputs{.count = p.count,
                          .factors = factors.as<uint8_t>() + at * token_bytes,
                          .unit = units.as<float>() + at * shape.groups()};
    };
    const auto each = [&](const std::vector<Piece>& all, int64_t parts, int64_t grain, auto&& fn) {
      parallel_for(static_cast<int64_t>(all.size()) * parts, grain, [&](int64_t begin, int64_t stop) {
        for (int64_t next; begin < stop; begin = next) {
          const int64_t piece = begin / parts;
          next = std::min(stop, (piece + 1) * parts);
          fn(all[static_cast<size_t>(piece)], begin - piece * parts, next - piece * parts);
        }
      });
    };
    each(pieces, 1, 1, [&](const Piece& p, int64_t, int64_t) {
      for (int64_t i = 0; i < p.count; ++i) {
        const int64_t token = order[static_cast<size_t>(p.first + i)] / of.choices;
        const ActivationRows row{.x = element(c.x, token * c.x.stride(0)),
                                 .dtype = dtype_of(c.x),
                                 .count = 1,
                                 .stride = 0,
                                 .signs = signs,
                                 .channel_inverse = nullptr};
        kernels().linear_inputs(weight, row, inputs_of(p), i);
      }
    });
    each(pieces, shape.tiles(), 1 + (1 << 18) / (shape.k * format::kWeightRows),
         [&](const Piece& p, int64_t begin, int64_t stop) {
           LinearWeight own = weight;
           own.packed = data_of<uint8_t>(c.packed) + p.expert * of.weight_bytes();
           const LinearOutputs outputs{.y = results.as<uint8_t>() + (p.first - turn) * row_bytes,
                                       .bias = c.bias ? element(*c.bias, p.expert * shape.n) : nullptr,
                                       .dtype = dtype_of(c.x)};
           kernels().linear_tiles(own, inputs_of(p), begin, stop, outputs);
         });
    for (int64_t pair = turn; pair < end; ++pair) {
      std::memcpy(element(y, order[static_cast<size_t>(pair)] * shape.n),
                  results.as<uint8_t>() + (pair - turn) * row_bytes, row_bytes);
    }
    pieces.clear();
    turn = end;
  };
  int64_t pair = 0;
  for (int64_t expert = 0; expert < of.experts; ++expert) {
    while (pair < ends[static_cast<size_t>(expert)]) {
      const int64_t count = std::min(of_piece, ends[static_cast<size_t>(expert)] - pair);
      if (pair + count - turn > of_turn) multiply(pair);
      pieces.push_back({expert, pair, count});
      pair += count;
    }
  }
  multiply(pair);
  return y;
}

}  // namespace
}  // namespace turboquant::cpu

STABLE_TORCH_LIBRARY_IMPL(turboquant, CPU, m) {
  using namespace turboquant;
  m.impl("weight_encode", boxed<&cpu::weight_encode>);
  m.impl("weight_pack", boxed<&cpu::weight_pack>);
  m.impl("weight_unpack", boxed<&cpu::weight_unpack>);
  m.impl("weight_decode", boxed<&cpu::weight_decode>);
  m.impl("linear_packed", boxed<&cpu::linear_packed, kLinearPacked>);
  m.impl("linear_experts", boxed<&cpu::linear_experts, kLinearExperts>);
}
