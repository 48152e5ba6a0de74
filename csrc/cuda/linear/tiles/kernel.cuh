// linear_packed for up to 128 tokens: tiles of 256 outputs and 64 or 128 tokens, on tensor cores that multiply float16
// of warpgroups.
//
// A ring in shared memory holds packed weights and activations of a group of channels in each stage. Every warp copies
// the 16 rows that are its own, and the first one activations for all. Warps expand 32 channels at a time to operands
// in registers, of which they have two: one is expanded while tensor cores multiply the other. Where rows and tokens
// are too few to occupy all multiprocessors, the thread blocks of a cluster share the channels of a tile. Each of them
// adds the sums of some tokens, in the order of the blocks: results are the same in every run.
#pragma once

#include "cuda/common/cluster.cuh"
#include "cuda/common/device.cuh"
#include "cuda/linear/tiles/expander.cuh"

namespace turboquant::cuda::linear::tiles {

template <int TOKENS, bool BYTES>
class Tile {
  static constexpr int kSlabs = kTileSlabs, kRows = format::kWeightRows * kSlabs, kThreads = kTileThreads;
  static constexpr int kSums = TOKENS / 2;  // of a lane

 public:
  __device__ __forceinline__ Tile(const Call& a, const Plan& p, uint8_t* shared) : a_(a), p_(p), shared_(shared) {
    const int tile = quotient(static_cast<int>(blockIdx.x), p.parts);
    part_ = static_cast<int>(blockIdx.x) - tile * p.parts;
    row_tile_ = quotient(tile, p.column_tiles), column_tile_ = tile - row_tile_ * p.column_tiles;
    first_ = quotient(a.groups * part_, p.parts), end_ = quotient(a.groups * (part_ + 1), p.parts);
    halves_ = a.block.group / kChannels;
    operand_bytes_ = halves_ * TOKENS * kRowBytes;
    full_ = reinterpret_cast<uint64_t*>(shared), empty_ = full_ + kMostStages;
    warp_ = threadIdx.x / 32;
    const int64_t slab = int64_t{row_tile_} * kSlabs + warp_;
    unit_bytes_ = a.block.block_bytes();
    weights_at_ = operand_bytes_ + warp_ * unit_bytes_;
    weights_ = a.packed + slab * a.groups * unit_bytes_;
    copy_bytes_ = slab * format::kWeightRows < a.n ? unit_bytes_ : 0;
  }

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      for (int i = 0; i < p_.stages; ++i) init_barrier(full_ + i, kSlabs), init_barrier(empty_ + i, kSlabs);
      barriers_ready();
    }
    __syncthreads();
    multiply();
    finish();
  }

 private:
  __device__ __forceinline__ uint8_t* stage(int i) const { return shared_ + kHeaderBytes + i * p_.stage_bytes; }

  // ---- Copies: each warp copies its own rows, and the first one activations, too.

  __device__ __forceinline__ Run weights(int group, int slot) const {
    return {stage(slot) + weights_at_, weights_ + int64_t{group} * unit_bytes_, copy_bytes_};
  }
  __device__ __forceinline__ Run activations(int group, int slot) const {
    const int64_t from = (int64_t{column_tile_} * a_.groups + group) * operand_bytes_;
    return {stage(slot), p_.operands + from, operand_bytes_};
  }
  __device__ __forceinline__ void copy(int group, int slot) const {
    if (warp_ == 0) {
      const Run runs[2] = {weights(group, slot), activations(group, slot)};
      fill_slot(full_ + slot, runs);
    } else {
      const Run runs[1] = {weights(group, slot)};
      fill_slot(full_ + slot, runs);
    }
  }
  // Weights do not wait for the kernel that writes activations.
  __device__ __forceinline__ void fill_ring() const {
    const int ahead = min(p_.stages, end_ - first_);
    if (warp_ == 0) {
      for (int i = 0; i < ahead; ++i) prefetch_weights(first_ + i);
      wait_for_previous_kernel();
    }
    for (int i = 0; i < ahead; ++i) copy(first_ + i, i);
  }
  __device__ __forceinline__ void prefetch_weights(int group) const {
    if (threadIdx.x == 0) prefetch_bytes(weights_ + int64_t{group} * unit_bytes_, unit_bytes_);
  }

  // ---- Products

  __device__ __forceinline__ void multiply() {
    fill_ring();
    const Expander<BYTES> expander(a_);
    float d[kSums];
    uint32_t operand[2][8];
    int slot = 0, before = -1;
    uint32_t phase = 0, empty_phase = 0;
    wait_barrier(full_, 0);
    const uint8_t* unit = stage(0) + weights_at_;
    Codes<BYTES> first = expander.template load<0>(unit);
    Scales scales = expander.load_scales(unit);
#pragma unroll 1
    for (int group = first_; group < end_; ++group) {
      const uint32_t b = activations_word(stage(slot));
      multiply_group<TOKENS>(expander, unit, first, scales, halves_ == 2, b, group > first_, operand, d, [&] {
        if (before >= 0 && threadIdx.x % 32 == 0) arrive(empty_ + before);
      });
      refill(group, slot, before, empty_phase);
      before = slot;
      if (++slot == p_.stages) slot = 0, phase ^= 1;
      if (group + 1 < end_) {
        wait_barrier(full_ + slot, phase);
        unit = stage(slot) + weights_at_;
        first = expander.template load<0>(unit), scales = expander.load_scales(unit);
      }
      wait_for_products<1>();
    }
    let_next_kernel_begin();
    wait_for_products<0>();
    receive<kSums>(d);
    __syncthreads();  // the ring has been read, and nothing is on its way into it
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float* const to = sums() + 16 * warp_ + g;
#pragma unroll
    for (int i = 0; i < kSums; ++i) to[(8 * (i / 4) + 2 * t + i % 2) * kSumStride + i % 4 / 2 * 8] = d[i];
  }

  // Starts the next copies. The warp has read its weights of `slot`, which were those of `group`. Activations of the
  // slot before it have been read by now, by all warps or by most.
  __device__ __forceinline__ void refill(int group, int slot, int before, uint32_t& empty_phase) const {
    int next = group + p_.stages;
    if (warp_ == 0) {
      if (before < 0) return;
      --next, slot = before;
      if (next < end_) wait_barrier(empty_ + before, empty_phase);
      if (before + 1 == p_.stages) empty_phase ^= 1;
    }
    __syncwarp();
    if (next < end_) copy(next, slot);
  }

  // ---- Results

  __device__ __forceinline__ float* sums() const { return reinterpret_cast<float*>(shared_ + kHeaderBytes); }

  __device__ __forceinline__ float* factors() const { return sums() + TOKENS * kSumStride; }

  __device__ __forceinline__ void finish() const {
    const int64_t token = int64_t{column_tile_} * TOKENS;
    wait_for_previous_kernel();  // which wrote the factors
    if (threadIdx.x < TOKENS && token + threadIdx.x < a_.tokens) {
      factors()[threadIdx.x] = __ldcg(p_.factors + token + threadIdx.x);
    }
    __syncthreads();
    if (p_.parts > 1) synchronise_cluster();
    with_float_type(a_.dtype, [&](auto tag) { store<typename decltype(tag)::type>(token); });
    if (p_.parts > 1) synchronise_cluster();  // others read this block's sums until then
  }

  // A thread stores four outputs of every kStep-th token of those that are the block's to add.
  template <typename T>
  __device__ __forceinline__ void store(int64_t token) const {
    constexpr int kQuads = kRows / 4, kStep = kThreads / kQuads;
    const int inside = static_cast<int>(threadIdx.x) % kQuads * 4;
    const int64_t row = int64_t{row_tile_} * kRows + inside;
    if (row >= a_.n) return;
    const int count = static_cast<int>(min(int64_t{4}, a_.n - row));
    float bias[4] = {};
    if (a_.bias) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j < count) bias[j] = static_cast<float>(static_cast<const T*>(a_.bias)[row + j]);
      }
    }
    T* const to = static_cast<T*>(a_.y) + token * a_.n + row;
    const auto store_one = [&](int i, const float4& sum) {
      const float factor = factors()[i];
      const float y[4] = {sum.x * factor + bias[0], sum.y * factor + bias[1], sum.z * factor + bias[2],
                          sum.w * factor + bias[3]};
      T* const here = to + i * a_.n;
      if (a_.n % 4 == 0) {
        store_floats<4>(y, here);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (j < count) here[j] = static_cast<T>(y[j]);
        }
      }
    };
    const int begin = quotient(TOKENS * part_, p_.parts) + static_cast<int>(threadIdx.x) / kQuads;
    const int end = static_cast<int>(min(int64_t{quotient(TOKENS * (part_ + 1), p_.parts)}, a_.tokens - token));
    const float* const from = sums() + inside;
    if (p_.parts == 1) {
#pragma unroll 8
      for (int i = begin; i < end; i += kStep) {
        store_one(i, *reinterpret_cast<const float4*>(from + i * kSumStride));
      }
    } else {
#pragma unroll 1
      for (int i = begin; i < end; i += kStep) store_one(i, sum_of_parts(from + i * kSumStride));
    }
  }

  __device__ __forceinline__ float4 sum_of_parts(const float* from) const {
    float4 x[kMostParts];
#pragma unroll
    for (int part = 0; part < kMostParts; ++part) {
      if (part < p_.parts) x[part] = load_from_cluster(from, part);
    }
    float4 sum = x[0];
#pragma unroll
    for (int part = 1; part < kMostParts; ++part) {
      if (part >= p_.parts) break;
      sum.x += x[part].x, sum.y += x[part].y, sum.z += x[part].z, sum.w += x[part].w;
    }
    return sum;
  }

  const Call& a_;
  const Plan& p_;
  uint8_t* shared_;
  uint64_t *full_, *empty_;
  int warp_, part_, row_tile_, column_tile_, halves_;
  int first_, end_;  // groups of channels
  // The warp's rows: where they stand, in a stage, too.
  const uint8_t* weights_;
  int unit_bytes_, operand_bytes_, weights_at_, copy_bytes_;
};

template <int TOKENS, bool BYTES>
__global__ void __launch_bounds__(kTileThreads, 1)
    tiles_kernel(const __grid_constant__ Call a, const __grid_constant__ Plan p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t shared[];
  Tile<TOKENS, BYTES>(a, p, shared).run();
#endif
}

}  // namespace turboquant::cuda::linear::tiles
