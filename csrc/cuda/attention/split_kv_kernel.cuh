// Decode: attention of few query rows (a step's new tokens times the query heads of a KV head) over long packed caches, straight
// from the codes, in one launch.
//
// Everything is a product of bytes on tensor cores (common/mma.cuh). Queries are rotated and rounded to 16-bit integers, softmax weights
// times value scales to 16 bits under one factor per unit of keys; each becomes a high and a low byte in two neighbouring
// columns, so that four rows fill the eight columns of a product, and a lane finds both halves of a sum in its own registers:
//   scores  [16 tokens x channels] . [channels x 4 rows (high, low)]   codes on the left, expanded in registers (attention/operands.cuh)
//   output  [16 channels x 32 tokens] . [32 tokens x 4 rows (high, low)]
// Lane (g, t) = (lane / 4, lane % 4) so holds tokens of row t in the scores and channels of row t in the output: maxima, weights and
// rescaling need no exchange, only the weights change places, by transposing 8 x 8 tiles (movmatrix).
//
// Work is a flat list of units of keys, which the blocks of a fixed grid cut among themselves (attention/schedule.cuh); the units of one (sequence,
// KV head, block of rows) are a segment. A block's warps take units in turn, each with its own ring of asynchronous copies that runs ahead
// across all borders. At the end of a segment its warps' results are joined; a segment that is only a part is left in the workspace,
// and the last of the blocks that share it joins the parts in their order. So results are the same in every run, lengths are read on
// the device, and the workspace depends on the grid only.
#pragma once

#include <algorithm>
#include <bit>

#include "cuda/attention/call.cuh"
#include "cuda/attention/operands.cuh"
#include "cuda/attention/schedule.cuh"
#include "cuda/attention/softmax_math.cuh"
#include "cuda/codec/transform.cuh"
#include "cuda/common/async_copy.cuh"

namespace turboquant::cuda {

constexpr int kStepTokens = 32;                        // keys of a slot of the ring: two value blocks
constexpr int kUnitSteps = kUnitTokens / kStepTokens;  // slots of a unit
constexpr float kNoKey = -1e30f;  // a running maximum before the first key: below all scores, and finite times a unit
constexpr int kMaxDecodeGrid = 4096;
constexpr uint32_t kPlaceBytes = 64;  // blocks of codes begin at multiples of it: 16 tokens times a multiple of 4 bytes
constexpr int kBarrierBytes = 16;
constexpr int kMaxLevels = 16;  // of a table
constexpr int kExactBytes = 2;  // of a number of the exact tail

// Where things are in a slot: 32 tokens, one tile or two. Offsets in bytes.
struct SlotLayout {
  int bytes, stride;                                     // of a slot; its barrier follows, and then the next slot
  int copies, copy_shift, copy_bytes;                    // of a slot: 1 or 2; one brings 2^copy_shift tokens, a tile
  int unit_shift;                                        // a unit takes 2^unit_shift of them
  int page_shift, record_bytes;                          // a page has 2^page_shift tokens
  int exact_keys, exact_bytes, exact_stride;             // keys of the exact tail in a slot; of one; to the next
  int planes, values, key_scales, value_scales;          // sections of the first 16 tokens
  int next_keys, next_planes, next_values, next_scales;  // from there to tokens 16-31

  SlotLayout(const format::Record& r, int element_bytes)
      : bytes(kStepTokens / r.tile_tokens() * r.tile_bytes()), stride(bytes + kBarrierBytes),
        copies(kStepTokens / r.tile_tokens()), copy_shift(r.tile_tokens() == 16 ? 4 : 5), copy_bytes(r.tile_bytes()),
        unit_shift(r.tile_tokens() == 16 ? 2 : 1), page_shift(r.page_size == 16   ? 4
                                                              : r.page_size == 32 ? 5
                                                              : r.page_size == 64 ? 6
                                                                                  : 7),
        record_bytes(r.record_bytes()), exact_keys(0), exact_bytes(2 * r.head_dim * element_bytes),
        exact_stride(exact_bytes + 16),  // so that eight of them lie in different banks
        planes(r.key_planes()), values(r.value_blocks()), key_scales(r.key_scales()), value_scales(r.value_scales()) {
    exact_keys = bytes / exact_stride < 8 ? bytes / exact_stride : 8;
    const bool one = r.tile_tokens() == kStepTokens;
    next_keys = one ? 16 * r.key_row_bytes() : r.tile_bytes();
    next_planes = one ? 16 * r.key_plane_bytes() : r.tile_bytes();
    next_values = one ? r.value_block_bytes() : r.tile_bytes();
    next_scales = one ? 32 : r.tile_bytes();
  }
};

// Shared memory of a block, in bytes from its start.
struct DecodePlan {
  int warps, slots;    // warps of a block, slots of a warp's ring, which comes first
  int ring;            // bytes of a warp's ring
  int queries, plain;  // queries as operands; as they came, [rows, d] of their type
  int signs;           // float [2, d]: of keys, of values; behind them int8 [2, kMaxLevels]: levels
  int states;          // of warps, for which there is room at a time: all or half
  int join, result;    // states of the warps; what becomes of them, [rows, 4 + d]
  int rows;            // what is known about each row
  int notes;           // [warps + 1] what a warp knows about its work, and what all begin with
  int bytes;           // all
  int per_group;       // 2^16 / group, rounded up
  CodeFacts codes;     // what pages hold
  int early;           // 1: the launch may begin before the kernel ahead has ended
  float* parts;        // [grid, 2, rows, 4 + d]: partial results
  uint32_t* arrivals;  // [grid], 0 between launches
};

// What the keys of one query row are, and its numbers.
struct DecodeRow {
  float unit, shift;  // score * log2(e) = unit * integer score + shift
  int zero;           // what the sums over channels are too large by
  int first, end;     // keys [first, end) come from codes
};

// What a warp needs to know about the segment that it copies.
struct __align__(16) DecodeCopies {
  int first, length, visible;  // key of unit 0 of the list; keys; pages before `visible` may be gone
  int head, exact;             // exact: units of the tail
  const int32_t* table;        // the sequence's row of block_table
};

// What a warp knows about its work, and rarely looks at. In shared memory, to spare registers.
struct DecodeNotes {
  DecodeCopies copies;
  DecodeCut cut;
  DecodePlace attended, fetched;  // what it attends to; what it copies next
  int begin, end;                 // of the block's numbers
  int fetch_unit, fetch_stop;     // between two batches: what its copies go on with
  int first_block, blocks;        // which share the segment at hand
};

__device__ __forceinline__ float max_or_nan(float x, float y) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  float out;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(x), "f"(y));
  return out;
#else
  return x != x || x > y ? x : y;
#endif
}

// f(0), .., f(N - 1) with constants, so that what they index stays in registers for certain.
template <int N, int I = 0, typename F>
__device__ __forceinline__ void for_each(F&& f) {
  if constexpr (I < N) {
    f(std::integral_constant<int, I>{});
    for_each<N, I + 1>(f);
  }
}

// Counts an arrival of a block; true: of `count` it was the last, and the counter is 0 again. What the block wrote before its last
// barrier is seen by those who arrive later, and the other way round.
__device__ __forceinline__ bool count_arrival(uint32_t* counter, int count) {
  const uint32_t last = static_cast<uint32_t>(count - 1);
  uint32_t before;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 700
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(last) : "memory");
#endif
  return before == last;
}

// Over the lanes that share t.
template <typename Op>
__device__ __forceinline__ float over_tokens(float x, Op&& op) {
#pragma unroll
  for (int bit = 4; bit < 32; bit *= 2) x = op(x, __shfl_xor_sync(0xffffffff, x, bit));
  return x;
}

__device__ __forceinline__ uint32_t transposed(uint32_t x) {  // an 8 x 8 tile of 16-bit numbers, two of a row per lane
  uint32_t out = x;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 750
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(x));
#endif
  return out;
}

// Blocks have up to eight warps; or four, and more of them share a multiprocessor (attention/split_kv.cu chooses).
constexpr int kMaxWarps = 8;
constexpr int decode_blocks(int n, int d) { return n * d <= 128 ? 2 : 1; }
constexpr int decode_small_blocks(int n, int d) { return n * d <= 128 ? 4 : n * d <= 256 && d <= 128 ? 3 : 2; }
// What registers must suffice for.
constexpr int decode_threads(int n, int d) { return 128 * decode_small_blocks(n, d) / decode_blocks(n, d); }

