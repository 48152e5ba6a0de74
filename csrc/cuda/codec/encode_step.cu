// The kernel that encodes few vectors: the keys and values of a decode step into page records. (codec/encode_bulk.cuh
// is for many vectors.)
//
// The kernel ends before the instruction cache is warm, so the number of instructions and the length of dependency
// chains set its time. A warp holds a vector, four channels in a lane; a block has keys or values.
//
// * The parameters fill two lines of the constant cache, so that a miss costs one fetch.
// * All loads are issued before the first of them is waited for.
// * A single candidate has a kernel of its own, in which no warp waits for another.
// * Shuffles put the stored words of four channels together, and they are stored from registers.
//
// The bytes are those of codec/generic.cuh. Parameters and codes of four channels are encode_step_codes.cuh, a vector
// and its candidates encode_step_vector.cuh; here are 8-bit codes, the exact tail and the kernel.
#include "cuda/codec/encode_step_vector.cuh"
#include "cuda/common/torch.cuh"

namespace turboquant::cuda {
namespace {

using namespace encode_step;

// ---- Candidates for 8-bit codes -------------------------------------------------------------------------------------

// The sums of a lane's coordinates under a candidate for 8-bit codes.
template <typename Traits>
struct TriedBytes {
  uint32_t dot = 0, squares = 0;

  __device__ __forceinline__ TriedBytes(const ByteQuad (&quads)[Traits::kChunks], const ByteSteps& steps) {
#pragma unroll
    for (int q = 0; q < Traits::kChunks; ++q) {
      const uint32_t level = quads[q].magnitudes(steps);
      squares = __dp4a(level, level, squares);
      dot = __dp2a_lo(quads[q].size[0], level, dot);
      dot = __dp2a_hi(quads[q].size[1], level, dot);
      if constexpr (Traits::kDim > 128) dot += __dp4a(quads[q].over, level, 0u) << 16;
    }
  }
};

// As Candidates.
template <typename Traits>
struct ByteCandidates {
  int dot = 0, squares = 0;

  __device__ __forceinline__ ByteCandidates(const ByteQuad (&quads)[Traits::kChunks], const float* step, int steps,
                                            int lane) {
#pragma unroll 1
    for (int first = 0; first < steps; first += kUnroll) {
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const TriedBytes<Traits> tried(quads, ByteSteps(step[first + i]));
        const int all_d = sum_of_lanes<Traits::kLanes>(static_cast<int>(tried.dot));
        const int all_b = sum_of_lanes<Traits::kLanes>(static_cast<int>(tried.squares));
        if (lane == first + i) dot = all_d, squares = all_b;
      }
    }
    if (lane >= steps) dot = squares = 0;
  }
};

// ---- The exact tail -------------------------------------------------------------------------------------------------

__device__ __forceinline__ int64_t load_slot(const void* slots, bool wide, int64_t i) {
  return wide ? __ldg(static_cast<const int64_t*>(slots) + i) : __ldg(static_cast<const int32_t*>(slots) + i);
}

// A token's row of the tail: its loads are issued early, and used later. slot: -1 if the token has no sequence.
struct TailPlace {
  int64_t slot = -1;
  int length, from_end;  // its distance to the sequence's end

  TailPlace() = default;
  __device__ __forceinline__ TailPlace(const StepTail& tail, int token) {
    if (tail.seqs == 0) return;
    int s = token, end = token + 1;
    if (tail.begins) s = sequence_of(tail.begins, tail.seqs, token), end = tail.begins[s + 1];
    if (s >= tail.seqs || token >= end) return;
    slot = load_slot(tail.slots, tail.wide_slots, s * tail.slot_stride), length = __ldg(tail.lengths + s),
    from_end = end - token;
  }

