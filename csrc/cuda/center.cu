// query_energy, learn_center: what keys are stored relative to, learned from the keys and queries of a prompt.
//
// A prompt's first token waits for these ops, so the host should have little to launch: one or two kernels do all
// layers. A block sums part of the rows of a head; a thread sums eight channels if rows are aligned, else one. A
// second kernel combines the parts of a head. Sums are float32 within a part, where squares are relative to the part's
// own mean, and float64 between parts.
#include <algorithm>

#include "calls/center.h"
#include "cuda/common/torch.cuh"

namespace turboquant::cuda {
namespace {

constexpr int kMostLayers = 64;  // of a launch: their addresses are kernel parameters
constexpr int kThreads = 256;
constexpr int kWide = 8;          // channels of a thread if rows can be read 16 bytes at a time
constexpr int kUnroll = 4;        // rows whose loads are in flight together
constexpr int kRowsOfPart = 512;  // at least, unless there are fewer
constexpr int kMostParts = 128;

// The keys or queries of a launch's layers. A row is one token of one of `group` neighbouring heads.
struct LayerRows {
  const void* data[kMostLayers];   // of the first token that is not skipped
  int64_t stride[kMostLayers][3];  // of batch, head, token
  Dtype dtype;
  int64_t tokens, rows;
  int d, group, parts;