// N: products of four rows each.
template <int D, int N>
struct DecodeTraits {
  using Operands = QueryOperands<D>;
  static constexpr int kRows = 4 * N;
  static constexpr int kFrags = Operands::kChunks * Operands::kFrags;  // of a row's query
  static constexpr int kTiles = D / 16;                                // products of an output
  static constexpr int kSums = 2 * kTiles * N;                         // floats of a lane
  static constexpr int kJoin = kSums + 2 * N;                          // and its maxima and denominators
  // A row lies in a warp, some channels of each of its blocks in a lane; where blocks have only 16 channels, in half of a warp, and once
  // more in the other half.
  static constexpr format::Split kSplit = format::split_dim(D);
  static constexpr int kLog = std::countr_zero(static_cast<unsigned>(kSplit.block));
  static constexpr int kRowLanes = std::min(kSplit.block, 32);
  using Rotation = HadamardTraits<kSplit.blocks, kLog, kRowLanes, kSplit.block / kRowLanes>;
  static constexpr int kPerLane = Rotation::kPerLane;
  static constexpr int kHead = 4;          // maximum, denominator and what aligns the sums to 16 bytes
  static constexpr int kPart = kHead + D;  // floats of a row's partial result
};

// A lane's part of the running softmax of its rows.
template <class X>
struct DecodeState {
  static constexpr int N = X::kRows / 4;
  float max[N];      // in integer scores
  float total[N];    // of the lane's own tokens
  float weights[N];  // the same of rounded weights times value scales
  float sums[X::kTiles][N][2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < N; ++n) max[n] = kNoKey, total[n] = weights[n] = 0;
#pragma unroll
    for (int i = 0; i < X::kTiles; ++i) {
#pragma unroll
      for (int n = 0; n < N; ++n) sums[i][n][0] = sums[i][n][1] = 0;
    }
  }
};

template <int D, int N>
class Decoder {
 public:
  using X = DecodeTraits<D, N>;
  static constexpr int kRows = X::kRows;

  __device__ __forceinline__ Decoder(const Attention& a, const SlotLayout& layout, const DecodePlan& plan,
                                     uint8_t* shared)
      : a_(a), layout_(layout), plan_(plan), shared_(shared), warp_(threadIdx.x / 32), lane_(threadIdx.x % 32),
        g_(lane_ / 4), t_(lane_ % 4) {}

  __device__ __forceinline__ void run() {
    let_next_kernel_begin();
    prefetch_constants();
    if (!start()) return;
    const DecodePlace& at = notes().attended;
    for (int unit = notes().begin + warp_;;) {
      while (unit < at.begin) unit += plan_.warps;  // a gap
      prepare_queries(at);
      find_sharers(at);
      state_.clear();
      unit = attend_codes(at, unit, min(stop(), at.coded_end()));
      const bool empty = at.about.coded == 0 && at.about.exact == 0;  // has a unit, but nothing in it
      for (const int end = stop(); unit < end; unit += plan_.warps) {
        if (empty) continue;
        attend_exact(at, unit - at.coded_end());
        fetch();
      }
      finish_segment(at, max(notes().begin, at.begin), stop());
      if (stop() == notes().end) return;
      seek(notes().attended, stop());
      if (at.begin >= notes().end) return;
      ask_for_queries(at);
    }
  }

 private:
  // ---- The list of work

  __device__ __forceinline__ DecodeNotes& notes() const {
    return reinterpret_cast<DecodeNotes*>(shared_ + plan_.notes)[warp_];
  }
  __device__ __forceinline__ void seek(DecodePlace& place, int unit) const {
    DecodePlace p = place;
    if (unit < p.end()) return;
    p.template seek<kRows>(a_, exact_per_unit(), notes().cut.gap, unit);
    __syncwarp();
    if (lane_ == 0) place = p;
    __syncwarp();
  }

  __device__ __forceinline__ int exact_per_unit() const { return kUnitSteps * layout_.exact_keys; }

  // Where the block's part of the segment at hand ends.
  __device__ __forceinline__ int stop() const { return min(notes().end, notes().attended.end()); }

  // The beginning of a launch, up to the first copies of the ring; false: the block has no work.
  //
  // It need not wait for the kernel ahead to find its work and to have its first bytes brought near: what lengths and pages say until
  // then is most likely still true behind it. There, all is read once more, and pages that are meant are copied; if anything has
  // changed, work is found again. Copies are asked for behind the queries, because what a warp loads arrives after all that was asked
  // for before.
  __device__ __forceinline__ bool start() {
    slot_ = warp_ * plan_.ring, phase_ = 0, turn_ = 32;
    if (lane_ == 0) {
      for (int i = 0; i < plan_.slots; ++i) init_barrier(barrier(slot_ + i * layout_.stride), layout_.copies);
    }
    barriers_ready();
    __syncwarp();
    enum { kGuess, kFind, kAsk };
    int step = plan_.early ? kGuess : kFind;
    bool known = false, looked = false;  // work has been found by guess, and its pages have been looked up
    const DecodePlace& at = notes().attended;
    // Round by round, so that what is long stands here once.
#pragma unroll 1
    for (int i = -kUnitSteps; i < plan_.slots;) {
      bool changed = false, look = true;
      if (i < 0) {
        if (step == kFind) wait_for_previous_kernel();
        if (known && looked) read_pages();
        if (step == kAsk) wait_for_committed_copies();
        if ((step == kAsk || known) && at.begin < notes().end) ask_for_queries(at);
        if (step != kAsk) changed = find_work(step == kGuess, known);
        if (step != kGuess && at.begin >= notes().end) return false;
        const int unit = notes().begin + warp_;
        look = step == kGuess ? at.begin <= unit && unit < min(notes().end, at.coded_end())
                              : step == kFind && (changed || !looked);
        if (step == kGuess) looked = look;
      }
      if (look) copy(slot_ + i * layout_.stride);  // the first one has nothing to copy yet, and only looks up
      if (i < 0) {
        if (step == kGuess) {
          if (looked) prefetch_ring();
          known = true, step = kFind;
          __syncthreads();
          continue;
        }
        if (step == kFind && changed) {
          known = false, step = kAsk;
          continue;
        }
      }
      i += kUnitSteps;
    }
    return true;
  }

  // The block's share of the list (attention/schedule.cuh), for all warps; false: it is what was known. The first warp works it out: eight would wait
  // for each other's divisions.
  __device__ __forceinline__ bool find_work(bool guess, bool known) const {
    DecodeNotes* all = reinterpret_cast<DecodeNotes*>(shared_ + plan_.notes);
    DecodeNotes& found = all[plan_.warps];
    if (warp_ == 0) {
      DecodeShare share;
      const bool changed = cut_work<kRows>(a_, exact_per_unit(), reinterpret_cast<uint2*>(join()),
                                           plan_.result - plan_.join, guess, known ? &found.attended : nullptr, share);
      if (lane_ == 0) {
        flag() = changed;
        if (changed) {
          found.copies = {}, found.cut = share.cut, found.begin = share.begin, found.end = share.end;
          found.attended = found.fetched = share.place;
        }
      }
    }
    if (!guess) {
      // By the other warps, which wait for the first one.
      const int begin = plan_.warps > 1 ? 32 : 0, mine = static_cast<int>(threadIdx.x) - begin;
      const int threads = static_cast<int>(blockDim.x) - begin;
      if (mine >= 0) {
        for (int i = mine; i < 2 * D; i += threads) signs()[i] = (i < D ? a_.key_signs : a_.value_signs - D)[i];
        copy_levels(a_.key_levels, a_.record.key_bits, key_levels(), mine);
        copy_levels(a_.value_levels, a_.record.value_bits, value_levels(), mine);
        clear_padding(mine, threads);
      }
    }
    __syncthreads();
    if (!flag()) return false;
    constexpr int kWords = sizeof(DecodeNotes) / sizeof(uint32_t);
    const uint32_t* from = reinterpret_cast<const uint32_t*>(&found);
    uint32_t* own = reinterpret_cast<uint32_t*>(all + warp_);
    for (int i = lane_; i < kWords; i += 32) own[i] = from[i];
    __syncwarp();
    if (lane_ == 0) notes().fetch_unit = notes().begin + warp_, notes().fetch_stop = -1;
    __syncwarp();
    return true;
  }
  // Of the block: whatever its threads have to tell each other around a barrier.
  __device__ __forceinline__ int& flag() const { return *reinterpret_cast<int*>(rows() + kRows); }

  // What was looked up is asked for, as much of it as the ring will take.
  __device__ __forceinline__ void prefetch_ring() const {
    const uint32_t place = block_place(notes().copies);
    if ((lane_ >> layout_.unit_shift) * kUnitSteps < plan_.slots && place != kNowhere) {
      prefetch_bytes(a_.pages + uint64_t{place} * kPlaceBytes, layout_.copy_bytes);
    }
  }

  static __device__ __forceinline__ void copy_levels(const int8_t* from, int bits, int8_t* to, int mine) {
    if (from && mine < kMaxLevels) to[mine] = level_entry(from, bits, mine);
  }

