// score: attention scores straight from packed standalone vectors. The query is rotated once; keys are never rotated back:
// <q, key> = <R q, scale / 32 * levels> + <q, center>, plus the sketch's estimate of the residual when there is one.
#include "dense.h"
#include "qjl.h"

namespace turboquant::cpu {
namespace {

constexpr int64_t kKeyBlock = 256;  // keys of one piece of work: enough to pay for rotating the queries again

// q: [..., queries, d], packed: uint8 [..., keys, row_bytes], scale: float16 [..., keys], center: float32 [d],
// sign_bits: uint8 [..., keys, m / 8], residual_norm: float32 [..., keys], projection as in qjl.h -> float32 [..., queries, keys]
Tensor score(const Tensor& q, const Tensor& packed, const Tensor& scale, const Tensor& signs,
             const OptionalTensor& levels, int64_t bits, const OptionalTensor& center, const OptionalTensor& sign_bits,
             const OptionalTensor& residual_norm, const OptionalTensor& projection) {
  check_codec_bits(bits);
  const ScoreShape shape = checked_score_shape(q, packed, "packed");
  check_device(packed, q, "packed");
  const DenseVectors keys = checked_dense_vectors(packed, scale, signs, levels, bits);
  const int64_t d = keys.d;
  STD_TORCH_CHECK(q.size(q.dim() - 1) == d, "q has shape ", shape_text(q), ", expected [..., ", d, "] as signs say");
  if (center) check_constant(*center, q, "center", ScalarType::Float, {d});
  const float* mean = center ? static_cast<const float*>(center->data_ptr()) : nullptr;
  const bool sketched = projection.has_value();
  STD_TORCH_CHECK(sign_bits.has_value() == sketched && residual_norm.has_value() == sketched,
                  "sign_bits, residual_norm and projection come together or not at all");
  std::optional<Sketch> sketch;
  if (sketched) {
    sketch.emplace(*projection, q, d);
    check_sketch(*sign_bits, *residual_norm, q, shape, sketch->bytes());
  }
  const uint8_t* key_bits = sketched ? static_cast<const uint8_t*>(sign_bits->data_ptr()) : nullptr;
  const float* norms = sketched ? static_cast<const float*>(residual_norm->data_ptr()) : nullptr;
  const int64_t m = sketched ? sketch->rows() : 0;

  Tensor out = empty_like_shape(q, shape.out, ScalarType::Float);
  float* to = static_cast<float*>(out.data_ptr());
  const Rows rows(q);
  const int64_t blocks = (shape.keys + kKeyBlock - 1) / kKeyBlock;
  parallel_for(shape.batch * blocks, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> queries(shape.queries * d), projected(shape.queries * m), shift(shape.queries), key(d),
        scratch(d);
    std::vector<uint8_t> codes(d);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t b = item / blocks, first = item % blocks * kKeyBlock;
      if (item == begin || first == 0) {  // a new batch entry: everything that depends on the query alone
        load_queries(q, rows, b, shape.queries, d, queries.data());
        for (int64_t i = 0; i < shape.queries; ++i) {
          float* query = queries.data() + i * d;
          shift[i] = mean ? dot(query, mean, d) : 0;
          if (sketched) sketch->project(query, projected.data() + i * m, scratch.data());
          rotate(query, keys.signs, keys.split);
        }
      }
      for (int64_t j = first; j < std::min(first + kKeyBlock, shape.keys); ++j) {
        const int64_t index = b * shape.keys + j;
        keys.decode_rotated(index, codes.data(), key.data());
        for (int64_t i = 0; i < shape.queries; ++i) {
          float s = dot(queries.data() + i * d, key.data(), d) + shift[i];
          if (sketched) {
            s += sketch->factor() * norms[index] *
                 sketch->signed_sum(key_bits + index * sketch->bytes(), projected.data() + i * m);
          }
          to[(b * shape.queries + i) * shape.keys + j] = s;
        }
      }
    }
  });
  return out;
}

}  // namespace
}  // namespace turboquant::cpu

STABLE_TORCH_LIBRARY_IMPL(turboquant, CPU, m) { m.impl("score", TORCH_BOX(&turboquant::cpu::score)); }
