// linear_packed for more tokens than products of codes take: tiles of 32 to 256 tokens, by products of warpgroups
// (wgmma) in float16. A slice is a group of channels of a tile. The slices of all tiles are shared evenly, whatever
// the number of tiles (stream-K, arXiv 2301.03598).
//
// A worker is a cluster of two thread blocks, each of which has half of a tile's outputs, so that activations, which
// both need, are read from the L2 cache once and arrive in both. The slices of all tiles are one list, of which every
// worker has a share, neighbours. Where a share begins or ends within a tile, workers leave their sums in memory, and
// the last one to arrive adds those of all, in the order of the channels: results are the same in every run.
//
// Experts: a column tile is a piece of the pairs of one expert, and where workers begin is found out on the device.
//
// One warpgroup copies packed weights and activations into a ring in shared memory, a slice to a stage. Two or three
// multiply 64 outputs each, a piece of the tile. Their warps expand 32 channels at a time to operands in registers, of
// which they have two: one is expanded while tensor cores multiply the other.
#pragma once

#include "cuda/attention/counters.cuh"
#include "cuda/common/cluster.cuh"
#include "cuda/common/device.cuh"
#include "cuda/linear/tiles/expander.cuh"

namespace turboquant::cuda::linear::tiles {

// What a worker has of a tile.
struct PartOfTile {
  int tile, first, end;  // groups of channels
};

template <int TOKENS, bool BYTES>
class StreamK {
  static constexpr int kWarpgroups = warpgroups_of(TOKENS), kPieces = pieces_of(TOKENS);
  static constexpr int kSlabs = slabs_of(TOKENS);
  static constexpr int kRows = format::kWeightRows * kSlabs;  // of a block's half of a tile
  static constexpr int kSums = TOKENS / 2;                    // of a lane
  static constexpr int kProductRegisters = kWarpgroups == 3 ? 160 : 232;
  static constexpr int kCopyRegisters = kWarpgroups == 3 ? 32 : 40;
  static constexpr int kCopyWarps = 4, kSlabsOfWarp = kSlabs / kCopyWarps;
  static constexpr uint16_t kBoth = (1 << kBlocks) - 1;  // blocks of the cluster

  // The factors of a tile's tokens: a lane has those of the tokens 32 i + lane.
  using Factors = float[TOKENS / 32];