  // What later steps would wait for is asked for now. Not for the first level of the cache: the kernel ahead may still be writing it.
  __device__ __forceinline__ void prefetch_constants() const {
    const int i = static_cast<int>(threadIdx.x) * 32;
    if (i >= D) return;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(a_.key_signs + i));
    asm volatile("prefetch.global.L2 [%0];" ::"l"(a_.value_signs + i));
  }

  // Tokens behind the last sequence see nothing.
  __device__ __forceinline__ void clear_padding(int thread, int of_block) const {
    const int used = a_.query_begin ? min(max(a_.query_begin[a_.seqs], 0), a_.tokens) : min(a_.seqs, a_.tokens);
    const int64_t first = int64_t{used} * a_.q_heads, last = int64_t{a_.tokens} * a_.q_heads;
    const int64_t threads = int64_t{gridDim.x} * of_block, mine = int64_t{blockIdx.x} * of_block + thread;
    for (int64_t i = first + mine; i < last; i += threads) a_.lse[i] = -INFINITY;
    for (int64_t i = first * D + mine; i < last * D; i += threads) store_float(a_.out, a_.dtype, i, 0);
  }

  // ---- Copies
  //
  // To find where a unit's bytes are takes more instructions than to ask for them. So it is done for a batch of the warp's next units at
  // once, 8 or 16 of one segment: a lane has a block of one of them. What was found lies in the last lanes; `turn_` is the first whose
  // block is still to be copied, 32: there is none. Meanwhile the pages of the next batch are on their way, and nothing waits for them
  // before it begins.

  __device__ __forceinline__ uint64_t* barrier(int slot) const {
    return reinterpret_cast<uint64_t*>(shared_ + slot + layout_.bytes);
  }

  // The unit of the next batch whose block the lane has, and the block's first token.
  __device__ __forceinline__ int batch_unit() const {
    return fetch_unit_ + (lane_ >> layout_.unit_shift) * plan_.warps;
  }
  __device__ __forceinline__ int batch_token(const DecodeCopies& c) const {
    const int block = lane_ & ((1 << layout_.unit_shift) - 1);
    return c.first + batch_unit() * kUnitTokens + (block << layout_.copy_shift);
  }
  // Loads the pages of the next batch, -1 for none.
  __device__ __forceinline__ void look_up() {
    if (fetch_unit_ >= fetch_stop_ && fetch_stop_ != 0) find_fetch_run();
    read_pages();
  }
  __device__ __forceinline__ void read_pages() {
    page_ = -1;
    const DecodeCopies c = notes().copies;
    if (batch_unit() >= fetch_stop_ || c.exact) return;
    const int token = batch_token(c);
    if (token >= c.length || token + (1 << layout_.copy_shift) <= c.visible) return;
    page_ = __ldcg(c.table + (token >> layout_.page_shift));
  }
  // The batch whose pages were looked up becomes the one at hand. A unit of exact keys is no batch: its copies to slot `first` and the one
  // behind it begin.
  __device__ __forceinline__ void next_batch(int first) {
    if (fetch_unit_ >= fetch_stop_) return;
    const DecodeCopies c = notes().copies;
    if (c.exact) {
      copy_exact(first);
      fetch_unit_ += plan_.warps;
      return;
    }
    const int lanes = __popc(__ballot_sync(0xffffffff, batch_unit() < fetch_stop_));
    turn_ = 32 - lanes;
    source_ = __shfl_sync(0xffffffff, block_place(c), lane_ - turn_);
    fetch_unit_ += (lanes >> layout_.unit_shift) * plan_.warps;
  }
  // Where the lane's block of the next batch lies behind `pages`, in kPlaceBytes; kNowhere: there is none.
  static constexpr uint32_t kNowhere = ~0u;
  __device__ __forceinline__ uint32_t block_place(const DecodeCopies& c) const {
    if (static_cast<unsigned>(page_) >= static_cast<unsigned>(a_.num_pages)) return kNowhere;
    const uint32_t tile = (batch_token(c) & ((1 << layout_.page_shift) - 1)) >> layout_.copy_shift;
    return (static_cast<uint32_t>(page_) * a_.kv_heads + c.head) * (layout_.record_bytes / kPlaceBytes) +
           tile * (layout_.copy_bytes / kPlaceBytes);
  }

  // The slots of the unit at hand get other contents; the next slots are at hand. (Slots are used again in the order in which they were
  // read.)
  __device__ __forceinline__ void fetch() {
    __syncwarp();
    copy(slot_);
    slot_ += kUnitSteps * layout_.stride;
    if (slot_ == (warp_ + 1) * plan_.ring) slot_ -= plan_.ring, phase_ ^= 1;
  }
  // Starts to copy the next unit, if any, to slot `first` and the one behind it. Only then the batch after its own is looked up: at the
  // beginning of a launch nothing may come before the first bytes.
  __device__ __forceinline__ void copy(int first) {
    const bool batch_begins = turn_ == 32;
    if (batch_begins) {
      fetch_unit_ = notes().fetch_unit, fetch_stop_ = notes().fetch_stop;
      if (fetch_stop_ == 0) return;  // nothing is left
      next_batch(first);
    }
    if (turn_ != 32) copy_codes(first);
    if (batch_begins) {
      look_up();
      __syncwarp();
      if (lane_ == 0) notes().fetch_unit = fetch_unit_, notes().fetch_stop = fetch_stop_;
      __syncwarp();
    }
  }
  // The next unit of the batch at hand.
  __device__ __forceinline__ void copy_codes(int first) {
    const bool mine = static_cast<unsigned>(lane_ - turn_) < 1u << layout_.unit_shift;
    const int i = lane_ & ((1 << layout_.unit_shift) - 1);  // of the unit's blocks
    const int later = i >> (layout_.unit_shift - 1), slot = first + later * layout_.stride;
    const int bytes = source_ == kNowhere ? 0 : layout_.copy_bytes;
    copy_blocks(barrier(first), barrier(first + layout_.stride), barrier(slot), mine ? bytes : -1,
                shared_ + slot + (i & (layout_.copies - 1)) * layout_.copy_bytes,
                a_.pages + uint64_t{source_} * kPlaceBytes, mine ? bytes : 0);
    turn_ += 1 << layout_.unit_shift;
  }
  // Exact keys of the next unit: lanes 0-7 copy to the first slot, 8-15 to the second. As many lanes announce bytes as for codes.
  __device__ __forceinline__ void copy_exact(int first) const {
    const uint8_t* from = exact_address();
    const int i = lane_ % 8, keys = __popc(__ballot_sync(0xffffffff, from != nullptr) >> (lane_ & 8) & 0xFF);
    const int slot = lane_ < 8 ? first : first + layout_.stride;
    const bool announces = lane_ < 8 * kUnitSteps && i < layout_.copies;
    copy_blocks(barrier(first), barrier(first + layout_.stride), barrier(slot),
                !announces ? -1 : (i == 0 ? keys * layout_.exact_bytes : 0), shared_ + slot + i * layout_.exact_stride,
                from, from ? layout_.exact_bytes : 0);
  }

  // Of the lane's exact key; null: it has none.
  __device__ __forceinline__ const uint8_t* exact_address() const {
    const DecodePlace& at = notes().fetched;
    const int i = ((fetch_unit_ - at.coded_end()) * kUnitSteps + lane_ / 8) * layout_.exact_keys + lane_ % 8;
    if (lane_ >= 8 * kUnitSteps || lane_ % 8 >= layout_.exact_keys || i >= at.about.exact) return nullptr;
    const int key = exact_key(at, i), rows = a_.sink_tokens + a_.ring;
    const int row = key < a_.sink_tokens ? key : a_.sink_tokens + remainder(key - a_.sink_tokens, a_.ring);
    const int64_t head = a_.tail_slots[at.sequence] * a_.kv_heads + at.head;
    return static_cast<const uint8_t*>(a_.tail) + (head * rows + row) * layout_.exact_bytes;
  }
  static __device__ __forceinline__ int exact_key(const DecodePlace& at, int i) {
    return i < at.about.sinks ? i : at.about.recent + i - at.about.sinks;
  }
  // The next unit that has something to copy, the end of the units like it, and what look_up needs of its segment.
  __device__ __forceinline__ void find_fetch_run() {
    DecodePlace& next = notes().fetched;
    for (;; fetch_unit_ += plan_.warps) {
      if (fetch_unit_ >= notes().end) {
        fetch_stop_ = 0;
        return;
      }
      seek(next, fetch_unit_);
      if (fetch_unit_ < next.begin) continue;  // in a gap
      if (fetch_unit_ < next.coded_end() || next.about.exact > 0) break;
    }
    const bool exact = fetch_unit_ >= next.coded_end();
    fetch_stop_ = min(notes().end, exact ? next.end() : next.coded_end());
    __syncwarp();
    if (lane_ == 0) {
      notes().copies = {next.about.first - next.begin * kUnitTokens,
                        next.about.length,
                        a_.first_visible(next.about.length - next.about.queries),
                        next.head,
                        exact,
                        a_.block_table + int64_t{next.sequence} * a_.max_pages};
    }
    __syncwarp();
    if (!exact && next.begin != notes().attended.begin) prefetch_queries(next);
  }

  // Its queries will be wanted soon, too, and would then arrive after all that is on its way: each warp asks for the rows that it will
  // prepare.
  __device__ __forceinline__ void prefetch_queries(const DecodePlace& at) const {
    for (int r = first_row(); r < kRows; r += plan_.warps) {
      int token, head, position;
      if (!find_row(at, r, token, head, position)) continue;
      const int64_t start = (token * a_.q_token_stride + head * a_.q_head_stride) * element_bytes();
      if (lane_ * 128 < D * element_bytes()) {
        asm volatile("prefetch.global.L1 [%0];" ::"l"(static_cast<const uint8_t*>(a_.q) + start + lane_ * 128));
      }
    }
  }

  // ---- Queries

  __device__ __forceinline__ int element_bytes() const { return a_.dtype == Dtype::kFloat32 ? 4 : 2; }
  __device__ __forceinline__ uint8_t* plain() const { return shared_ + plan_.plain; }
  __device__ __forceinline__ float* signs() const { return reinterpret_cast<float*>(shared_ + plan_.signs); }
  __device__ __forceinline__ int8_t* key_levels() const { return reinterpret_cast<int8_t*>(signs() + 2 * D); }
  __device__ __forceinline__ int8_t* value_levels() const { return key_levels() + kMaxLevels; }
  __device__ __forceinline__ DecodeRow* rows() const { return reinterpret_cast<DecodeRow*>(shared_ + plan_.rows); }

  // The first row that the warp prepares: the last warps begin, because the first one finds the block's work.
  __device__ __forceinline__ int first_row() const { return plan_.warps - 1 - warp_; }

  // The row `r` of the segment's block: token and head among all, position of its query; false: there is no such row.
  __device__ __forceinline__ bool find_row(const DecodePlace& at, int r, int& token, int& head, int& position) const {
    const int index = at.block * kRows + r;
    if (index >= at.about.rows(a_)) return false;
    const int i = index * plan_.per_group >> 16;  // index / group, index being small
    token = a_.first_query(at.sequence) + i;
    head = (at.head - i) * a_.group + index;
    position = at.about.length - at.about.queries + i;
    return true;
  }

  // Starts to copy the rows that the warp will prepare to `plain`.
  __device__ __forceinline__ void ask_for_queries(const DecodePlace& at) const {
    const int size = element_bytes();
#pragma unroll 1
    for (int r = first_row(); r < kRows; r += plan_.warps) {
      int token, head, position;
      if (!find_row(at, r, token, head, position) || token >= a_.tokens) continue;  // a guess may see too many
      const int64_t start = token * a_.q_token_stride + head * a_.q_head_stride;
      const uint8_t* from = static_cast<const uint8_t*>(a_.q) + start * size;
      uint8_t* to = plain() + r * D * size;
      if (reinterpret_cast<uint64_t>(from) % 16 == 0) {
        for (int i = 16 * lane_; i < D * size; i += 512) copy_async<true>(to + i, from + i);
      } else {
        for (int i = size * lane_; i < D * size; i += 32 * size) {
          if (size == 4) {
            *reinterpret_cast<uint32_t*>(to + i) = *reinterpret_cast<const uint32_t*>(from + i);
          } else {
            *reinterpret_cast<uint16_t*>(to + i) = *reinterpret_cast<const uint16_t*>(from + i);
          }
        }
      }
    }
    commit_copies();
  }
  // The channel of a lane's element i when a warp holds a row; whether the lane's elements are the ones that count.
  __device__ __forceinline__ int channel(int i) const {
    return X::Rotation::channel(lane_ % X::kRowLanes, i / X::Rotation::kVec) + i % X::Rotation::kVec;
  }
  __device__ __forceinline__ bool counts() const { return X::kRowLanes == 32 || lane_ < X::kRowLanes; }

  // factors: [d], signs or scales
  __device__ __forceinline__ void apply(const float* factors, float (&y)[X::kPerLane]) const {
#pragma unroll
    for (int i = 0; i < X::kPerLane; ++i) y[i] *= factors[channel(i)];
  }

  // What codes count too often (KeyCodes::kShifts): of each odd channel a sixteenth of the next one, if their codes share a word.
  __device__ __forceinline__ void take_off_neighbours(float (&y)[X::kPerLane]) const {
    constexpr int kVec = X::Rotation::kVec;
    static_assert(kVec == 1 || kVec % 2 == 0);
#pragma unroll
    for (int k = 0; k < X::kPerLane; k += kVec) {
      const float of_next_lane = __shfl_down_sync(0xffffffff, y[k], 1);
#pragma unroll
      for (int i = kVec == 1 ? 0 : 1; i < kVec; i += 2) {
        const int c = channel(k + i);
        const bool none = (kVec == 1 && c % 2 == 0) || c % 8 == 7;
        y[k + i] = fmaf(none ? 0 : i + 1 < kVec ? y[k + i + 1] : of_next_lane, -1.0f / 16, y[k + i]);
      }
    }
  }

  // Where the high byte of a row's channel is among the operands.
  static __device__ __forceinline__ uint8_t* operand(uint8_t* operands, CodeOrder order, int r, int channel) {
    const auto place = X::Operands::place(order, channel);
    return operands + ((r / 4 * X::kFrags + place.frag) * 32 + 8 * (r % 4) + place.t) * 8 + 4 * place.half + place.byte;
  }

  // Rotates the rows of a segment, a warp per row, and lays them out as operands; ends with all warps holding theirs.
  __device__ __forceinline__ void prepare_queries(const DecodePlace& at) {
    uint8_t* operands = shared_ + plan_.queries;  // [N, frags, 32 lanes, x and y, 4]
    wait_for_committed_copies();
    __syncwarp();
#pragma unroll 1
    for (int r = first_row(); r < kRows; r += plan_.warps) {
      int token, head, position;
      float y[X::kPerLane];
      DecodeRow row{1, 0, 0, 0, 0};
      const bool real = find_row(at, r, token, head, position);
#pragma unroll
      for (int i = 0; i < X::kPerLane; ++i) y[i] = real ? load_float(plain(), a_.dtype, r * D + channel(i)) : 0;
      if (real) {
        const format::Channels of_head = a_.channels.of_head(at.head, D);
        if (of_head.center) {
#pragma unroll
          for (int i = 0; i < X::kPerLane; ++i) row.shift = fmaf(y[i], of_head.center[channel(i)], row.shift);
        }
        if (of_head.inverse) apply(of_head.inverse, y);
        const Attention::Tail tail = a_.tail_of(at.sequence);
        row.first = max(a_.first_visible(position), tail.sinks), row.end = a_.recent(tail, position);
      }
      apply(signs(), y);
      transform<typename X::Rotation>(y, lane_);
      if (plan_.codes.shifts) take_off_neighbours(y);
      float largest = 1e-30f;
#pragma unroll
      for (int i = 0; i < X::kPerLane; ++i) largest = max_or_nan(largest, fabsf(y[i]));
      largest =
          __int_as_float(max_of_lanes(__float_as_int(largest)));  // not negative: ordered like integers, NaN above all
      if (a_.channels.center) {
#pragma unroll
        for (int bit = 1; bit < X::kRowLanes; bit *= 2) row.shift += __shfl_xor_sync(0xffffffff, row.shift, bit);
      }
      constexpr float kLargest = 127 * 256;  // so that the high byte stays within +-127
      const float scale = a_.softmax_scale * kLog2E, factor = (scale < 0 ? -kLargest : kLargest) / largest;
      int sum = 0;
#pragma unroll
      for (int i = 0; i < X::kPerLane; ++i) {
        const int x = __float2int_rn(y[i] * factor), high = (x + 128) >> 8;
        if (!counts()) continue;
        uint8_t* to = operand(operands, plan_.codes.order, r, channel(i));
        to[0] = static_cast<uint8_t>(high);
        to[4 * 8] = static_cast<uint8_t>(x - 256 * high);  // the next column: four lanes on
        sum += x * plan_.codes.twice_zero(channel(i));
      }
#pragma unroll
      for (int c = D + lane_; c < X::Operands::kChannels; c += 32) {  // channels that only the operands have
        uint8_t* to = operand(operands, plan_.codes.order, r, c);
        to[0] = to[4 * 8] = 0;
      }
      sum = sum_of_lanes(sum);
      if (lane_ == 0) {
        row.unit = max_or_nan(largest / kLargest * fabsf(scale) * format::kLevelUnit * plan_.codes.key_unit, 1e-30f);
        row.shift *= scale;
        row.zero = sum >> 1;
        rows()[r] = row;
      }
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < X::kFrags; ++i) {
        query_[n][i] = reinterpret_cast<const uint2*>(operands)[(n * X::kFrags + i) * 32 + lane_];
      }
      const DecodeRow& row = rows()[4 * n + t_];
      unit_[n] = a_.soft_cap > 0 ? 1.0f : row.unit, zero_[n] = row.zero;
    }
    const bool real = lane_ < min(kRows, at.about.rows(a_) - at.block * kRows);
    all_first_ = max_of_lanes(real ? rows()[lane_].first : 0);
    all_end_ = -max_of_lanes(real ? -rows()[lane_].end : -INT32_MAX);
  }

  // ---- A unit of keys

  // The lane's tokens of a step, two for each pair of scores: an even token below 16 (or 24, see ValueCodes::kMixed) and the next.
  // Chosen so that after the transposition a lane holds the weights of its tokens in the order of the values' operands.
  template <class Values>
  static constexpr int kPairStep = Values::kMixed ? 8 : 16;  // from the first pair of tokens to the second
  template <class Values>
  __device__ __forceinline__ int first_token() const {
    return Values::kMixed ? (g_ & 1 ? g_ + 15 : g_) : (g_ & 1 ? g_ + 7 : g_);
  }
  // Of a section whose rows are `row` bytes, with `next` from tokens 0-15 to 16-31: from the slot's start to the lane's first token,
  // and from there to the second pair.
  template <class Values>
  __device__ __forceinline__ int to_first(int row, int next) const {
    const int token = first_token<Values>();
    return (token & 15) * row + (token >> 4) * next;
  }
  template <class Values>
  static __device__ __forceinline__ int to_second(int row, int next) {
    return Values::kMixed ? 8 * row : next;
  }

  // The slots of the unit at hand.
  __device__ __forceinline__ void slots(int (&base)[kUnitSteps]) const {
#pragma unroll
    for (int step = 0; step < kUnitSteps; ++step) base[step] = slot_ + step * layout_.stride;
  }

  // Units of codes from `unit` up to `end`; returns the warp's next one. Counts tokens: one number fewer to be remembered.
  __device__ __forceinline__ int attend_codes(const DecodePlace& at, int unit, int end) {
    const int step = plan_.warps * kUnitTokens;
    int token = at.first_token(unit);
    for (const int last = at.first_token(end); token < last; token += step) {
      attend(token);
      fetch();
    }
    return at.unit_of(token);
  }

  // The only place that depends on the pair of bits: all pairs share a kernel, whose other code would else be there for each of them.
  // begin: the first token of the unit
  __device__ __forceinline__ void attend(int begin) {
    with_pair<D>(plan_.codes.pair, [&](auto pair) { attend_as<typename decltype(pair)::type>(begin); });
  }
  template <class Pair>
  __device__ __forceinline__ void attend_as(int begin) {
    using Keys = typename Pair::Keys;
    using Values = typename Pair::Values;
    int base[kUnitSteps];
    slots(base);
    const LevelTable<Keys::kTwoTables> key_table(Keys::kUniform ? nullptr : key_levels());
    const LevelTable<Values::kTwoTables> value_table(Values::kUniform ? nullptr : value_levels());
    float score[N][4 * kUnitSteps], value_scale[4 * kUnitSteps];
    ScaleRange scales;
#pragma unroll
    for (int step = 0; step < kUnitSteps; ++step) {
      wait_barrier(barrier(base[step]), phase_);
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        float s[N][2];
        multiply_keys<Pair>(shared_ + base[step], pair, key_table, s);
        const uint8_t* from = shared_ + base[step] + layout_.value_scales + to_first<Values>(2, layout_.next_scales);
        if (pair) from += to_second<Values>(2, layout_.next_scales);
        const __half2 both = *reinterpret_cast<const __half2*>(from);
        const float2 v = __half22float2(both);
        scales.add(both);
        const int i = 4 * step + 2 * pair;
        value_scale[i] = v.x, value_scale[i + 1] = v.y;
#pragma unroll
        for (int n = 0; n < N; ++n) score[n][i] = s[n][0], score[n][i + 1] = s[n][1];
      }
    }
    if (a_.soft_cap > 0) cap(score);
    const bool edge = begin < all_first_ || begin + kUnitTokens > all_end_;
    if (edge) mask<Values>(begin + first_token<Values>(), score);

    uint2 weight[N][kUnitSteps];
    float factor[N], most[N];
    scales.finish();
    bool far = false;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      most[n] = kNoKey;