  // The address of the token's key (kind 0) or value, null if the tail does not keep it.
  __device__ __forceinline__ uint8_t* at(const StepTail& tail, uint32_t head, int kind, int bytes) const {
    const int64_t position = int64_t{length} - from_end;
    const int ring = tail.rows - tail.sink_tokens;
    if (static_cast<uint64_t>(slot) >= tail.max_seqs || position < 0) return nullptr;
    if (!format::tail_keeps(position, length, tail.sink_tokens, ring)) return nullptr;
    const uint32_t row = format::tail_row<int>(static_cast<int>(position), tail.sink_tokens, ring);
    return tail.data +
           format::tail_offset_32(static_cast<uint32_t>(slot), tail.stride, head, row, tail.rows, bytes, kind);
  }
};

// ---- A token's record -----------------------------------------------------------------------------------------------

// Where the codes and the scale of a lane's vector go, as Pages::token computes it.
struct StepPlace {
  bool stored;      // whether the token exists and has a slot
  uint32_t number;  // the token's, in its tile
  uint64_t tile;    // bytes from a.pages, as the next two
  uint64_t codes, scale;

  __device__ __forceinline__ StepPlace(const StepArguments& a, int64_t slot, bool exists, uint32_t head,
                                       uint32_t scales, const StepTarget& target) {
    const uint64_t page = static_cast<uint64_t>(slot >> a.page_shift);
    stored = exists && page < a.num_pages;
    const uint32_t offset = static_cast<uint32_t>(slot) & ((1u << a.page_shift) - 1);
    number = offset & ((1u << a.tile_shift) - 1);
    tile = format::record_offset_32(static_cast<uint32_t>(page), head, a.page_stride, a.record_bytes) +
           (offset >> a.tile_shift) * a.tile_bytes;
    codes = tile + target.of_token(number), scale = tile + scales + 2 * number;
    asm volatile("" : "+l"(codes), "+l"(scale));  // computes both here, where there is time
  }
};

// ---- The kernel -----------------------------------------------------------------------------------------------------

// Shared memory: the candidates of the block, or (one candidate) a copy for every warp, so that no warp waits for
// another.
template <int QUADS, bool SEARCH>
struct StepShared {
  PairBoundaries boundaries[SEARCH ? kMostCandidates : kWarps];
  PairLevels levels[SEARCH ? 1 : kWarps];
  float step[kMostCandidates];
  uint16_t selectors[SEARCH ? kWarps : 1][kMostCandidates][QUADS][32];
};

// Stores the codes of a lane's channels, which have up to 5 bits. selector: their magnitudes.
template <typename Traits>
__device__ __forceinline__ void store_codes(uint8_t* pages, const StepPlace& at, const StepTarget& target, int kind,
                                            Width width, int section, const Quad (&quads)[Traits::kChunks],
                                            const uint32_t (&selector)[Traits::kChunks], bool finite, int lane) {
  const bool stored = at.stored && target.is_owner;
#pragma unroll
  for (int q = 0; q < Traits::kChunks; ++q) {
    const QuadCodes codes(quads[q], selector[q], width, finite);
    uint8_t* to = pages + at.codes + q * target.quad;
    if (kind == 0) {
      put_step_key(codes.low, codes.high, width, lane, stored, to,
                   pages + at.tile + section + at.number * (Traits::kDim / 8) + q * (Traits::kLanes / 2));
    } else {
      put_step_value(codes.low, width, lane, stored, to, 4 * target.stride);
    }
  }
}

// Chooses and stores 8-bit codes. own_step: the step of the only candidate; all_steps: of several, in shared memory.
// The lane `kept` gets the fit.
template <typename Traits, bool SEARCH>
__device__ __forceinline__ Fit store_byte_codes(uint8_t* pages, const StepPlace& at, const StepTarget& target, int kind,
                                                int num_steps, const StepVector<Traits>& vector, float own_step,
                                                const float (&all_steps)[kMostCandidates], int lane, int& kept) {
  constexpr int kLanes = Traits::kLanes;
  ByteQuad quads[Traits::kChunks];
#pragma unroll
  for (int q = 0; q < Traits::kChunks; ++q) quads[q] = ByteQuad(vector.y + 4 * q, vector.scaled.k);
  Fit fit;
  if constexpr (SEARCH) {
    __syncthreads();
    const ByteCandidates<Traits> sums(quads, all_steps, num_steps, lane);
    fit = Fit::of_sums(sums.dot, sums.squares, all_steps[lane % kMostCandidates]);
    kept = best_lane<kLanes>(fit, threadIdx.x % 32 - lane);
  } else {
    const TriedBytes<Traits> tried(quads, ByteSteps(own_step));
    fit = Fit::of_sums(sum_of_lanes<kLanes>(static_cast<int>(tried.dot)),
                       sum_of_lanes<kLanes>(static_cast<int>(tried.squares)), own_step);
  }
  const ByteSteps steps(SEARCH ? all_steps[kept] : own_step);
#pragma unroll
  for (int q = 0; q < Traits::kChunks; ++q) {
    const uint32_t codes = vector.finite ? quads[q].codes(steps) : 0;
    uint8_t* to = pages + at.codes + q * target.quad;
    if (!at.stored) continue;
    if (kind == 0) {
      *reinterpret_cast<uint32_t*>(to) = codes;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) to[4 * target.stride * i] = static_cast<uint8_t>(codes >> 8 * i);
    }
  }
  return fit;
}

