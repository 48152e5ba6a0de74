// Gathers the older tokens of sequences for the kernel of prompts (prompts.cuh): decodes their codes, and copies the
// rows of their exact tails beside them, to memory where all is exact keys and values.
//
// A tile of rows that reads codes rotates its queries and its sums, which takes as long as 1,000 keys, and expands each
// code once more. Behind a short prefix that is most of its work. Decoded once for all tiles of rows, a token costs
// less, and what attends to it is dense attention. It takes memory, so only sequences with few older tokens have room.
//
// All blocks derive from the lengths which sequences have room, in their order, and where; the first one writes it
// down for the kernels that follow. Gathered rows of a sequence, each part of them a multiple of 16:
//   positions [begin, coded_end), decoded, without the center, which scores take in as one number for each query
//   sinks, and positions [tail_begin, tail_end), which some queries have in their recent windows, and others read from
//   codes: copied from the tail
#pragma once

#include "cuda/attention/row_tiles/chunks.cuh"
#include "cuda/codec/decode_bulk_spans.cuh"

namespace turboquant::cuda::row_tiles {

// A sequence that is gathered
struct Gathered {
  int sequence, row;  // its first row
  int coded_rows;     // rows that are decoded; those of copies follow
  OlderTokens tokens;
  int first_span, first_copy;  // of all spans of 16 rows that are decoded, and that are copied
};
constexpr int kMostGathered = 192;
// Behind the last sequence: a tile reaches into what follows it, where nothing may be that is not finite, which takes
// time (Consumer::guard_values).
constexpr int kZeroRows = 128;

// Which sequences are gathered, as every block finds it for itself.
struct GatherList {
  Gathered of[kMostGathered + 1];  // behind the last one, rows of zeros
  int count, rows, spans, copies;

  // The sequence that has span i of those counted by FIRST.
  template <int Gathered::* FIRST>
  __device__ __forceinline__ const Gathered& find(int i) const {
    int low = 0, high = count + 1;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (of[middle].*FIRST <= i ? low : high) = middle;
    }
    return of[low];
  }
};

// Whether the older tokens of a sequence may be gathered, if there is room: it suits, and is not long.
__device__ __forceinline__ bool may_be_gathered(const Attention& a, const Plan& plan, int sequence) {
  return suits_gathering(a, plan, sequence) && (plan.chunks.least_rows == 0 || long_tiles(a, plan, sequence) == 0);
}

// The rows that a sequence takes; 0: it is not gathered. Known without its tail, which takes two loads more to look up,
// so it has room for as many rows of it as there can be: without own tokens, all of the call's are in the tail.
__device__ __forceinline__ int rows_to_gather(const Attention& a, const Plan& plan, int sequence) {
  if (!may_be_gathered(a, plan, sequence)) return 0;
  const int queries = a.num_queries(sequence), length = a.length(sequence, queries);
  const int begin = a.first_visible(length - queries) & -kTokens, end = length - (a.new_keys ? queries : 0);
  const int tail = a.tail ? a.sink_tokens + a.recent_window + (a.new_keys ? 0 : queries) : 0;
  return end > begin ? ((end - begin + 15) & -16) + ((tail + 15) & -16) : 0;
}

// Of N numbers of each thread: their sums over all threads of the block, and over those before this one. All call it.
template <int THREADS, int N>
__device__ __forceinline__ void sums_before(const int (&x)[N], int (&before)[N], int (&all)[N]) {
  __shared__ int of_warps[THREADS / 32][N];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; ++i) {
    before[i] = sum_of_lanes_before(x[i]);
    if (lane == 31) of_warps[warp][i] = before[i] + x[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; ++i) {
    all[i] = 0;
#pragma unroll
    for (int w = 0; w < THREADS / 32; ++w) {
      if (w == warp) before[i] += all[i];
      all[i] += of_warps[w][i];
    }
  }
}

// Finds the list; all threads of the block call it. Where memory is too small, a quarter of the rows at least is left
// to row tiles, because a launch of row tiles with few sequences takes long.
template <int THREADS>
__device__ __forceinline__ void list_gathered(const Attention& a, const Plan& plan, GatherList& list) {
  constexpr int kMost = 1 << 30;
  int own[1] = {}, unused[1], total[1];
#pragma unroll 4
  for (int s = static_cast<int>(threadIdx.x); s < a.seqs; s += THREADS) {
    own[0] = min(own[0] + rows_to_gather(a, plan, s), kMost / THREADS);
  }
  if (threadIdx.x == 0) list.count = list.rows = list.spans = list.copies = 0;
  sums_before<THREADS>(own, unused, total);
  int room = plan.gather.rows - kZeroRows;
  if (total[0] > room) room = min(room, total[0] / 4 * 3);
  int taken[4] = {};  // by all before: rows, sequences, spans that are decoded, spans that are copied
#pragma unroll 1
  for (int first = 0; first < a.seqs; first += THREADS) {
    const int s = first + static_cast<int>(threadIdx.x);
    bool fits = false;
    if (total[0] > 0) {
      Gathered x{.sequence = s};
      int need[4] = {}, before[4], all[4];
      if (s < a.seqs && (need[0] = rows_to_gather(a, plan, s)) > 0) {
        const int queries = a.num_queries(s), length = a.length(s, queries);
        x.tokens = OlderTokens(Sight(a, s, length, queries), length, queries);
        x.coded_rows = x.tokens.coded_rows();
        need[1] = 1, need[2] = x.coded_rows / kTokens, need[3] = need[0] / kTokens - need[2];
      }
      sums_before<THREADS>(need, before, all);
      const int number = taken[1] + before[1];
      x.row = taken[0] + before[0], x.first_span = taken[2] + before[2], x.first_copy = taken[3] + before[3];
      // Whoever does not fit is in the way of all behind, so those that fit are the first ones.
      fits = need[1] && number < kMostGathered && x.row + need[0] <= room;
      if (fits) {
        list.of[number] = x;
        atomicMax(&list.count, number + 1), atomicMax(&list.rows, x.row + need[0]);
        atomicMax(&list.spans, x.first_span + need[2]), atomicMax(&list.copies, x.first_copy + need[3]);
      }
      for (int i = 0; i < 4; ++i) taken[i] = min(taken[i] + all[i], kMost);
      if (fits && blockIdx.x == 0) plan.gather.first_rows[s] = x.row;
    }
    if (s < a.seqs && blockIdx.x == 0 && !fits) plan.gather.first_rows[s] = -1;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    list.of[list.count] = {.sequence = -1, .row = list.rows, .first_span = list.spans, .first_copy = list.copies};
    list.copies += kZeroRows / kTokens;
  }
  __syncthreads();
}

