// query_energy, learn_center: the center that keys are stored relative to, learned from the keys and queries of a
// prompt.
#include <cmath>

#include "calls/center.h"
#include "cpu/common/torch.h"

namespace turboquant::cpu {
namespace {

// Calls fn(row) with the channels in float32 of all tokens of `heads` neighbouring heads.
template <typename Fn>
void for_each_row(const Tensor& x, int64_t first_head, int64_t heads, int64_t skip, float* row, Fn&& fn) {
  const int64_t batch = x.size(0), tokens = x.size(2), d = x.size(3);
  const int64_t of_batch = x.stride(0), of_head = x.stride(1), of_token = x.stride(2);
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = first_head; h < first_head + heads; ++h) {
      for (int64_t t = skip; t < tokens; ++t) {
        to_float(x, b * of_batch + h * of_head + t * of_token, d, row);
        fn(row);
      }
    }
  }
}

// Runs fn(layer, head) on torch's threads.
template <typename Fn>
void for_each_head(const LayerVectors& shape, int64_t heads, Fn&& fn) {
  const int64_t grain = row_grain(shape.d, shape.batch * shape.tokens * (shape.heads / heads));
  parallel_for(shape.layers * heads, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) fn(i / heads, i % heads);
  });
}

// queries: of every layer [batch, heads, tokens, d] -> float32 [layers, kv_heads, d]
Tensor query_energy(const std::vector<Tensor>& queries, int64_t kv_heads, int64_t skip) {
  const LayerVectors shape = check_layers(queries, "queries", skip);
  const int64_t group = check_query_group(shape, kv_heads);
  Tensor out = new_tensor(queries[0], {shape.layers, kv_heads, shape.d}, ScalarType::Float);
  for_each_head(shape, kv_heads, [&](int64_t layer, int64_t head) {
    std::vector<float> row(shape.d);
    std::vector<double> squares(shape.d);
    for_each_row(queries[layer], head * group, group, skip, row.data(), [&](const float* x) {
      for (int64_t c = 0; c < shape.d; ++c) squares[c] += double{x[c]} * x[c];
    });
    float* to = static_cast<float*>(element(out, (layer * kv_heads + head) * shape.d));
    const double rows = static_cast<double>(shape.batch * shape.tokens * group);
    for (int64_t c = 0; c < shape.d; ++c) to[c] = static_cast<float>(squares[c] / rows);
  });
  return out;
}

// The scales of a head's channels, as channel_scale of torch_turboquant/ops/center.py explains them.
void make_scales(const std::vector<double>& mean, const std::vector<double>& variance, const float* energy,
                 const int64_t* partners, int64_t tokens, float* scale, float* inverse) {
  const size_t d = mean.size();
  const auto spread = [&](auto&& of) {
    std::vector<double> out(d);
    double sum = 0;
    for (size_t c = 0; c < d; ++c) sum += out[c] = of(c) + of(partners[c]);
    for (double& x : out) x += kPriorTokens / static_cast<double>(tokens) * (sum / static_cast<double>(d));
    return out;
  };
  const std::vector<double> wanted = spread([&](size_t c) { return double{energy[c]}; });
  const std::vector<double> given = spread([&](size_t c) { return variance[c] + kMeanInVariance * mean[c] * mean[c]; });
  std::vector<double> root(d);
  double sum = 0;
  for (size_t c = 0; c < d; ++c) sum += root[c] = std::pow(wanted[c] / given[c], 0.25);
  for (size_t c = 0; c < d; ++c) {
    const double relative = root[c] / (sum / static_cast<double>(d));
    scale[c] = std::isfinite(relative) ? static_cast<float>(relative) : 1.0f;
    inverse[c] = 1 / scale[c];
  }
}

// keys: of every layer [batch, kv_heads, tokens, d]; energies: of every layer float32 [kv_heads, d], or none;
// partners: int64 [d] -> float32 [layers, kv_heads, d], with energies [layers, 3, kv_heads, d]
Tensor learn_center(const std::vector<Tensor>& keys, const std::vector<Tensor>& energies,
                    const OptionalTensor& partners, int64_t skip) {
  const LayerVectors shape = check_layers(keys, "keys", skip);
  check_energies(energies, partners, keys[0], shape);
  const int64_t d = shape.d, heads = shape.heads;
  const int64_t* partner = data_of<int64_t>(partners);
  for (int64_t c = 0; partner && c < d; ++c) {
    STD_TORCH_CHECK(partner[c] >= 0 && partner[c] < d, "partners holds ", partner[c],
                    ", supported: ", range_text(0, d - 1));
  }
  const int64_t parts = partner ? kCenterParts : 1;
  const std::vector<int64_t> sizes =
      partner ? std::vector<int64_t>{shape.layers, parts, heads, d} : std::vector<int64_t>{shape.layers, heads, d};
  Tensor out = new_tensor(keys[0], sizes, ScalarType::Float);
  for_each_head(shape, heads, [&](int64_t layer, int64_t head) {
    const double rows = static_cast<double>(shape.batch * shape.tokens);
    std::vector<float> row(d);
    std::vector<double> mean(d), variance(d);
    for_each_row(keys[layer], head, 1, skip, row.data(), [&](const float* x) {
      for (int64_t c = 0; c < d; ++c) mean[c] += x[c];
    });
    for (double& m : mean) m /= rows;
    const auto to = [&](int part) {
      return static_cast<float*>(element(out, ((layer * parts + part) * heads + head) * d));
    };
    for (int64_t c = 0; c < d; ++c) to(kMean)[c] = static_cast<float>(mean[c]);
    if (!partner) return;
    for_each_row(keys[layer], head, 1, skip, row.data(), [&](const float* x) {
      for (int64_t c = 0; c < d; ++c) variance[c] += (x[c] - mean[c]) * (x[c] - mean[c]);
    });
    for (double& v : variance) v /= rows;
    const float* energy = data_of<float>(energies[layer]) + head * d;
    make_scales(mean, variance, energy, partner, shape.batch * shape.tokens, to(kScale), to(kInverse));
  });
  return out;
}

}  // namespace
}  // namespace turboquant::cpu

STABLE_TORCH_LIBRARY_IMPL(turboquant, CPU, m) {
  m.impl("query_energy", TORCH_BOX(&turboquant::cpu::query_energy));
  m.impl("learn_center", TORCH_BOX(&turboquant::cpu::learn_center));
}
