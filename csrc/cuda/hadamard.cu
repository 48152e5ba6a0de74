// hadamard: the signed orthonormal Walsh-Hadamard transform of the last dimension (docs/format.md section 2).
//
// The kernel is memory bound: it reads and writes every vector once, 16 bytes at a time, and holds it in registers in
// between.
#include "cuda/codec/transform.cuh"

#include <algorithm>

#include "cuda/common/torch.cuh"

namespace turboquant::cuda {
namespace {

constexpr int kThreads = 64;  // small blocks end soon and make room for the next ones

// The signs of a lane's channels, one bit each. As float32 they would need twice the L1 bandwidth that vectors of a
// 16-bit dtype need.
template <typename Traits>
class LaneSigns {
 public:
  static constexpr int kWords = (Traits::kDim + 31) / 32;

  // A thread's part in writing the signs of all channels to shared memory; the caller synchronises afterwards. The
  // constructor issues the loads of the first channels, all of them for the usual lengths; fill() uses them.
  class Filler {
   public:
    __device__ __forceinline__ explicit Filler(const float* signs) : signs_(signs) {
#pragma unroll
      for (int k = 0; k < kAhead; ++k) ahead_[k] = sign(k);
    }
    __device__ __forceinline__ void fill(uint32_t (&bits)[kWords]) const {
#pragma unroll
      for (int k = 0; k < kAhead; ++k) fill_words(bits, k, ahead_[k]);
#pragma unroll 1
      for (int k = kAhead; k < kTimes; ++k) fill_words(bits, k, sign(k));
    }

   private:
    static constexpr int kTimes = (Traits::kDim + kThreads - 1) / kThreads, kAhead = kTimes < 8 ? kTimes : 8;

    __device__ __forceinline__ float sign(int k) const {
      const int channel = k * kThreads + threadIdx.x;
      return channel < Traits::kDim ? __ldg(signs_ + channel) : 1.0f;
    }
    static __device__ __forceinline__ void fill_words(uint32_t (&bits)[kWords], int k, float sign) {
      const int word = (k * kThreads + threadIdx.x) / 32;
      const uint32_t negative = __ballot_sync(0xffffffff, sign < 0);
      if (threadIdx.x % 32 == 0 && word < kWords) bits[word] = negative;
    }

    const float* signs_;
    float ahead_[kAhead];
  };

  __device__ __forceinline__ LaneSigns(const uint32_t (&bits)[kWords], int lane) {
    constexpr int vec = Traits::kVec;
#pragma unroll
    for (int k = 0; k < Traits::kPerLane / vec; ++k) {
      const int channel = Traits::channel(lane, k);
      uint32_t some = reinterpret_cast<const uint8_t*>(bits)[channel / 8];
      if constexpr (vec < 8) some = some >> channel % 8 & ((1u << vec) - 1);
      uint32_t& word = word_[k * vec / 32];
      word = (k * vec % 32 ? word : 0) | some << k * vec % 32;
    }
  }

  __device__ __forceinline__ void apply(float (&y)[Traits::kPerLane]) const {
#pragma unroll
    for (int i = 0; i < Traits::kPerLane; ++i) {
      y[i] = __uint_as_float(__float_as_uint(y[i]) ^ (word_[i / 32] << (31 - i % 32) & 0x80000000));
    }
  }

 private:
  uint32_t word_[(Traits::kPerLane + 31) / 32];
};

template <typename Traits>
__global__ void __launch_bounds__(kThreads) hadamard_kernel(const void* x, const __grid_constant__ Rows rows,
                                                            const float* signs, bool inverse, Dtype dtype, void* out) {
  const int lane = threadIdx.x % Traits::kLanes;
  const int64_t row = int64_t{blockIdx.x} * (kThreads / Traits::kLanes) + threadIdx.x / Traits::kLanes;
  const bool active = row < rows.count;  // idle threads of the last block take part in the shuffles
  const int64_t from = rows(active ? row : 0), to = row * Traits::kDim;

  __shared__ uint32_t bits[LaneSigns<Traits>::kWords];
  const typename LaneSigns<Traits>::Filler filler(signs);
  float y[Traits::kPerLane];
  load_as<Traits>(x, dtype, from, lane, y);
  filler.fill(bits);
  __syncthreads();
  const LaneSigns<Traits> own(bits, lane);

  if (!inverse) own.apply(y);
  transform<Traits>(y, lane);
  if (inverse) own.apply(y);

  if (!active) return;
  store_as<Traits>(y, lane, out, dtype, to);
}

// x: [..., d] with stride 1 in the last dimension, signs: float32 [d] -> contiguous [..., d]
Tensor hadamard(const Tensor& x, const Tensor& signs, bool inverse) {
  check_float(x, "x");
  check_unit_last_stride(x, "x");
  const int64_t d = x.size(x.dim() - 1);
  const format::Split split = check_vector_dim(d, "x");
  check_constant(signs, x, "signs", ScalarType::Float, {d});

  Tensor out = new_tensor(x, leading_shape(x, 0, {}), x.scalar_type());
  if (x.numel() == 0) return out;

  const int vec = std::min(8, split.block);
  const AlignedRows in(x, word_bytes(vec, x.element_size()));
  const Launch launch(x);
  dispatch_dim(split, [&](auto traits) {
    using Traits = decltype(traits);
    hadamard_kernel<Traits><<<num_blocks(in.rows().count, kThreads / Traits::kLanes), kThreads, 0, launch.stream()>>>(
        in.data(), in.rows(), static_cast<const float*>(signs.data_ptr()), inverse, dtype_of(x), out.data_ptr());
    launch.check("hadamard");
  });
  return out;
}

}  // namespace
}  // namespace turboquant::cuda

STABLE_TORCH_LIBRARY_IMPL(turboquant, CUDA, m) { m.impl("hadamard", TORCH_BOX(&turboquant::cuda::hadamard)); }