#pragma unroll
      for (int i = 0; i < 4 * kUnitSteps; ++i) most[n] = fmaxf(most[n], score[n][i]);
      most[n] = over_tokens(most[n], [](float x, float y) { return fmaxf(x, y); });  // of the lane's row
      far |= (most[n] - state_.max[n]) * unit_[n] > 16;
    }
    // The maximum may lag behind: weights up to 2^16 do no harm, and most units so need no rescaling.
    if (__any_sync(0xffffffff, far)) for_each<N>([&](auto n) { rescale<n>(most[n], unit_[n]); });
    // Where scales differ much, their largest says too little about the largest product with a weight.
    const bool exact = edge || !(scales.least() * 8 >= scales.most());
    const float log_largest = log_of(scales.most());
    // Several times four rows share one branch: between branches of their own their instructions would not mix. One alone is shorter with
    // a branch inside.
    const auto weigh = [&](auto exactly) {
      for_each<N>([&](auto n) {
        factor[n] = soften<Values, n>(score[n], most[n], value_scale, log_largest, exactly, weight[n]);
      });
    };
    if constexpr (N == 1) {
      weigh(exact);
    } else if (exact) {
      weigh(std::true_type{});
    } else {
      weigh(std::false_type{});
    }
    multiply_values<Values>(base, value_table, weight, factor);
  }

  // Integer scores of the lane's rows for one of its pairs of tokens, times the key scales.
  template <class Pair, class Table>
  __device__ __forceinline__ void multiply_keys(const uint8_t* base, int pair, const Table& table,
                                                float (&s)[N][2]) const {
    using Keys = typename Pair::Keys;
    using Values = typename Pair::Values;
    constexpr format::Record kRecord{D, 32, Keys::kBits, Values::kBits};
    constexpr int kKeyRow = kRecord.key_row_bytes(), kPlaneRow = kRecord.key_plane_bytes();
    int sums[N][Keys::kSets][4] = {};
    const uint8_t* row = base + to_first<Values>(kKeyRow, layout_.next_keys);
    const uint8_t* plane = base + layout_.planes + to_first<Values>(kPlaneRow, layout_.next_planes);
    const uint8_t* scales = base + layout_.key_scales + to_first<Values>(2, layout_.next_scales);
    if (pair) {
      row += to_second<Values>(kKeyRow, layout_.next_keys);
      plane += to_second<Values>(kPlaneRow, layout_.next_planes);
      scales += to_second<Values>(2, layout_.next_scales);
    }
#pragma unroll
    for (int chunk = 0; chunk < X::Operands::kChunks; ++chunk) {
      typename Keys::Words x, y;
      typename Keys::Prepared p, q;
      Keys::load(row, plane, chunk, t_, x);
      Keys::load(row + kKeyRow, plane + kPlaneRow, chunk, t_, y);
      Keys::prepare(x, t_, p);
      Keys::prepare(y, t_, q);
      multiply_frags<Keys, 0>(p, q, chunk, table, sums);
    }
    const float2 k = __half22float2(*reinterpret_cast<const __half2*>(scales));
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int high = Keys::kWeight0 * sums[n][0][2 * i], low = Keys::kWeight0 * sums[n][0][2 * i + 1] - zero_[n];
        if constexpr (Keys::kSets == 2) {
          high += Keys::kWeight1 * sums[n][1][2 * i], low += Keys::kWeight1 * sums[n][1][2 * i + 1];
        }
        s[n][i] = static_cast<float>(high * 256 + low) * (i ? k.y : k.x);
      }
    }
  }
  template <class Keys, int I, class Table>
  __device__ __forceinline__ void multiply_frags(const typename Keys::Prepared& x, const typename Keys::Prepared& y,
                                                 int chunk, const Table& table, int (&sums)[N][Keys::kSets][4]) const {
    if constexpr (I < X::Operands::kFrags) {
      uint32_t a[4], minus[4];
      Keys::template expand<I>(x, y, table, a, minus);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const uint2 b = query_[n][chunk * X::Operands::kFrags + I];
        mma_bytes<Keys::kMasks>(sums[n][Keys::set_of(I)], a, b);
        if constexpr (Keys::kTwoTables) mma_bytes(sums[n][0], minus, b);
      }
      multiply_frags<Keys, I + 1>(x, y, chunk, table, sums);
    }
  }

  // Capped scores are in units of their own: 1 / log2(e).
  __device__ __forceinline__ void cap(float (&score)[N][4 * kUnitSteps]) const {
    // A true division has a rare path, which waits for all that is on its way; and it would be done ahead of the loop, cap or not.
    const float limit = a_.soft_cap * kLog2E, inverse = __fdividef(1.0f, limit);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const DecodeRow& row = rows()[4 * n + t_];
#pragma unroll
      for (int i = 0; i < 4 * kUnitSteps; ++i)
        score[n][i] = limit * tanh_fast(fmaf(score[n][i], row.unit, row.shift) * inverse);
    }
  }
  // Within 1e-6, absolute.
  static __device__ __forceinline__ float tanh_fast(float x) {
    return 1 - __fdividef(2.0f, exp2_fast(2 * kLog2E * x) + 1);
  }

  // Keys that a row does not see; their slots may hold anything.
  template <class Values>
  __device__ __forceinline__ void mask(int token, float (&score)[N][4 * kUnitSteps]) const {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const DecodeRow& row = rows()[4 * n + t_];
      const unsigned keys = max(row.end - row.first, 0);
#pragma unroll
      for (int i = 0; i < 4 * kUnitSteps; ++i) {
        const int key = token + i / 4 * kStepTokens + i % 4 / 2 * kPairStep<Values> + i % 2;
        score[n][i] = static_cast<unsigned>(key - row.first) < keys ? score[n][i] : -INFINITY;
      }
    }
  }

  // The least and the largest value scale of a unit: NaN if one is.
  struct ScaleRange {
    __half2 top, bottom;
    bool any = false;

    __device__ __forceinline__ void add(__half2 x) {
      top = any ? __hmax2_nan(top, x) : x, bottom = any ? __hmin2_nan(bottom, x) : x, any = true;
    }
    // Over the lanes: `top` becomes (largest, - least).
    __device__ __forceinline__ void finish() {
      top = __hmax2_nan(__lows2half2(top, __hneg2(bottom)), __highs2half2(top, __hneg2(bottom)));
#pragma unroll
      for (int bit = 4; bit < 32; bit *= 2) top = __hmax2_nan(top, __shfl_xor_sync(0xffffffff, top, bit));
    }
    __device__ __forceinline__ float most() const { return __low2float(top); }
    __device__ __forceinline__ float least() const { return -__high2float(top); }
  };

  // Softmax weights of row n's tokens times value scales, as the operands of the second product: integers, whose unit is returned in
  // terms of the running maximum. log_largest: of the value scales; exact, maybe a constant: the largest product is to be found, and keys may
  // be masked, whose scale does not matter.
  template <class Values, int n, typename Bool>
  __device__ __forceinline__ float soften(const float (&score)[4 * kUnitSteps], float most,
                                          const float (&value_scale)[4 * kUnitSteps], float log_largest, Bool exact,
                                          uint2 (&weight)[kUnitSteps]) {
    constexpr int kScores = 4 * kUnitSteps;
    const float u = unit_[n];
    float v[kScores];
#pragma unroll
    for (int i = 0; i < kScores; ++i) v[i] = value_scale[i];
    if (exact) {
      float largest = 0;
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        v[i] = score[i] == -INFINITY ? 0 : v[i];
        largest = max_or_nan(largest, exp2_fast((score[i] - most) * u) * v[i]);
      }
      log_largest = log_of(over_tokens(largest, [](float x, float y) { return max_or_nan(x, y); }));
    }
    // Integers go up to 65,500; `offset` serves both ways, so that its rounding does not matter.
    constexpr float kLog2Largest = 15.999f, kInteger = 8388608;  // adding 2^23 leaves an integer in the low bits
    const float offset = fmaf(-most, u, kLog2Largest - log_largest);
    const float down =
        most > kNoKey ? exp2_fast(fmaf(-state_.max[n], u, -offset)) : 0;  // without a key, 0 times anything
    float total = 0;
    uint32_t integer[kScores], sum = 0;
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const float p = exp2_fast(fmaf(score[i], u, offset));
      total += p;
      integer[i] = __float_as_uint(fmaf(p, v[i], kInteger));
      sum += integer[i];
    }
    state_.total[n] = fmaf(total, down, state_.total[n]);
    if constexpr (Values::kTop != 0) {
      state_.weights[n] =
          fmaf(static_cast<float>(static_cast<int>(sum - kScores * 0x4B000000u)), down, state_.weights[n]);
    }
    // Columns are a row's high and low bytes in turn. A 16-bit number of a tile holds a byte of two tokens, so that a transposition moves
    // the weights of both.
    const auto column = [&](int i) {
      const uint32_t x = transposed(select_bytes(integer[i], integer[i + 1], 0x4051));
      return Values::kMixed ? select_bytes(x, x, 0x3120) : x;
    };