// The spans that are decoded, as decode_spans takes them.
class GatheredSpans {
 public:
  struct Span {
    int item, sequence, head;
    int begin, end, row;
  };

  __device__ __forceinline__ GatheredSpans(const GatherList& list, int heads, uint16_t* absent, int warps)
      : list_(list), heads_(heads), warps_(warps), absent_(absent) {}
  __device__ __forceinline__ Span at(int item) const {
    const int number = quotient(item, heads_);
    if (number >= list_.spans) return {item, -1};
    const Gathered& x = list_.find<&Gathered::first_span>(number);
    const int on = kTokens * (number - x.first_span), begin = x.tokens.begin + on;
    return {.item = item,
            .sequence = x.sequence,
            .head = item - number * heads_,
            .begin = begin,
            .end = x.tokens.coded_end,
            .row = x.row + on};
  }
  __device__ __forceinline__ void advance(Span& span) const { span = at(span.item + warps_); }
  __device__ __forceinline__ bool exists(const Span& span) const { return span.sequence >= 0; }
  __device__ __forceinline__ int begin(const Span& span) const { return span.begin; }
  __device__ __forceinline__ int load_end(const Span& span) const { return span.end; }
  __device__ __forceinline__ int end(const Span&, int loaded) const { return loaded; }
  __device__ __forceinline__ int stored(const Span&) const { return kTokens; }
  __device__ __forceinline__ int64_t row(const Span& span) const { return int64_t{span.row} * heads_ + span.head; }
  // Keys of a page that does not exist are not keys.
  __device__ __forceinline__ void note(const Span& span, int count) const {
    if (span.head == 0) absent_[span.row / kTokens] = count > 0 ? 0 : 0xFFFF;
  }

 private:
  const GatherList& list_;
  const int heads_, warps_;
  uint16_t* const absent_;
};

// Copies rows of the tail, 16 at a time; zeros behind the last one. All warps of the grid share them.
template <int D>
__device__ __forceinline__ void copy_tails(const Attention& a, const DecodeArguments& codes, const GatherList& list,
                                           int warp, int warps) {
  constexpr int kWords = D / 8, kTogether = 32 / kWords;  // of 16 bytes, of a row; rows of an instruction
  const int lane = threadIdx.x % 32, word = lane % kWords;
  const int of_span = 2 * a.kv_heads, items = list.copies * of_span, rows = a.sink_tokens + a.ring;
#pragma unroll 1
  for (int item = warp; item < items; item += warps) {
    const int number = quotient(item, of_span), head = (item - number * of_span) / 2, kind = item % 2;
    const Gathered& x = list.find<&Gathered::first_copy>(number);
    const OlderTokens& t = x.tokens;
    const int first = kTokens * (number - x.first_copy), to = x.row + x.coded_rows;
#pragma unroll 4
    for (int i = first + lane / kWords; i < first + kTokens; i += kTogether) {
      uint4 data{};
      if (i < t.copies()) {
        const int row = format::tail_row(t.copy_at(i), a.sink_tokens, a.ring);
        const int64_t at = format::tail_offset<int64_t>(t.tail.slot, a.tail_stride, head, row, rows, D, kind);
        data = static_cast<const uint4*>(a.tail)[at / 8 + word];
      }
      static_cast<uint4*>(codes.source[kind].out)[(int64_t{to + i} * a.kv_heads + head) * kWords + word] = data;
    }
  }
}

template <typename Traits, typename T>
__global__ void __launch_bounds__(32 * Traits::kWarps, Traits::kBlocks)
    gather_kernel(const __grid_constant__ Attention a, const __grid_constant__ Plan plan,
                  const __grid_constant__ DecodeArguments codes) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)  // nobody else has row tiles
  __shared__ GatherList list;
  plan.overlap.enter();
  plan.overlap.begin();
  list_gathered<32 * Traits::kWarps>(a, plan, list);
  if (list.count == 0) return plan.overlap.leave();
  const int warp = blockIdx.x * Traits::kWarps + threadIdx.x / 32, warps = gridDim.x * Traits::kWarps;
  copy_tails<Traits::kDim>(a, codes, list, warp, warps);
  decode_spans<Traits, T>(codes,
                          [&](int of_kind) { return GatheredSpans(list, a.kv_heads, plan.gather.absent, of_kind); });
  plan.overlap.leave();
#endif
}

}  // namespace turboquant::cuda::row_tiles