// BYTES: keys or values, or both, have 8-bit codes.
template <typename Traits, bool SEARCH, bool BYTES>
__global__ void __launch_bounds__(32 * kWarps) encode_step_kernel(const __grid_constant__ StepArguments a) {
  let_next_kernel_begin();
  constexpr int kLanes = Traits::kLanes, kQuads = Traits::kChunks, kVectors = 32 / kLanes;  // of a warp
  constexpr int kPerLane = Traits::kPerLane, kDim = Traits::kDim;
  __shared__ __align__(16) StepShared<kQuads, SEARCH> shared;
  unsigned thread = threadIdx.x;
  asm volatile("" : "+r"(thread));  // keeps the compiler from reading the register again and again
  const int kind = blockIdx.z, warp = thread / 32, lane = thread % kLanes, own = thread % 32;
  const uint32_t head = blockIdx.y;
  const StepSource& source = a.source[kind];
  const uint32_t token = blockIdx.x * (kWarps * kVectors) + thread / kLanes;
  const bool exists = token < a.tokens;

  // All loads are issued before the first of them is waited for.
  const uint32_t readable = exists ? token : 0;
  const uint8_t* from = source.data + uint64_t{readable} * source.token_stride + uint64_t{head} * source.head_stride;
  uint32_t word[kQuads][2];
  load_words<Traits>(from, lane, word);
  const int64_t slot = load_slot(a.slots, a.wide_slots, readable);
  float signs[kPerLane], center[kPerLane] = {}, factor[kPerLane] = {};
  load<Traits>(source.signs, lane, signs);
  if (source.center) load<Traits>(source.center + head * kDim, lane, center);
  if (source.factor) load<Traits>(source.factor + head * kDim, lane, factor);
  const int number_s = SEARCH ? thread / kMostBoundaries : 0, number_j = thread % kMostBoundaries;
  const PairEntry entry(source.bits, source.levels, source.steps, source.num_steps, number_s, number_j);
  TailPlace kept_at;
  if (a.has_tail) kept_at = TailPlace(a.tail, static_cast<int>(token));

  // Independent work, to hide the latency of the loads.
  const Width width = source.width();
  const bool is_bytes = BYTES && format::levels_are_codes(width);
  StepTarget target = kind == 0 ? StepTarget::of_key<kDim, kLanes>(width, lane)
                                : StepTarget::of_value<kDim, kLanes>(width, lane, source.section);
  if (is_bytes) target = StepTarget::of_bytes<kDim, kLanes>(kind, lane, source.section);

  float x[kPerLane], y[kPerLane];
  prepare_channels<Traits>(word, a.is_half, source.center, center, source.factor, factor, signs, x);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) y[i] = x[i];
  butterflies<Traits>(y, lane);
  // The codebook and the token's address: independent work, to hide the latency of the shuffles.
  if constexpr (SEARCH) {
    if (number_s < kMostCandidates) {  // there are more threads than entries
      shared.boundaries[number_s].at[number_j] = entry.boundary();
      if (number_j == 0) shared.step[number_s] = entry.step;
      if (number_s == 0) shared.levels[0].of[number_j] = entry.level();
    }
  } else {  // two lanes write the same entry
    shared.boundaries[warp].at[number_j] = entry.boundary();
    shared.levels[warp].of[number_j] = entry.level();
  }
  __syncwarp();

  const StepPlace at(a, slot, exists, head, source.scales, target);
  const ScaleMode mode = source.scale_mode();
  const StepVector<Traits> vector(x, y, lane);
  // Stores the scale, and the vector in the tail. kept: the lane that has the fit.
  const auto finish = [&](const Fit& fit, int kept) {
    const uint16_t scale = vector.scale(fit, mode);
    if (at.stored && lane == kept) *reinterpret_cast<uint16_t*>(a.pages + at.scale) = scale;
    if (a.has_tail && at.stored) {
      uint8_t* to = kept_at.at(a.tail, head, kind, 2 * kDim);
      if (!to) return;
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        reinterpret_cast<uint2*>(to)[lane + 32 * q] = make_uint2(word[q][0], word[q][1]);
      }
    }
  };
  if constexpr (BYTES) {
    if (is_bytes) {
      int kept = 0;
      const Fit fit = store_byte_codes<Traits, SEARCH>(a.pages, at, target, kind, source.num_steps, vector, entry.step,
                                                       shared.step, lane, kept);
      return finish(fit, kept);
    }
  }

  // With one candidate, a warp reads its own codebook before the coordinates are ready.
  const PairBoundaries* boundaries = shared.boundaries + (SEARCH ? 0 : warp);
  const uint4* first_from = reinterpret_cast<const uint4*>(boundaries->at);
  const uint4* levels_from = reinterpret_cast<const uint4*>(shared.levels[SEARCH ? 0 : warp].of);
  uint4 first[2];
  QuadLevels levels;
  if constexpr (!SEARCH) first[0] = first_from[0], first[1] = first_from[1], levels.word = *levels_from;
  Quad quads[kQuads];