 public:
  __device__ __forceinline__ StreamK(const Call& a, const Plan& p, uint8_t* shared) : a_(a), p_(p), shared_(shared) {
    warp_ = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);  // compilers see that all lanes have one
    worker_ = static_cast<int>(blockIdx.x) / kBlocks, rank_ = static_cast<int>(blockIdx.x) % kBlocks;
    if (!a.has_experts()) set_share(p.column_tiles, p.slices);
    operand_bytes_ = a.block.group / kChannels * TOKENS * kRowBytes;
    unit_bytes_ = a.block.block_bytes(), slab_bytes_ = int64_t{a.groups} * unit_bytes_;
    full_ = reinterpret_cast<uint64_t*>(shared), empty_ = full_ + kMostStages;
  }

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      for (int i = 0; i < p_.stages; ++i) {
        init_barrier(full_ + i, kCopyWarps), init_barrier(empty_ + i, kBlocks * kSlabs);
      }
      barriers_ready();
    }
    if (a_.has_experts()) {
      wait_for_previous_kernel();
      const int pieces = *a_.arranged.totals;
      set_share(pieces, Share(pieces * p_.row_tiles * a_.groups, p_.workers));
    }
    synchronise_cluster();
    if (warp_ < kSlabs) {
      take_registers<kProductRegisters>();
      multiply_all();
    } else {
      leave_registers<kCopyRegisters>();
      copy_all();
    }
    synchronise_cluster();  // until then the other block writes here
  }

 private:
  __device__ __forceinline__ uint8_t* stage(int i) const { return shared_ + kHeaderBytes + i * p_.stage_bytes; }

  // The worker's slices from `slice` on, within a tile.
  __device__ __forceinline__ PartOfTile part_of_tile(int slice) const {
    const int tile = quotient(slice, a_.groups), first = slice - tile * a_.groups;
    return {tile, first, min(a_.groups, first + end_ - slice)};
  }
  // Tiles of the same rows are neighbours, so that their workers read these weights at about the same time. Those of
  // experts have a weight of their own, and are neighbours where they have the same tokens.
  __device__ __forceinline__ int row_tile(int tile) const {
    const int along =
        a_.has_experts() ? tile - quotient(tile, p_.row_tiles) * p_.row_tiles : quotient(tile, column_tiles_);
    return kBlocks * along + rank_;
  }
  __device__ __forceinline__ int column_tile(int tile) const {
    return a_.has_experts() ? quotient(tile, p_.row_tiles) : tile - quotient(tile, column_tiles_) * column_tiles_;
  }
  // Of the factors of activations: the tile's first.
  __device__ __forceinline__ int64_t first_factor(const PartOfTile& s) const {
    return int64_t{column_tile(s.tile)} * TOKENS;
  }
  __device__ __forceinline__ void set_share(int column_tiles, const Share& slices) {
    column_tiles_ = column_tiles, slices_ = slices;
    begin_ = slices.begin(worker_), end_ = slices.begin(worker_ + 1);
  }

  // The tokens of a tile: which rows of y are theirs, and whose weight they are multiplied with.
  struct Tokens {
    int first, weight, count;
  };
  __device__ __forceinline__ Tokens tokens_of(const PartOfTile& s) const {
    if (!a_.has_experts()) {
      const int first = column_tile(s.tile) * TOKENS;
      return {first, 0, min(TOKENS, static_cast<int>(a_.tokens) - first)};
    }
    const Piece piece = a_.arranged.pieces[column_tile(s.tile)];
    return {piece.first, piece.expert, piece.count};
  }
  // Of token i of a tile: its row of y.
  __device__ __forceinline__ int row_of_token(const Tokens& tokens, int i) const {
    return a_.has_experts() ? a_.arranged.order[tokens.first + i] : tokens.first + i;
  }

  // ---- Copies

  // One lane of each warp copies, because several would take one iteration of a loop each: its slabs of weights, and
  // the first warp also half of the activations, to both blocks.
  __device__ __forceinline__ void copy_all() const {
    if (elected()) {
      prefetch_weights();  // they do not depend on the kernel that writes activations
      wait_for_previous_kernel();
      const bool copies_activations = warp_ == kSlabs;
      const int half = operand_bytes_ / kBlocks, from_half = rank_ * half;
      int slot = 0;
      uint32_t phase = 1;  // a fresh barrier counts as past this phase, so the first round does not wait
      for (int slice = begin_; slice < end_;) {
        const PartOfTile s = part_of_tile(slice);
        const int slabs = num_slabs(s), bytes = (copies_activations ? operand_bytes_ : 0) + slabs * unit_bytes_;
        const uint8_t* weights = weights_of(s);
        const uint8_t* activations =
            p_.operands + (int64_t{column_tile(s.tile)} * a_.groups + s.first) * operand_bytes_ + from_half;
        slice += s.end - s.first;
#pragma unroll 1
        for (int group = s.first; group < s.end; ++group) {
          uint8_t* const to = stage(slot);
          wait_barrier(empty_ + slot, phase);
          expect(full_ + slot, bytes);
          if (copies_activations) copy_to_cluster(to + from_half, activations, half, full_ + slot, kBoth);
#pragma unroll
          for (int i = 0; i < kSlabsOfWarp; ++i) {
            if (i < slabs) {
              copy_bulk(to + operand_bytes_ + (first_slab() + i) * unit_bytes_, weights + i * slab_bytes_, unit_bytes_,
                        full_ + slot);
            }
          }
          weights += unit_bytes_, activations += operand_bytes_;
          if (++slot == p_.stages) slot = 0, phase ^= 1;
        }
      }
    }
    __syncwarp();
    let_next_kernel_begin();
  }
  __device__ __forceinline__ void prefetch_weights() const {
    if (begin_ == end_) return;
    const PartOfTile s = part_of_tile(begin_);
    const int slabs = num_slabs(s), bytes = min(p_.stages, s.end - s.first) * unit_bytes_;
    for (int i = 0; i < slabs; ++i) prefetch_bytes(weights_of(s) + i * slab_bytes_, bytes);
  }

  // Of the tile's slabs, those that the warp copies.
  __device__ __forceinline__ int first_slab() const { return kSlabsOfWarp * (warp_ - kSlabs); }
  __device__ __forceinline__ int num_slabs(const PartOfTile& s) const {
    const int64_t rest =
        (a_.n + format::kWeightRows - 1) / format::kWeightRows - (int64_t{row_tile(s.tile)} * kSlabs + first_slab());
    return static_cast<int>(max(int64_t{0}, min(int64_t{kSlabsOfWarp}, rest)));
  }
  __device__ __forceinline__ const uint8_t* weights_of(const PartOfTile& s) const {
    return a_.packed + tokens_of(s).weight * a_.weight_bytes +
           (int64_t{row_tile(s.tile)} * kSlabs + first_slab()) * slab_bytes_ + int64_t{s.first} * unit_bytes_;
  }

  // ---- Products

  __device__ __forceinline__ void multiply_all() const {
    const Expander<BYTES> expander(a_);
    const bool two_halves = a_.block.group == 2 * kChannels;
    const int weights_at = operand_bytes_ + warp_ * unit_bytes_;
    float d[kSums];
    uint32_t operand[2][8];
    int slot = 0, before = -1;
    uint32_t phase = 0;
    wait_for_previous_kernel();  // which writes factors
    if (begin_ == end_) return;
    wait_barrier(full_, 0);
    const uint8_t* unit = stage(0) + weights_at;
    Codes<BYTES> first = expander.template load<0>(unit);
    Scales scales = expander.load_scales(unit);
#pragma unroll 1
    for (int slice = begin_; slice < end_;) {
      const PartOfTile s = part_of_tile(slice);
      const Tokens tokens = tokens_of(s);
      Factors factors;
      load_factors(s, factors);
#pragma unroll 1
      for (int group = s.first; group < s.end; ++group) {
        const uint32_t b = activations_word(stage(slot));
        multiply_group<TOKENS>(expander, unit, first, scales, two_halves, b, group > s.first, operand, d, [&] {
          if (before >= 0) release(before);
        });
        before = slot;
        if (++slot == p_.stages) slot = 0, phase ^= 1;
        if (++slice < end_) {
          wait_barrier(full_ + slot, phase);
          unit = stage(slot) + weights_at;
          first = expander.template load<0>(unit), scales = expander.load_scales(unit);
        }
        wait_for_products<1>();
      }
      wait_for_products<0>();
      receive<kSums>(d);
      release(before), before = -1;
      if (slice == end_) let_next_kernel_begin();
      finish(s, tokens, d, factors);
    }
  }
  // The warp has read a stage: both blocks may write activations to it, each its half.
  __device__ __forceinline__ void release(int slot) const {
    const int lane = threadIdx.x % 32;
    if (lane < kBlocks) arrive_in_cluster(empty_ + slot, lane);
  }

  // ---- Sums of several workers

  __device__ __forceinline__ int warpgroup() const { return warp_ / 4; }
  __device__ __forceinline__ int piece() const { return rank_ * kWarpgroups + warpgroup(); }
  // The lane's sums of a worker: [kSums / 4][threads of the warpgroup][4]. A worker has parts of two tiles at most: of
  // the one that its share ends in, which it begins, and of the one that its share begins in.
  __device__ __forceinline__ float* part(int worker, bool begins_tile) const {
    const int64_t i = int64_t{2 * worker + begins_tile} * kPieces + piece();
    return p_.partial + i * kSums * kWarpgroup + 4 * (threadIdx.x % kWarpgroup);
  }
  static __device__ __forceinline__ void leave(const float (&d)[kSums], float* to) {
#pragma unroll
    for (int i = 0; i < kSums; i += 4) {
      *reinterpret_cast<float4*>(to + i * kWarpgroup) = make_float4(d[i], d[i + 1], d[i + 2], d[i + 3]);
    }
  }
  // d += part, or d = part.
  template <bool ADD>
  static __device__ __forceinline__ void add_part(const float* part, float (&d)[kSums]) {
    constexpr int kLoads = 16;  // on their way at a time: there are registers for so many
#pragma unroll
    for (int first = 0; first < kSums; first += 4 * kLoads) {
      float4 x[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads && first + 4 * i < kSums; ++i) {
        x[i] = __ldcg(reinterpret_cast<const float4*>(part + (first + 4 * i) * kWarpgroup));
      }
#pragma unroll
      for (int i = 0; i < kLoads && first + 4 * i < kSums; ++i) {
        float* const to = d + first + 4 * i;
        to[0] = ADD ? to[0] + x[i].x : x[i].x, to[1] = ADD ? to[1] + x[i].y : x[i].y;
        to[2] = ADD ? to[2] + x[i].z : x[i].z, to[3] = ADD ? to[3] + x[i].w : x[i].w;
      }
      asm volatile("" ::: "memory");  // the next loads come later
    }
  }

  // Adds the sums of all workers; false: another one will.
  __device__ __forceinline__ bool join(const PartOfTile& s, float (&d)[kSums]) const {
    const int first = slices_.owner(s.tile * a_.groups), last = slices_.owner((s.tile + 1) * a_.groups - 1);
    uint32_t* const counter = p_.arrivals + first * kPieces + piece();
    // Whether the sums may stay in registers: two can be added in either order, and of more the first come first.
    const bool holds = worker_ == first || last == first + 1;
    if (!holds || !tell([&] { return others_arrived(counter, last - first); })) {
      leave(d, part(worker_, worker_ == first));
      sync_warpgroup();
      if (!tell([&] { return count_arrival(counter, last - first + 1); })) return false;
    }
    for (int w = first; w <= last; ++w) {
      if (holds && w == worker_) continue;
      if (holds || w > first) {
        add_part<true>(part(w, w == first), d);
      } else {
        add_part<false>(part(w, w == first), d);
      }
    }
    return true;
  }
  // Whether all other workers have left their sums. Then no one else needs the counter, and it is set to 0.
  static __device__ __forceinline__ bool others_arrived(uint32_t* counter, int others) {
    uint32_t count;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
    const bool all = count == static_cast<uint32_t>(others);
    if (all) *counter = 0;
    return all;
  }
  // What one thread finds out, to all of its warpgroup.
  template <typename F>
  __device__ __forceinline__ bool tell(F&& find) const {
    auto* const note = reinterpret_cast<volatile bool*>(shared_ + kHeaderBytes - 16) + warpgroup();
    if (threadIdx.x % kWarpgroup == 0) *note = find();
    sync_warpgroup();
    const bool found = *note;
    sync_warpgroup();  // before the next note
    return found;
  }
  __device__ __forceinline__ void sync_warpgroup() const { sync_threads(1 + warpgroup(), kWarpgroup); }

  // ---- Results
  //
  // The sums of a lane are, for 8 tokens each, those of outputs g and g + 8 of its warp and of tokens 2 t and 2 t + 1.

  __device__ __forceinline__ void finish(const PartOfTile& s, const Tokens& tokens, float (&d)[kSums],
                                         const Factors& factors) const {
    const int64_t row = int64_t{row_tile(s.tile)} * kRows + format::kWeightRows * warp_;  // the warp's first output
    if (row - format::kWeightRows * (warp_ % 4) >= a_.n) return;
    const bool shared = s.end - s.first < a_.groups;
    if (shared && !join(s, d)) return;
    if (a_.n % 2 == 0 && a_.dtype == Dtype::kBFloat16) {
      return store_pairs<__nv_bfloat16>(tokens, row, d, factors);
    }
    if (a_.n % 2 == 0 && a_.dtype == Dtype::kFloat16) return store_pairs<__half>(tokens, row, d, factors);
    // Memory that no other worker reads any more, or yet.
    float* const own = part(worker_, !shared || worker_ == slices_.owner(s.tile * a_.groups));
    leave(d, own);
    store_singly(s, tokens, row, own);
  }

  __device__ __forceinline__ void load_factors(const PartOfTile& s, Factors& factors) const {
    const float* const from = p_.factors + first_factor(s) + threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < TOKENS / 32; ++i) factors[i] = __ldcg(from + 32 * i);
  }
  __device__ __forceinline__ float bias_of(const Tokens& tokens, int64_t row) const {
    return a_.bias && row < a_.n ? load_float(a_.bias, a_.dtype, tokens.weight * a_.n + row) : 0.0f;
  }

  // Two neighbouring outputs at a time.
  template <typename T>
  __device__ __forceinline__ void store_pairs(const Tokens& tokens, int64_t row, const float (&d)[kSums],
                                              const Factors& factors) const {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const float bias[2] = {bias_of(tokens, row + g), bias_of(tokens, row + g + 8)};
    // Rows of y: a lane has those of tokens 32 i + lane, which are loaded before any result is stored.
    int row_of[TOKENS / 32];
#pragma unroll
    for (int i = 0; i < TOKENS / 32; ++i) {
      const int token = 32 * i + static_cast<int>(threadIdx.x) % 32;
      row_of[i] = a_.has_experts() && token < tokens.count ? row_of_token(tokens, token) : 0;
    }
    const auto rows = static_cast<int>(min(int64_t{format::kWeightRows}, a_.n - row));
    T* const y = static_cast<T*>(a_.y) + row + 2 * t;
#pragma unroll
    for (int i = 0; i < TOKENS / 8; ++i) {
      const int lane = 8 * (i % 4) + 2 * t;
      const float factor[2] = {__shfl_sync(0xffffffff, factors[i / 4], lane),
                               __shfl_sync(0xffffffff, factors[i / 4], lane + 1)};
      int to_row = tokens.first + 8 * i + g;
      if (a_.has_experts()) to_row = __shfl_sync(0xffffffff, row_of[i / 4], 8 * (i % 4) + g);
      T* const to = y + int64_t{to_row} * a_.n;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float* const sum = d + 4 * i + 2 * h;
        const uint32_t word = transposed(word_of_floats<T>(sum[0] * factor[0] + bias[h], sum[1] * factor[1] + bias[h]));
        if (8 * i + g < tokens.count && 8 * h + 2 * t < rows) *reinterpret_cast<uint32_t*>(to + 8 * h) = word;
      }
    }
  }
  // Any dtype and any number of outputs, with sums from memory, so that this code is a short loop. sums: the lane's.
  __device__ __forceinline__ void store_singly(const PartOfTile& s, const Tokens& tokens, int64_t row,
                                               const float* sums) const {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const float* const factors = p_.factors + first_factor(s);
    const float bias[2] = {bias_of(tokens, row + g), bias_of(tokens, row + g + 8)};
#pragma unroll 1
    for (int i = 0; i < TOKENS / 8; ++i) {
      const float2 factor = __ldcg(reinterpret_cast<const float2*>(factors + 8 * i + 2 * t));
      const float4 x = *reinterpret_cast<const float4*>(sums + 4 * i * kWarpgroup);
      const float sum[2][2] = {{x.x * factor.x, x.y * factor.y}, {x.z * factor.x, x.w * factor.y}};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int token = 8 * i + 2 * t + j;
          const int64_t output = row + g + 8 * h;
          if (token < tokens.count && output < a_.n) {
            store_float(a_.y, a_.dtype, int64_t{row_of_token(tokens, token)} * a_.n + output, sum[h][j] + bias[h]);
          }
        }
      }
    }
  }

  const Call& a_;
  const Plan& p_;
  uint8_t* shared_;
  uint64_t *full_, *empty_;  // a stage holds a slice; it may be written
  int warp_, worker_, rank_;
  int column_tiles_;
  Share slices_;     // of all workers
  int begin_, end_;  // of the worker
  int operand_bytes_, unit_bytes_;
  int64_t slab_bytes_;  // of 16 rows
};

template <int TOKENS, bool BYTES>
__global__ void __launch_bounds__(threads_of(TOKENS), 1)
    stream_k_kernel(const __grid_constant__ Call a, const __grid_constant__ Plan p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t shared[];
  StreamK<TOKENS, BYTES>(a, p, shared).run();
#endif
}

}  // namespace turboquant::cuda::linear::tiles