  __host__ __device__ int64_t begin(int part) const { return rows * part / parts; }
  __device__ __forceinline__ int64_t at(int layer, int head, int64_t row) const {
    const bool small = rows <= UINT32_MAX;  // 64-bit divisions are slow
    const int64_t outer = small ? static_cast<uint32_t>(row) / static_cast<uint32_t>(tokens) : row / tokens;
    const int64_t b = small ? static_cast<uint32_t>(outer) / static_cast<uint32_t>(group) : outer / group;
    const int64_t h = head * group + outer - b * group, t = row - outer * tokens;
    return b * stride[layer][0] + h * stride[layer][1] + t * stride[layer][2];
  }
};

// The energies of layers, float32 [heads, d] each, or null.
struct LayerEnergies {
  const float* data[kMostLayers];
};

// Sums fn(channel, value) over the rows of a part. The block takes several rows at a time, side by side; a thread has N
// neighbouring channels of one of them. All threads may read sums[c] when this returns. shared: [rows side by side, d]
template <int N, typename Fn>
__device__ __forceinline__ void sum_part(const LayerRows& x, float* shared, float* sums, Fn&& fn) {
  const int part = blockIdx.x, head = blockIdx.y, layer = blockIdx.z;
  const int lanes = x.d / N, first = threadIdx.x % lanes * N;
  const int mine = threadIdx.x / lanes, side_by_side = blockDim.x / lanes;
  const int64_t end = x.begin(part + 1);
  float sum[N] = {};
  // load(at, values): N neighbouring elements from `at` on
  const auto sum_rows = [&](auto&& load) {
    for (int64_t row = x.begin(part) + mine; row < end; row += kUnroll * side_by_side) {
      float value[kUnroll][N];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        // Past the end the last row is loaded again, and not added below.
        const int64_t r = min(row + i * side_by_side, end - 1);
        load(first + x.at(layer, head, r), value[i]);
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        if (row + i * side_by_side >= end) break;
#pragma unroll
        for (int c = 0; c < N; ++c) sum[c] += fn(first + c, value[i][c]);
      }
    }
  };
  if constexpr (N == 1) {
    sum_rows([&](int64_t at, float (&to)[1]) { to[0] = load_float(x.data[layer], x.dtype, at); });
  } else {
    with_float_type(x.dtype, [&](auto tag) {
      const auto* from = static_cast<const typename decltype(tag)::type*>(x.data[layer]);
      sum_rows([&](int64_t at, float (&to)[N]) { load_floats<N>(from + at, to); });
    });
  }
  __syncthreads();  // an earlier call's shared and sums may still be in use
#pragma unroll
  for (int c = 0; c < N; ++c) shared[mine * x.d + first + c] = sum[c];
  __syncthreads();
  for (int c = threadIdx.x; c < x.d; c += blockDim.x) {
    float total = 0;
    for (int i = 0; i < side_by_side; ++i) total += shared[i * x.d + c];
    sums[c] = total;
  }
  __syncthreads();
}

// -> out: [layers, heads, parts, d], a part's share of the mean square
template <int N>
__global__ void __launch_bounds__(N == 1 ? kMostLayerDim : kThreads)
    energy_kernel(const __grid_constant__ LayerRows x, float* out) {
  extern __shared__ float shared[];
  __shared__ float sums[kMostLayerDim];
  sum_part<N>(x, shared, sums, [](int, float v) { return v * v; });
  const int64_t place = (int64_t{blockIdx.z} * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  for (int c = threadIdx.x; c < x.d; c += blockDim.x) out[place * x.d + c] = sums[c] / static_cast<float>(x.rows);
}

// from: [layers * heads, parts, d] -> out: [layers * heads, d]
__global__ void __launch_bounds__(kMostLayerDim) sum_kernel(const float* from, int parts, int d, float* out) {
  double sum = 0;
  for (int p = 0; p < parts; ++p) sum += from[(int64_t{blockIdx.x} * parts + p) * d + threadIdx.x];
  out[int64_t{blockIdx.x} * d + threadIdx.x] = static_cast<float>(sum);
}

// -> out: [layers, heads, parts, 2, d], a part's mean and the sum of its squares around that mean
template <int N>
__global__ void __launch_bounds__(N == 1 ? kMostLayerDim : kThreads)
    moments_kernel(const __grid_constant__ LayerRows x, float* out) {
  extern __shared__ float shared[];
  __shared__ float sums[kMostLayerDim], mean[kMostLayerDim];
  const int part = blockIdx.x;
  const int64_t place = (int64_t{blockIdx.z} * gridDim.y + blockIdx.y) * gridDim.x + part;
  float* to = out + 2 * place * x.d;
  const float count = static_cast<float>(x.begin(part + 1) - x.begin(part));
  sum_part<N>(x, shared, sums, [](int, float v) { return v; });
  for (int c = threadIdx.x; c < x.d; c += blockDim.x) to[c] = mean[c] = sums[c] / count;
  __syncthreads();
  sum_part<N>(x, shared, sums, [&](int c, float v) { return (v - mean[c]) * (v - mean[c]); });
  for (int c = threadIdx.x; c < x.d; c += blockDim.x) to[x.d + c] = sums[c];
}

// The sum over a block of at most 1,024 threads, returned to all of them.
__device__ __forceinline__ double sum_of_block(double x) {
  __shared__ double of_warp[32];
#pragma unroll
  for (int bit = 1; bit < 32; bit *= 2) x += __shfl_xor_sync(0xffffffff, x, bit);
  __syncthreads();
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
  __syncthreads();
  double sum = 0;
  for (unsigned w = 0; w < blockDim.x / 32; ++w) sum += of_warp[w];
  return sum;
}

// The sum of a channel's and its partner's share, drawn towards the average channel by `prior`. partner: a thread of
// the block
__device__ __forceinline__ double spread(double own, int partner, double* shared, int d, double prior) {
  __syncthreads();
  shared[threadIdx.x] = own;
  __syncthreads();
  const double both = own + shared[partner];
  return both + prior * sum_of_block(threadIdx.x < d ? both : 0) / d;
}

// moments: what moments_kernel wrote -> out: [layers, heads, d], or with partners [layers, 3, heads, d]. The rule for
// scales is channel_scale in torch_turboquant/ops/center.py.
__global__ void __launch_bounds__(kMostLayerDim)
    center_kernel(const __grid_constant__ LayerRows x, const float* moments,
                  const __grid_constant__ LayerEnergies energies, const int64_t* partners, float* out) {
  __shared__ double shared[kMostLayerDim];
  const int head = blockIdx.x, layer = blockIdx.y, heads = gridDim.x, c = threadIdx.x;
  const bool exists = c < x.d;
  const float* of_part = moments + (int64_t{layer} * heads + head) * x.parts * 2 * x.d + c;  // [parts, 2, d]
  const auto rows_of = [&](int p) { return static_cast<double>(x.begin(p + 1) - x.begin(p)); };
  const double rows = static_cast<double>(x.rows);
  double mean = 0, squares = 0;
  for (int p = 0; exists && p < x.parts; ++p) mean += rows_of(p) * of_part[2 * p * x.d];
  mean /= rows;
  for (int p = 0; exists && p < x.parts; ++p) {
    const double apart = of_part[2 * p * x.d] - mean;
    squares += of_part[(2 * p + 1) * x.d] + rows_of(p) * apart * apart;
  }
  const auto place = [&](int part) {
    return ((int64_t{layer} * (partners ? kCenterParts : 1) + part) * heads + head) * x.d + c;
  };
  if (exists) out[place(kMean)] = static_cast<float>(mean);
  if (!partners) return;

  // A partner out of range cannot be reported without synchronising with the device: such a channel is its own partner.
  const int64_t named = exists ? partners[c] : c;
  const int partner = named >= 0 && named < x.d ? static_cast<int>(named) : c;
  const double prior = kPriorTokens / rows;
  const double wanted = spread(exists ? energies.data[layer][head * x.d + c] : 0, partner, shared, x.d, prior);
  const double given = spread(exists ? squares / rows + kMeanInVariance * mean * mean : 0, partner, shared, x.d, prior);
  const double root = exists ? sqrt(sqrt(wanted / given)) : 0;
  const double relative = root / (sum_of_block(root) / x.d);
  // If all queries or keys of a head are zero, all its ratios are equally 0, infinite or NaN.
  const float scale = isfinite(relative) ? static_cast<float>(relative) : 1.0f;
  if (exists) out[place(kScale)] = scale, out[place(kInverse)] = __fdiv_rn(1.0f, scale);
}

// ---- Host side ------------------------------------------------------------------------------------------------------

// Layers first .. first + count - 1.
LayerRows layer_rows(const std::vector<Tensor>& x, const LayerVectors& shape, int64_t first, int64_t count,
                     int64_t group, int64_t skip) {
  LayerRows rows{};
  for (int64_t i = 0; i < count; ++i) {
    const Tensor& t = x[first + i];
    const int64_t skipped = skip * t.stride(2) * static_cast<int64_t>(t.element_size());
    rows.data[i] = static_cast<const uint8_t*>(t.data_ptr()) + skipped;
    for (int k = 0; k < 3; ++k) rows.stride[i][k] = t.stride(k);
  }
  rows.dtype = dtype_of(x[0]);
  rows.tokens = shape.tokens;
  rows.rows = shape.batch * shape.tokens * group;
  rows.d = static_cast<int>(shape.d), rows.group = static_cast<int>(group);
  rows.parts = static_cast<int>(std::min<int64_t>((rows.rows + kRowsOfPart - 1) / kRowsOfPart, kMostParts));
  return rows;
}

// Calls fn(N, threads of a block, bytes of shared memory).
template <typename Fn>
void with_width(const LayerRows& x, int64_t layers, int64_t element_size, Fn&& fn) {
  bool wide = x.d % kWide == 0;
  for (int64_t i = 0; i < layers; ++i) {
    wide = wide && aligned(x.data[i], 16);
    for (const int64_t stride : x.stride[i]) wide = wide && stride * element_size % 16 == 0;
  }
  const auto run = [&](auto width) {
    const int lanes = x.d / width, threads = lanes <= kThreads ? kThreads / lanes * lanes : lanes;
    fn(width, threads, 4 * threads * width);
  };
  if (wide) return run(std::integral_constant<int, kWide>{});
  run(std::integral_constant<int, 1>{});
}

// queries: of every layer [batch, heads, tokens, d] -> float32 [layers, kv_heads, d]
Tensor query_energy(const std::vector<Tensor>& queries, int64_t kv_heads, int64_t skip) {
  const LayerVectors shape = check_layers(queries, "queries", skip);
  const int64_t group = check_query_group(shape, kv_heads), d = shape.d;
  Tensor out = new_tensor(queries[0], {shape.layers, kv_heads, d}, ScalarType::Float);
  const Launch launch(out);
  for (int64_t first = 0; first < shape.layers; first += kMostLayers) {
    const int64_t count = std::min<int64_t>(shape.layers - first, kMostLayers), heads = count * kv_heads;
    const LayerRows x = layer_rows(queries, shape, first, count, group, skip);
    const dim3 grid(x.parts, static_cast<unsigned>(kv_heads), static_cast<unsigned>(count));
    float* to = static_cast<float*>(out.data_ptr()) + first * kv_heads * d;
    std::optional<Tensor> parts;
    if (x.parts > 1) parts = new_tensor(out, {heads, x.parts, d}, ScalarType::Float);
    float* part = parts ? static_cast<float*>(parts->data_ptr()) : to;
    with_width(x, count, queries[0].element_size(), [&](auto width, int threads, int bytes) {
      energy_kernel<width><<<grid, threads, bytes, launch.stream()>>>(x, part);
    });
    if (parts) {
      sum_kernel<<<static_cast<unsigned>(heads), static_cast<unsigned>(d), 0, launch.stream()>>>(part, x.parts, x.d,
                                                                                                 to);
    }
  }
  launch.check("query_energy");
  return out;
}

// keys: of every layer [batch, kv_heads, tokens, d]; energies: of every layer float32 [kv_heads, d], or none;
// partners: int64 [d] -> float32 [layers, kv_heads, d], with energies [layers, 3, kv_heads, d]
Tensor learn_center(const std::vector<Tensor>& keys, const std::vector<Tensor>& energies,
                    const OptionalTensor& partners, int64_t skip) {
  const LayerVectors shape = check_layers(keys, "keys", skip);
  check_energies(energies, partners, keys[0], shape);
  const int64_t d = shape.d, heads = shape.heads, parts = partners ? kCenterParts : 1;
  const std::vector<int64_t> sizes =
      partners ? std::vector<int64_t>{shape.layers, parts, heads, d} : std::vector<int64_t>{shape.layers, heads, d};
  Tensor out = new_tensor(keys[0], sizes, ScalarType::Float);
  const Launch launch(out);
  for (int64_t first = 0; first < shape.layers; first += kMostLayers) {
    const int64_t count = std::min<int64_t>(shape.layers - first, kMostLayers);
    const LayerRows x = layer_rows(keys, shape, first, count, 1, skip);
    LayerEnergies energy{};
    for (int64_t i = 0; partners && i < count; ++i) {
      energy.data[i] = static_cast<const float*>(energies[first + i].data_ptr());
    }
    Tensor moments = new_tensor(keys[0], {count, heads, x.parts, 2, d}, ScalarType::Float);
    float* part = static_cast<float*>(moments.data_ptr());
    const dim3 grid(x.parts, static_cast<unsigned>(heads), static_cast<unsigned>(count));
    with_width(x, count, keys[0].element_size(), [&](auto width, int threads, int bytes) {
      moments_kernel<width><<<grid, threads, bytes, launch.stream()>>>(x, part);
    });
    center_kernel<<<dim3(static_cast<unsigned>(heads), static_cast<unsigned>(count)),
                    static_cast<unsigned>((d + 31) / 32 * 32), 0, launch.stream()>>>(
        x, part, energy, partners ? static_cast<const int64_t*>(partners->data_ptr()) : nullptr,
        static_cast<float*>(out.data_ptr()) + first * parts * heads * d);
  }
  launch.check("learn_center");
  return out;
}

}  // namespace
}  // namespace turboquant::cuda

STABLE_TORCH_LIBRARY_IMPL(turboquant, CUDA, m) {
  m.impl("query_energy", TORCH_BOX(&turboquant::cuda::query_energy));
  m.impl("learn_center", TORCH_BOX(&turboquant::cuda::learn_center));
}