#pragma unroll
  for (int q = 0; q < kQuads; ++q) quads[q] = Quad(y + 4 * q, vector.scaled.k);

  if constexpr (SEARCH) {
    __syncthreads();
    levels.word = *levels_from;
  }
  uint32_t selector[kQuads];
  int dot, level_squares, kept = 0;
  float step = entry.step;
  if constexpr (SEARCH) {
    const auto keep = [&](const auto& tried) { dot = tried.dot, level_squares = tried.squares; };
    if (format::fits_nibble(width)) {
      keep(Candidates<Traits, false>(quads, boundaries, levels, source.num_steps, lane, shared.selectors[warp], own));
    } else {
      keep(Candidates<Traits, true>(quads, boundaries, levels, source.num_steps, lane, shared.selectors[warp], own));
    }
    step = shared.step[lane % kMostCandidates];
  } else {
    const auto keep = [&](const auto& tried) {
      dot = tried.dot, level_squares = tried.squares;
#pragma unroll
      for (int q = 0; q < kQuads; ++q) selector[q] = tried.selector[q];
    };
    if (format::fits_nibble(width)) [[likely]] {
      keep(Tried<Traits, false>(quads, *boundaries, levels, first));
    } else {
      keep(Tried<Traits, true>(quads, *boundaries, levels, first));
    }
    dot = sum_of_lanes<kLanes>(dot), level_squares = sum_of_lanes<kLanes>(level_squares);
  }
  Fit fit;
  if constexpr (SEARCH) {
    fit = Fit::of_sums(dot, level_squares, step);
    kept = best_lane<kLanes>(fit, own - lane);
#pragma unroll
    for (int q = 0; q < kQuads; ++q) selector[q] = shared.selectors[warp][kept][q][own];
  }

  store_codes<Traits>(a.pages, at, target, kind, width, source.section, quads, selector, vector.finite, lane);
  // The scale comes after the codes, so that their stores are under way while it is computed.
  if constexpr (!SEARCH) fit = Fit::of_sums(dot, level_squares, step);
  finish(fit, kept);
}