#pragma unroll
    for (int step = 0; step < kUnitSteps; ++step) {
      weight[step] = uint2{column(4 * step), column(4 * step + 2)};
    }
    return down;
  }

  static __device__ __forceinline__ float log_of(float largest) { return __log2f(max_or_nan(largest, 1e-30f)); }

  template <int n>
  __device__ __forceinline__ void rescale(float most, float u) {
    most = fmaxf(most, state_.max[n]);
    const float by = exp2_fast((state_.max[n] - most) * u);
    state_.max[n] = most;
    state_.total[n] *= by, state_.weights[n] *= by;
#pragma unroll
    for (int i = 0; i < X::kTiles; ++i) state_.sums[i][n][0] *= by, state_.sums[i][n][1] *= by;
  }

  template <class Values, class Table>
  __device__ __forceinline__ void multiply_values(const int (&base)[kUnitSteps], const Table& table,
                                                  const uint2 (&weight)[N][kUnitSteps], const float (&factor)[N]) {
#pragma unroll
    for (int group = 0; group < Values::kGroups; ++group) {
      typename Values::Words a[kUnitSteps], b[kUnitSteps];
#pragma unroll
      for (int step = 0; step < kUnitSteps; ++step) {
        const uint8_t* block = shared_ + base[step] + layout_.values;
        Values::load(block, group, lane_, a[step]);
        Values::load(block + layout_.next_values, group, lane_, b[step]);
      }
      multiply_tiles<Values, 0>(a, b, group, table, weight, factor);
    }
  }
  template <class Values, int I, class Table>
  __device__ __forceinline__ void multiply_tiles(const typename Values::Words (&a)[kUnitSteps],
                                                 const typename Values::Words (&b)[kUnitSteps], int group,
                                                 const Table& table, const uint2 (&weight)[N][kUnitSteps],
                                                 const float (&factor)[N]) {
    if constexpr (I < 4) {
      if (4 * group + I >= X::kTiles) return;
      int sums[N][4] = {};
#pragma unroll
      for (int step = 0; step < kUnitSteps; ++step) {
        uint32_t plus[4], minus[4];
        Values::template expand<I>(a[step], b[step], table, plus, minus);
#pragma unroll
        for (int n = 0; n < N; ++n) {
          mma_bytes<Values::kMasks, true>(sums[n], plus, weight[n][step]);
          if constexpr (Values::kTwoTables) mma_bytes<false, true>(sums[n], minus, weight[n][step]);
        }
      }
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int x = sums[n][2 * h] * 256 + sums[n][2 * h + 1];
          float& to = state_.sums[4 * group + I][n][h];
          to = fmaf(static_cast<float>(x), factor[n], to);  // the upper rows' factor kUpper waits for the end
        }
      }
      multiply_tiles<Values, I + 1>(a, b, group, table, weight, factor);
    }
  }

  // ---- The end of a segment

  __device__ __forceinline__ float* join() const { return reinterpret_cast<float*>(shared_ + plan_.join); }

  __device__ __forceinline__ float* result() const { return reinterpret_cast<float*>(shared_ + plan_.result); }

  // Which blocks share a segment: worked out while the first bytes are on their way.
  __device__ __forceinline__ void find_sharers(const DecodePlace& at) const {
    const DecodeCut& cut = notes().cut;
    const int first = cut.block_of(at.begin), last = cut.block_of(at.end() - 1);
    __syncwarp();
    if (lane_ == 0) notes().first_block = first, notes().blocks = last - first + 1;
    __syncwarp();
  }

  // Units [from, to) of the list were this block's share of the segment.
  __device__ __forceinline__ void finish_segment(const DecodePlace& at, int from, int to) {
    const bool whole = from == at.begin && to == at.end();
    join_warps(whole ? result() : part(static_cast<int>(blockIdx.x), from == at.begin));
    __syncthreads();
    const float* parts = result();
    int groups = 1;
    if (!whole) parts = join(), groups = arrives_last() ? join_blocks() : 0;
    if (groups > 0) finish_rows(at, parts, groups);
    __syncthreads();
  }

  // The result that a block leaves of a segment which it opens, or goes on with: [rows, 4 + d].
  __device__ __forceinline__ float* part(int block, bool opens) const {
    return plan_.parts + static_cast<int64_t>(2 * block + (opens ? 1 : 0)) * kRows * X::kPart;
  }

  // The warps' states become one, laid out by rows: [rows, 4 + d] in shared or global memory. Where memory is short, half of the warps
  // first take in another's state; then all share the work.
  __device__ __forceinline__ void join_warps(float* to) {
    float m[N], total[N];
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const auto add = [](float x, float y) { return x + y; };
      total[n] = over_tokens(state_.total[n], add);
      m[n] =
          total[n] == 0 ? -INFINITY : fmaf(state_.max[n], unit_[n], a_.soft_cap > 0 ? 0.0f : rows()[4 * n + t_].shift);
      const float less = plan_.codes.value_top * over_tokens(state_.weights[n], add);
#pragma unroll
      for (int i = 0; i < X::kTiles; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float& x = state_.sums[i][n][h];
          x = (plan_.codes.value_steps[h] * x - less) * format::kLevelUnit;
        }
      }
    }
    __syncthreads();  // scratch of exact keys was there
    const int states = plan_.states;
    float* state = join() + warp_ % states * X::kJoin * 32 + lane_;
    const auto element = [&](int n, int i, int h) -> float& {
      return state[32 * (2 * N + (n * X::kTiles + i) * 2 + h)];
    };
    const auto leave = [&] {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        state[32 * n] = m[n], state[32 * (N + n)] = total[n];
#pragma unroll
        for (int i = 0; i < X::kTiles; ++i)
          element(n, i, 0) = state_.sums[i][n][0], element(n, i, 1) = state_.sums[i][n][1];
      }
    };
    // One copy of `leave`: those that have no room, if any, in the first round, the others in the second.
