// weight_encode, weight_pack, weight_unpack, weight_decode: weights of linear layers in blocks; linear_packed: products
// with them (docs/format.md section 13). linear_experts is in linear/experts.cpp.
#include "calls/linear.h"

#include <cmath>

#include "cpu/codec/codebook.h"
#include "cpu/codec/codes.h"
#include "cpu/common/torch.h"
#include "cpu/linear/products.h"

namespace turboquant::cpu {
namespace {

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

Tensor linear_packed(const LinearCall& c) {
  const WeightShape shape = check_linear(c);
  const Levels levels(shape.block.width(), checked_levels(c.levels, c.x, c.bits, "levels"));
  const float* signs = checked_signs(c.signs, "signs");
  const ProductWeights weights(shape, levels);
  const LinearWeight weight = weights.of(data_of<uint8_t>(c.packed));

  Tensor y = new_linear_result(c, shape);
  const Rows rows(c.x);
  if (y.numel() == 0) return y;
  const int64_t at_once = tokens_at_once(shape, rows.count());
  const InputMemory memory(shape, at_once);
  for (int64_t token = 0; token < rows.count(); token += at_once) {
    const LinearInputs inputs = memory.part(0, std::min(at_once, rows.count() - token));
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

}  // namespace
}  // namespace turboquant::cpu

STABLE_TORCH_LIBRARY_IMPL(turboquant, CPU, m) {
  using namespace turboquant;
  m.impl("weight_encode", boxed<&cpu::weight_encode>);
  m.impl("weight_pack", boxed<&cpu::weight_pack>);
  m.impl("weight_unpack", boxed<&cpu::weight_unpack>);
  m.impl("weight_decode", boxed<&cpu::weight_decode>);
  m.impl("linear_packed", boxed<&cpu::linear_packed, kLinearPacked>);
}