// ---- Host side ------------------------------------------------------------------------------------------------------

// The choice has made sure that all numbers fit.
StepArguments step_arguments(const EncodeArguments& a) {
  StepArguments step = {a.slots.data,
                        a.pages.data,
                        static_cast<uint32_t>(a.tokens),
                        static_cast<uint32_t>(a.heads),
                        static_cast<uint32_t>(a.pages.num_pages),
                        a.pages.page_stride,
                        static_cast<uint32_t>(a.layout.record_bytes),
                        static_cast<uint32_t>(a.layout.tile_bytes),
                        static_cast<uint8_t>(a.layout.page_shift),
                        static_cast<uint8_t>(a.layout.tile_shift),
                        a.tail.data != nullptr,
                        a.slots.wide,
                        a.dtype == Dtype::kFloat16,
                        {},
                        {}};
  for (int kind = 0; kind < 2; ++kind) {
    const EncodeSource& source = a.source[kind];
    const Codebook& book = source.book;
    step.source[kind] = {source.data,
                         source.signs,
                         source.channels.center,
                         source.channels.scale,
                         book.levels,
                         book.steps,
                         static_cast<uint32_t>(source.token_stride),
                         static_cast<uint32_t>(source.head_stride),
                         static_cast<uint16_t>(kind == 0 ? a.layout.key_planes : a.layout.value_blocks),
                         static_cast<uint16_t>(kind == 0 ? a.layout.key_scales : a.layout.value_scales),
                         static_cast<uint8_t>(book.width),
                         static_cast<uint8_t>(book.num_steps),
                         static_cast<uint8_t>(book.scale_mode)};
  }
  if (a.tail.data) {
    const Tail& tail = a.tail;
    step.tail = {tail.data,
                 tail.slots.data,
                 tail.lengths,
                 tail.begins,
                 static_cast<int>(tail.seqs),
                 tail.rows,
                 tail.sink_tokens,
                 static_cast<uint32_t>(tail.max_seqs),
                 tail.stride,
                 tail.slot_stride,
                 tail.slots.wide};
  }
  return step;
}

}  // namespace

void launch_encode_step(const EncodeArguments& a, int head_dim, cudaStream_t stream) {
  const StepArguments step = step_arguments(a);
  const bool search = step.source[0].num_steps > 1 || step.source[1].num_steps > 1;
  const bool bytes =
      format::levels_are_codes(a.source[0].book.width) || format::levels_are_codes(a.source[1].book.width);
  dispatch_bulk(a.dtype, head_dim, [&](auto log_d, auto) {
    using Traits = StepTraits<log_d>;
    const dim3 grid(num_blocks(a.tokens, kWarps * 32 / Traits::kLanes), static_cast<unsigned>(a.heads), 2);
    const auto kernel = bytes
                            ? search ? encode_step_kernel<Traits, true, true> : encode_step_kernel<Traits, false, true>
                        : search ? encode_step_kernel<Traits, true, false>
                                 : encode_step_kernel<Traits, false, false>;
    kernel<<<grid, 32 * kWarps, 0, stream>>>(step);
  });
}

}  // namespace turboquant::cuda