#pragma unroll 1
    for (int round = states < plan_.warps ? 0 : 1; round < 2; ++round) {
      if (round == 1 && warp_ + states < plan_.warps) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
          const float top = fmaxf(m[n], state[32 * n]);
          const float mine = weight_of(m[n], top), theirs = weight_of(state[32 * n], top);
          m[n] = top, total[n] = mine * total[n] + theirs * state[32 * (N + n)];
#pragma unroll
          for (int i = 0; i < X::kTiles; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              float& x = state_.sums[i][n][h];
              x = mine * x + theirs * element(n, i, h);
            }
          }
        }
      }
      if ((warp_ < states) == (round == 1)) leave();
      __syncthreads();
    }
    constexpr int kStates = kMaxWarps;
#pragma unroll 1
    for (int n = 0; n < N; ++n) {
      const auto of = [&](int warp, int i) { return join()[(warp * X::kJoin + i) * 32 + lane_]; };
      float weight[kStates], top = -INFINITY;
#pragma unroll
      for (int w = 0; w < kStates; ++w) weight[w] = w < states ? of(w, n) : -INFINITY, top = fmaxf(top, weight[w]);
#pragma unroll
      for (int w = 0; w < kStates; ++w) weight[w] = weight_of(weight[w], top);
      const auto sum = [&](int i) {
        float x = 0;
#pragma unroll
        for (int w = 0; w < kStates; ++w) {
          if (w < states) x = fmaf(weight[w], of(w, i), x);
        }
        return x;
      };
      float* row = to + (4 * n + t_) * X::kPart;
      if (warp_ == 0) {
        const float all = sum(N + n);
        if (g_ == 0) row[0] = top, row[1] = all;
      }
#pragma unroll 1
      for (int i = warp_; i < 2 * X::kTiles; i += plan_.warps) {  // eight channels
        row[X::kHead + 8 * i + g_] = sum(2 * N + 2 * X::kTiles * n + i);
      }
    }
  }

  // Leaves this block's part to the last of the blocks that share the segment; true: that is this one.
  __device__ __forceinline__ bool arrives_last() const {
    if (threadIdx.x == 0) flag() = count_arrival(plan_.arrivals + notes().first_block, notes().blocks);
    __syncthreads();
    return flag();
  }

  // The parts of all blocks that share the segment become a few, [groups, rows, 4 + d] in `join`, in their order: the number of groups.
  __device__ __forceinline__ int join_blocks() const {
    const int first = notes().first_block, count = notes().blocks;
    // Four channels of a row for a thread; several threads share the parts where rows are few. Parts are read eight at a time, all at
    // once, under a running maximum.
    constexpr int kQuads = kRows * D / 4, kBatch = 8;
    const int groups = max(1, static_cast<int>(blockDim.x) / kQuads);
    for (int e = threadIdx.x; e < groups * kQuads; e += blockDim.x) {
      const int group = e / kQuads, quad = e % kQuads, r = quad / (D / 4), channel = 4 * (quad % (D / 4));
      float m = -INFINITY, total = 0;
      float4 sum{0, 0, 0, 0};
      for (int begin = group; begin < count; begin += kBatch * groups) {
        float2 head[kBatch];
        float4 x[kBatch];
        float top = m;
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          const int i = begin + k * groups;
          head[k] = {-INFINITY, 0}, x[k] = {0, 0, 0, 0};
          if (i >= count) continue;
          const float* from = part(first + i, i == 0) + r * X::kPart;
          head[k] = __ldcg(reinterpret_cast<const float2*>(from));
          x[k] = __ldcg(reinterpret_cast<const float4*>(from + X::kHead + channel));
        }
#pragma unroll
        for (int k = 0; k < kBatch; ++k) top = fmaxf(top, head[k].x);
        const float by = weight_of(m, top);
        m = top, total *= by, sum.x *= by, sum.y *= by, sum.z *= by, sum.w *= by;
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          const float weight = weight_of(head[k].x, top);
          if (weight == 0) continue;
          total = fmaf(weight, head[k].y, total);
          sum.x = fmaf(weight, x[k].x, sum.x), sum.y = fmaf(weight, x[k].y, sum.y);
          sum.z = fmaf(weight, x[k].z, sum.z), sum.w = fmaf(weight, x[k].w, sum.w);
        }
      }
      float* to = join() + group * kShare + r * X::kPart;
      if (channel == 0) to[0] = m, to[1] = total;
      *reinterpret_cast<float4*>(to + X::kHead + channel) = sum;
    }
    __syncthreads();
    return groups;
  }
  static __device__ __forceinline__ float weight_of(float part, float top) {
    return part == -INFINITY ? 0 : exp2_fast(part - top);
  }

  static constexpr int kShare = kRows * X::kPart;  // of a group

  // From the sums of all keys of a segment, in the rotated space, to results. parts: [groups, rows, 4 + d] in shared memory.
  __device__ __forceinline__ void finish_rows(const DecodePlace& at, const float* parts, int groups) const {
#pragma unroll 1
    for (int r = warp_; r < kRows; r += plan_.warps) {
      const float* from = parts + r * X::kPart;
      float m = -INFINITY, total = 0, y[X::kPerLane] = {};
#pragma unroll 1
      for (int g = 0; g < groups; ++g, from += kShare) {
        const float top = fmaxf(m, from[0]), by = weight_of(m, top), weight = weight_of(from[0], top);
        m = top, total = total * by + weight * from[1];
#pragma unroll
        for (int i = 0; i < X::kPerLane; ++i) y[i] = y[i] * by + weight * from[X::kHead + channel(i)];
      }
      transform<typename X::Rotation>(y, lane_);
      apply(signs() + D, y);
      int token, head, position;
      if (!find_row(at, r, token, head, position)) continue;
      float by = 1;
      if (a_.sink_logits) {  // one more score, without a value
        const float sink = a_.sink_logits[head] * kLog2E, top = fmaxf(m, sink);
        if (top > -INFINITY) {
          by = m == -INFINITY ? 0 : exp2_fast(m - top);
          total = total * by + exp2_fast(sink - top), m = top;
        }
      }
      const int64_t to = int64_t{token} * a_.q_heads + head;
      const float inverse = total == 0 ? 0 : by / total;
#pragma unroll
      for (int i = 0; i < X::kPerLane; ++i) {
        if (counts()) store_float(a_.out, a_.dtype, to * D + channel(i), y[i] * inverse);
      }
      if (lane_ == 0) {
        const bool only_sink = by == 0;  // whose logit needs no rounding
        a_.lse[to] = total == 0 ? -INFINITY : only_sink ? a_.sink_logits[head] : (m + log2f(total)) * kLn2;
      }
    }
  }

  // ---- The exact tail

  // A unit of exact keys, 0-7 in the first slot and 8-15 in the second, on tensor cores. A row again has two columns, so that its results
  // lie where those of codes do: a weight is the sum of two numbers of the tail's type; a query is of that type, and nobody looks at its
  // second column. The output of a row is rotated, like that of codes.
  __device__ __forceinline__ void attend_exact(const DecodePlace& at, int unit) {
    static_assert(kUnitSteps == 2);
    int base[kUnitSteps];
    slots(base);
    const int first = unit * kUnitSteps * layout_.exact_keys;
#pragma unroll
    for (int step = 0; step < kUnitSteps; ++step) wait_barrier(barrier(base[step]), phase_);
    const int per_slot = layout_.exact_keys, left = at.about.exact - first;
    const auto holds = [&](int j) { return j % 8 < per_slot && j / 8 * per_slot + j % 8 < left; };
    // What no one holds may be anything, and must not spoil a sum: there, another key is looked at, and counts nothing.
    const auto row_of = [&](int j) {
      return shared_ + (holds(j) ? (j < 8 ? base[0] : base[1]) + j % 8 * layout_.exact_stride : base[0]);
    };
    for_each<N>([&](auto n) {
      float dot[4] = {};
      const uint8_t* query = plain() + ((4 * n + lane_ % 8 / 2) * D + lane_ / 8 * 8) * kExactBytes;
      const uint8_t* keys = row_of(lane_ % 16) + lane_ / 16 * 8 * kExactBytes;
#pragma unroll
      for (int c = 0; c < D; c += 32) {
        const uint4 q = load_tiles(query + c * kExactBytes);
        multiply_exact(dot, load_tiles(keys + c * kExactBytes), q.x, q.y);
        if (c + 16 < D) multiply_exact(dot, load_tiles(keys + (c + 16) * kExactBytes), q.z, q.w);
      }

      // Scores of the lane's row for keys g and g + 8, in the numbers of the integer scores, so that one running maximum serves both.
      int token, head, position;
      const bool real = find_row(at, 4 * n + t_, token, head, position);
      const DecodeRow& row = rows()[4 * n + t_];
      const bool capped = a_.soft_cap > 0;
      float score[2], p[2];
      unsigned seen[2];     // by lanes
      bool hidden = false;  // a key is held that the row does not see
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int j = 8 * h + g_, k = exact_key(at, first + h * per_slot + g_);
        score[h] = dot[2 * h] * a_.softmax_scale;
        if (capped) score[h] = a_.soft_cap * tanh_fast(__fdividef(score[h], a_.soft_cap));
        score[h] = capped ? score[h] * kLog2E : __fdividef(score[h] * kLog2E - row.shift, unit_[n]);
        const bool sees = real && holds(j) && k >= a_.first_visible(position) && k <= position &&
                          (k < at.about.sinks || k >= row.end);
        if (!sees) score[h] = -INFINITY;
        seen[h] = __ballot_sync(0xffffffff, sees), hidden |= real && holds(j) && !sees;
      }
      const float u = unit_[n];
      const float most = over_tokens(fmaxf(score[0], score[1]), [](float x, float y) { return fmaxf(x, y); });
      if (__any_sync(0xffffffff, (most - state_.max[n]) * u > 16)) rescale<n>(most, u);
      uint32_t weight[2];
      constexpr float kDown = 1.0f / 16;  // weights go up to 2^16, which is too much for float16
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        p[h] = score[h] == -INFINITY ? 0 : exp2_fast((score[h] - state_.max[n]) * u);
        state_.total[n] += p[h];
        weight[h] = transposed(split(p[h] * kDown));
      }

      const uint8_t* values = row_of(lane_ % 8 + lane_ / 16 * 8) + (D + lane_ / 8 % 2 * 8) * kExactBytes;
      float y[2 * X::kTiles];  // channel 8 e + g of row t
#pragma unroll
      for (int i = 0; i < X::kTiles; ++i) {
        float d[4] = {};
        multiply_exact(d, load_transposed(values + 16 * i * kExactBytes), weight[0], weight[1]);
        y[2 * i] = d[0] + d[1], y[2 * i + 1] = d[2] + d[3];
      }
      // A weight of 0 does not undo a value that is no number: where one may have come from a key that a row does not see, rows are
      // multiplied once more, each with one of the keys that it sees in place of the others.
      if (__any_sync(0xffffffff, hidden)) {
        float spoiled = 0;  // stays 0 if all are finite
#pragma unroll
        for (int e = 0; e < 2 * X::kTiles; ++e) spoiled = fmaf(y[e], 0, spoiled);
        if (__any_sync(0xffffffff, spoiled != 0)) {
          float* scratch = join() + warp_ * D;  // free until a warp leaves its state there, which waits for all
#pragma unroll 1
          for (int r = 0; r < 4; ++r) {
            __syncwarp();
            multiply_alone(r, seen, row_of, weight, scratch);
            __syncwarp();
#pragma unroll
            for (int e = 0; e < 2 * X::kTiles; ++e) y[e] = t_ == r ? scratch[8 * e + g_] : y[e];
          }
        }
      }
      rotate_columns(y);
      // In the numbers of the sums (join_warps): before what waits for the end.
      constexpr float kFactor = block_norm(X::kLog) / (kDown * format::kLevelUnit);
#pragma unroll
      for (int i = 0; i < X::kTiles; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float factor = kFactor * plan_.codes.value_inverses[h];
          state_.sums[i][n][h] = fmaf(y[2 * i + h], factor, state_.sums[i][n][h]);
        }
      }
    });
  }

  // The tail is of either 16-bit type. These two know which: all else is one copy of the code for both.
  __device__ __forceinline__ void multiply_exact(float (&d)[4], const uint4& a, uint32_t b0, uint32_t b1) const {
    if (a_.dtype == Dtype::kBFloat16) {
      mma_floats<__nv_bfloat16>(d, a, b0, b1);
    } else {
      mma_floats<__half>(d, a, b0, b1);
    }
  }
  // x as a number of the tail's type and one that holds what is left of it, side by side.
  __device__ __forceinline__ uint32_t split(float x) const {
    return a_.dtype == Dtype::kBFloat16 ? split_as<__nv_bfloat16>(x) : split_as<__half>(x);
  }
  template <typename T>
  static __device__ __forceinline__ uint32_t split_as(float x) {
    float kept[2];
    floats_of_words<T>({word_of_floats<T>(x, 0)}, kept);
    return word_of_floats<T>(x, x - kept[0]);
  }

  // Rotates the columns of a product's results as values were rotated, but for the factor 1 / sqrt(n). y: channel 8 e + g of row t.
  __device__ __forceinline__ void rotate_columns(float (&y)[2 * X::kTiles]) const {
    using Columns = HadamardTraits<X::Rotation::kBlocks, X::kLog, 8, 1>;
#pragma unroll
    for (int e = 0; e < 2 * X::kTiles; ++e) y[e] *= signs()[D + 8 * e + g_];
#pragma unroll
    for (int bit = 1; bit < 8; bit *= 2) {
      const float side = g_ & bit ? -1.0f : 1.0f;
#pragma unroll
      for (int e = 0; e < 2 * X::kTiles; ++e) y[e] = fmaf(side, y[e], __shfl_xor_sync(0xffffffff, y[e], 4 * bit));
    }
    lane_butterflies<1, Columns::kChunks>(y);
    mix_blocks<Columns>(y);
  }

  // The sums of the row of lanes with t = r, over the keys that it sees only.
  template <typename RowOf>
  __device__ __forceinline__ void multiply_alone(int r, const unsigned (&seen)[2], RowOf&& row_of,
                                                 const uint32_t (&weight)[2], float* scratch) const {
    const auto sees = [&](int j) { return ((j < 8 ? seen[0] : seen[1]) >> (4 * (j % 8) + r) & 1) != 0; };
    int some = 0;
    while (some < 16 && !sees(some)) ++some;
    const int j = lane_ % 8 + lane_ / 16 * 8;
    const uint8_t* values = row_of(some == 16 || sees(j) ? j : some) + (D + lane_ / 8 % 2 * 8) * kExactBytes;
#pragma unroll 1
    for (int i = 0; i < X::kTiles; ++i) {
      float d[4] = {};
      multiply_exact(d, load_transposed(values + 16 * i * kExactBytes), weight[0], weight[1]);
      if (t_ != r) continue;
      scratch[16 * i + g_] = some == 16 ? 0 : d[0] + d[1], scratch[16 * i + 8 + g_] = some == 16 ? 0 : d[2] + d[3];
    }
  }

  const Attention& a_;
  const SlotLayout& layout_;
  const DecodePlan& plan_;
  uint8_t* shared_;
  const int warp_, lane_, g_, t_;

  int slot_;  // the next to arrive of the warp's slots
  uint32_t phase_;
  uint32_t source_;  // the lane's block of the batch at hand
  int turn_;         // the first lane whose block is still to be copied
  int page_;         // of the lane's block in the next batch
  // The first unit of the next batch, and the end of the units like it; only while `copy` runs.
  int fetch_unit_, fetch_stop_;

  uint2 query_[N][X::kFrags];
  float unit_[N];  // of rows 4 n + t
  int zero_[N];
  int all_first_, all_end_;  // keys that all rows see
  DecodeState<X> state_;
};

template <int D, int N>
__global__ void __launch_bounds__(decode_threads(N, D), decode_blocks(N, D))
    decode_kernel(const __grid_constant__ Attention a, const __grid_constant__ SlotLayout layout,
                  const __grid_constant__ DecodePlan plan) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800  // split_kv_takes asks
  extern __shared__ __align__(128) uint8_t shared[];
  Decoder<D, N>(a, layout, plan, shared).run();
#endif
}

}  // namespace turboquant::cuda
