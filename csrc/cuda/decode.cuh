// Decode: attention of few query rows (a step's new tokens times the query heads of a KV head) over long packed caches, straight
// from the codes, in one launch.
//
// Everything is a product of bytes on tensor cores (mma.cuh). Queries are rotated and rounded to 16-bit integers, softmax weights
// times value scales to 16 bits under one factor per unit of keys; each becomes a high and a low byte in two neighbouring
// columns, so that four rows fill the eight columns of a product, and a lane finds both halves of a sum in its own registers:
//   scores  [16 tokens x channels] . [channels x 4 rows (high, low)]   codes on the left, expanded in registers (fragments.cuh)
//   output  [16 channels x 32 tokens] . [32 tokens x 4 rows (high, low)]
// Lane (g, t) = (lane / 4, lane % 4) so holds tokens of row t in the scores and channels of row t in the output: maxima, weights and
// rescaling need no exchange, only the weights change places, by transposing 8 x 8 tiles (movmatrix).
//
// Work is a flat list: sequences, their KV heads, blocks of rows, and units of keys. Block i of a fixed grid takes the i-th equal
// part of the list; its warps take units in turn, each with its own ring of asynchronous copies that runs ahead across all borders.
// A run of units of one (sequence, KV head, block of rows) is a segment: its warps' results are joined in a tree; a segment
// that is only a part is left in the workspace, and the last of the blocks that share it joins the parts in their order. So results
// are the same in every run, lengths are read on the device, and the workspace depends on the grid only.
#pragma once

#include "attention.cuh"
#include "fragments.cuh"
#include "hadamard.cuh"
#include "ring.cuh"

namespace turboquant::cuda {

constexpr int kStepTokens = 32;  // keys of a slot of the ring: two value blocks
constexpr int kUnitSteps = 2;    // slots of a unit
constexpr int kUnitTokens = kStepTokens * kUnitSteps;
constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;
constexpr float kNoKey = -1e38f;  // a running maximum before the first key
constexpr int kMaxDecodeGrid = 4096;

// Where things are in a slot: 32 tokens, one tile or two. Offsets in bytes.
struct SlotLayout {
  int bytes;                                             // of a slot; its barrier follows
  int copies, copy_shift, copy_bytes;                    // of a slot: 1 or 2; one brings 2^copy_shift tokens, a tile
  int page_shift, record_bytes;                          // a page has 2^page_shift tokens
  int exact_keys, exact_bytes;                           // of the exact tail in a slot; of one, key and value
  int planes, values, key_scales, value_scales;          // sections of the first 16 tokens
  int next_keys, next_planes, next_values, next_scales;  // from there to tokens 16-31

  SlotLayout(const format::Record& r, int element_bytes)
      : bytes(kStepTokens / r.tile_tokens() * r.tile_bytes()), copies(kStepTokens / r.tile_tokens()),
        copy_shift(r.tile_tokens() == 16 ? 4 : 5), copy_bytes(r.tile_bytes()), page_shift(r.page_size == 16   ? 4
                                                                                          : r.page_size == 32 ? 5
                                                                                          : r.page_size == 64 ? 6
                                                                                                              : 7),
        record_bytes(r.record_bytes()), exact_keys(0), exact_bytes(2 * r.head_dim * element_bytes),
        planes(r.key_planes()), values(r.value_blocks()), key_scales(r.key_scales()), value_scales(r.value_scales()) {
    exact_keys = bytes / exact_bytes < 8 ? bytes / exact_bytes : 8;
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
  int queries, plain;  // queries as operands; as they came, float [rows, d], where there is an exact tail
  int join, rows;      // results to be joined; what is known about each row
  int places, copies;  // [warps, 2] places in the list of work; [warps] what is copied
  int bytes;           // all
  float* parts;        // [grid, 2, rows, 4 + d]: partial results
  uint32_t* arrivals;  // [grid], 0 between launches
};

constexpr int kBarrierBytes = 16;

// What the keys of one query row are, and its numbers.
struct DecodeRow {
  float unit, shift;  // score * log2(e) = unit * integer score + shift
  int zero;           // what the sums of masked grids are too large by
  int first, end;     // keys [first, end) come from codes
};

// All that follows from the length of a sequence.
struct DecodeSequence {
  int queries, length, blocks;  // blocks of rows
  int first, coded, units;      // first key of unit 0; units of codes; units with the exact ones that follow
  int sinks, recent, exact;     // exact keys that some row sees: [0, sinks) and [recent, length), together `exact`

  __device__ __forceinline__ int rows(const Attention& a) const { return queries * a.group; }
};

template <int ROWS>
__device__ __forceinline__ DecodeSequence describe(const Attention& a, const SlotLayout& layout, int s) {
  DecodeSequence x;
  x.queries = a.num_queries(s), x.length = a.length(s);
  x.blocks = (x.queries * a.group + ROWS - 1) / ROWS;
  const int begin = x.length - x.queries, last = x.length - 1;
  const Attention::Exact at_begin = a.exact(s, begin), at_last = a.exact(s, last);
  const int first = max(max(a.first_visible(begin), at_begin.sinks), 0), end = max(at_last.recent, 0);
  x.first = first / kUnitTokens * kUnitTokens;
  x.coded = first < end ? (end - x.first + kUnitTokens - 1) / kUnitTokens : 0;
  x.sinks = min(at_begin.sinks, x.length);
  x.recent = a.has_tail(s) ? max(min(at_begin.recent, x.length), x.sinks) : x.length;
  x.exact = x.sinks + x.length - x.recent;
  const int per_unit = kUnitSteps * layout.exact_keys;
  x.units = max(1, x.coded + (x.exact + per_unit - 1) / per_unit);
  return x;
}

// A place in the flat list of work.
struct DecodePlace {
  int sequence, head, block;
  int begin;  // of the segment's units in the list
  DecodeSequence about;

  // Before a sequence whose units begin at `begin`.
  static __device__ __forceinline__ DecodePlace before(const Attention& a, int sequence, int begin) {
    return {sequence - 1, a.kv_heads - 1, 0, begin, {}};
  }

  __device__ __forceinline__ int end() const { return begin + about.units; }
  __device__ __forceinline__ int coded_end() const { return begin + about.coded; }

  // Moves on to the (sequence, head, block) that holds `unit`.
  template <int ROWS>
  __device__ __forceinline__ void seek(const Attention& a, const SlotLayout& layout, int unit) {
    while (unit >= end()) {
      begin = end();
      if (++block < about.blocks) continue;
      block = 0;
      if (++head < a.kv_heads) continue;
      head = 0;
      do {
        if (++sequence >= a.seqs) {  // the end of the list
          about.units = INT32_MAX - begin, about.coded = about.exact = 0;
          return;
        }
        about = describe<ROWS>(a, layout, sequence);
      } while (about.blocks == 0);
    }
  }
};

// What a warp needs to know about the segment that it copies. In shared memory, to spare registers.
struct __align__(16) DecodeCopies {
  int first, length, visible;  // key of unit 0 of the list; keys; pages before `visible` may be gone
  int head, exact;             // exact: units of the tail
  const int32_t* table;        // the sequence's row of block_table
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

__device__ __forceinline__ float exp2_fast(float x) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
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

__device__ __forceinline__ float read_float(const void* p, ScalarType dtype, int64_t i) {
  if (dtype == ScalarType::BFloat16) return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
  if (dtype == ScalarType::Half) return __half2float(static_cast<const __half*>(p)[i]);
  return static_cast<const float*>(p)[i];
}

__device__ __forceinline__ void write_float(void* p, ScalarType dtype, int64_t i, float x) {
  if (dtype == ScalarType::BFloat16) {
    static_cast<__nv_bfloat16*>(p)[i] = __float2bfloat16_rn(x);
  } else if (dtype == ScalarType::Half) {
    static_cast<__half*>(p)[i] = __float2half_rn(x);
  } else {
    static_cast<float*>(p)[i] = x;
  }
}

// N: products of four rows each.
template <class Keys, class Values, int D, int N>
struct DecodeTraits {
  static constexpr int kRows = 4 * N;
  static constexpr int kFrags = D / 32;         // operands of a row's query
  static constexpr int kTiles = D / 16;         // products of an output
  static constexpr int kSums = 2 * kTiles * N;  // floats of a lane
  static constexpr int kJoin = kSums + 2 * N;   // and its maxima and denominators
  static constexpr int kLog = D % 3 == 0 ? (D == 192 ? 6 : 5) : D == 64 ? 6 : D == 128 ? 7 : 8;
  using Rotation = HadamardTraits<D % 3 == 0 ? 3 : 1, kLog, 32, (1 << kLog) / 32>;
  static constexpr int kPerLane = D / 32;  // channels of a row in a lane of its warp
  static constexpr format::Record kRecord{D, 32, Keys::kBits, Values::kBits};
  static constexpr int kKeyRow = kRecord.key_row_bytes(), kPlaneRow = kRecord.key_plane_bytes();
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

template <class Keys, class Values, int D, int N>
class Decoder {
 public:
  using X = DecodeTraits<Keys, Values, D, N>;
  static constexpr int kRows = X::kRows;

  __device__ __forceinline__ Decoder(const Attention& a, const SlotLayout& layout, const DecodePlan& plan,
                                     uint8_t* shared)
      : a_(a), layout_(layout), plan_(plan), shared_(shared), warp_(threadIdx.x / 32), lane_(threadIdx.x % 32),
        g_(lane_ / 4), t_(lane_ % 4), key_table_(a.key_levels, Keys::kBits),
        value_table_(a.value_levels, Values::kBits) {}

  __device__ __forceinline__ void run() {
    int begin, end;
    if (!find_work(begin, end)) return;
    start_ring(begin, end);
    int unit = begin + warp_;
    for (int from = begin; from < end;) {
      seek(place(0), from);
      const DecodePlace& at = place(0);
      const int to = min(end, at.end()), coded = at.coded_end();
      prepare_queries(at);
      state_.clear();
      const int first = at.about.first - at.begin * kUnitTokens;
      const bool empty = coded == at.begin && at.about.exact == 0;  // has a unit, but nothing in it
      for (; unit < min(to, coded); unit += plan_.warps) {
        attend(first + unit * kUnitTokens);
        fetch();
      }
      for (; unit < to; unit += plan_.warps) {
        if (empty) continue;
        attend_exact(at, unit - coded);
        fetch();
      }
      finish_segment(at, from, to);
      from = to;
    }
  }

 private:
  // ---- The list of work

  // Places live in shared memory, because they are large and rarely looked at: a warp has one for what it attends (0), one for what
  // it copies next (1).
  __device__ __forceinline__ DecodePlace& place(int which) const {
    return reinterpret_cast<DecodePlace*>(shared_ + plan_.places)[2 * warp_ + which];
  }
  __device__ __forceinline__ DecodeCopies& copies() const {
    return reinterpret_cast<DecodeCopies*>(shared_ + plan_.copies)[warp_];
  }
  __device__ __forceinline__ void seek(DecodePlace& place, int unit) const {
    DecodePlace p = place;
    if (unit < p.end()) return;
    p.template seek<kRows>(a_, layout_, unit);
    __syncwarp();
    if (lane_ == 0) place = p;
    __syncwarp();
  }

  // Units [begin, end) are this block's; false: none. Leaves the warp's places before the sequence that holds `begin`, or shortly
  // before that. Every warp works this out for itself, without waiting for the others: a lane counts the units of `each` neighbouring sequences.
  __device__ __forceinline__ bool find_work(int& begin, int& end) {
    prefetch_constants();
    const int each = (a_.seqs + 31) / 32, mine = lane_ * each;
    int units = 0, segments = 0;
    for (int s = mine; s < min(mine + each, a_.seqs); ++s) {
      const DecodeSequence x = describe<kRows>(a_, layout_, s);
      units += x.units * x.blocks * a_.kv_heads, segments += x.blocks * a_.kv_heads;
    }
    int before = units;  // an inclusive sum over lanes, then an exclusive one
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(0xffffffff, before, d);
      if (lane_ >= d) before += other;
      segments += __shfl_xor_sync(0xffffffff, segments, d);
    }
    const int total = __shfl_sync(0xffffffff, before, 31);
    before -= units;
    clear_padding();
    // Blocks share the units equally, but where there are few: no warp without a unit, and a segment is not cut for less.
    const int parts = min(static_cast<int>(gridDim.x), max((total + plan_.warps - 1) / plan_.warps, segments));
    if (static_cast<int>(blockIdx.x) >= parts) return false;
    share_ = total / parts, longer_ = total % parts;
    begin = part_begin(blockIdx.x), end = part_begin(blockIdx.x + 1);

    const bool owns = before <= begin && begin < before + units;
    const int owner = __ffs(static_cast<int>(__ballot_sync(0xffffffff, owns))) - 1;
    before = __shfl_sync(0xffffffff, before, owner);
    if (lane_ < 2) place(lane_) = DecodePlace::before(a_, owner * each, before);
    __syncwarp();
    return true;
  }
  // Blocks have share_ units, the first longer_ of them one more.
  __device__ __forceinline__ int part_begin(int block) const { return block * share_ + min(block, longer_); }
  // The block that has a unit.
  __device__ __forceinline__ int block_of(int unit) const {
    const int in_longer = longer_ * (share_ + 1);
    return unit < in_longer ? unit / (share_ + 1) : longer_ + (unit - in_longer) / share_;
  }

  // What later steps would wait for is asked for now.
  __device__ __forceinline__ void prefetch_constants() const {
    const int i = static_cast<int>(threadIdx.x) * 32;
    if (i < D) prefetch(a_.key_signs + i), prefetch(a_.value_signs + i);
  }
  static __device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L1 [%0];" ::"l"(p)); }

  // Tokens behind the last sequence see nothing.
  __device__ __forceinline__ void clear_padding() const {
    const int used = a_.query_begin ? min(max(a_.query_begin[a_.seqs], 0), a_.tokens) : min(a_.seqs, a_.tokens);
    const int64_t first = int64_t{used} * a_.q_heads, last = int64_t{a_.tokens} * a_.q_heads;
    const int64_t threads = int64_t{gridDim.x} * blockDim.x, mine = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    for (int64_t i = first + mine; i < last; i += threads) a_.lse[i] = -INFINITY;
    for (int64_t i = first * D + mine; i < last * D; i += threads) write_float(a_.out, a_.dtype, i, 0);
  }

  // ---- Copies

  // Slots are used again in the order in which they were read, so a slot's next contents are fetched into it right away.
  __device__ __forceinline__ void start_ring(int begin, int end) {
    ring_ = shared_ + warp_ * plan_.slots * stride();
    slot_ = ring_, phase_ = 0;
    fetch_unit_ = begin + warp_, fetch_end_ = end, fetch_stop_ = -1;
    if (lane_ == 0) {
      for (int i = 0; i < plan_.slots; ++i) init_barrier(barrier(ring_ + i * stride()));
    }
    barriers_ready();
    __syncwarp();
    // The first round has nothing to copy yet: so that look_up, which is long, stands here once.
#pragma unroll 1
    for (int i = -kUnitSteps; i < plan_.slots; i += kUnitSteps) {
      if (i >= 0) copy(ring_ + i * stride(), ring_ + (i + 1) * stride());
      look_up();
    }
  }
  __device__ __forceinline__ int stride() const { return layout_.bytes + kBarrierBytes; }
  __device__ __forceinline__ uint64_t* barrier(uint8_t* slot) const {
    return reinterpret_cast<uint64_t*>(slot + layout_.bytes);
  }

  // What is needed to find the next unit's bytes: a lane has one of its blocks, and loads the page of a block of codes, -1 for none. Nothing
  // waits for it before `fetch`.
  __device__ __forceinline__ void look_up() {
    if (fetch_unit_ >= fetch_stop_ && fetch_stop_ != 0) find_fetch_run();
    page_ = -1;
    const DecodeCopies c = copies();
    if (fetch_unit_ >= fetch_stop_ || c.exact || lane_ >= kUnitSteps * layout_.copies) return;
    const int token = fetch_token(c);
    if (token >= c.length || token + (1 << layout_.copy_shift) <= c.visible) return;
    page_ = __ldg(c.table + (token >> layout_.page_shift));
  }
  __device__ __forceinline__ int fetch_token(const DecodeCopies& c) const {
    return c.first + fetch_unit_ * kUnitTokens + (lane_ << layout_.copy_shift);
  }
  __device__ __forceinline__ const uint8_t* block_address(const DecodeCopies& c) const {
    if (static_cast<unsigned>(page_) >= static_cast<unsigned>(a_.num_pages)) return nullptr;
    const int tile = (fetch_token(c) & ((1 << layout_.page_shift) - 1)) >> layout_.copy_shift;
    return a_.pages + (int64_t{page_} * a_.kv_heads + c.head) * layout_.record_bytes + tile * layout_.copy_bytes;
  }
  // Exact keys: lanes 0-7 copy to the first slot, 8-15 to the second.
  __device__ __forceinline__ const uint8_t* exact_address() const {
    const DecodePlace& at = place(1);
    const int i = ((fetch_unit_ - at.coded_end()) * kUnitSteps + lane_ / 8) * layout_.exact_keys + lane_ % 8;
    if (lane_ >= 8 * kUnitSteps || lane_ % 8 >= layout_.exact_keys || i >= at.about.exact) return nullptr;
    const int key = exact_key(at, i), rows = a_.sink_tokens + a_.ring;
    const int row = key < a_.sink_tokens ? key : a_.sink_tokens + (key - a_.sink_tokens) % a_.ring;
    const int64_t head = a_.tail_slots[at.sequence] * a_.kv_heads + at.head;
    return static_cast<const uint8_t*>(a_.tail) + (head * rows + row) * layout_.exact_bytes;
  }
  static __device__ __forceinline__ int exact_key(const DecodePlace& at, int i) {
    return i < at.about.sinks ? i : at.about.recent + i - at.about.sinks;
  }
  // The next unit that has something to copy, the end of the units like it, and what look_up needs of its segment.
  __device__ __forceinline__ void find_fetch_run() {
    DecodePlace& next = place(1);
    for (;; fetch_unit_ += plan_.warps) {
      if (fetch_unit_ >= fetch_end_) {
        fetch_stop_ = 0;
        return;
      }
      seek(next, fetch_unit_);
      if (fetch_unit_ < next.coded_end() || next.about.exact > 0) break;
    }
    const bool exact = fetch_unit_ >= next.coded_end();
    fetch_stop_ = min(fetch_end_, exact ? next.end() : next.coded_end());
    __syncwarp();
    if (lane_ == 0) {
      copies() = {next.about.first - next.begin * kUnitTokens,
                  next.about.length,
                  a_.first_visible(next.about.length - next.about.queries),
                  next.head,
                  exact,
                  a_.block_table + int64_t{next.sequence} * a_.max_pages};
    }
    __syncwarp();
    if (!exact) prefetch_queries(next);
  }

  // Its queries will be wanted soon, too: each warp asks for the rows that it will prepare.
  __device__ __forceinline__ void prefetch_queries(const DecodePlace& at) const {
    for (int r = warp_; r < kRows; r += plan_.warps) {
      int token, head, position;
      if (find_row(at, r, token, head, position)) {
        const int bytes = a_.dtype == ScalarType::Float ? 4 : 2, i = lane_ * 128;
        const int64_t start = token * a_.q_token_stride + head * a_.q_head_stride;
        if (i < D * bytes) prefetch(static_cast<const uint8_t*>(a_.q) + start * bytes + i);
      }
    }
  }

  // The slots of the unit at hand get other contents, and the pages of what follows are looked up; the next slots are at hand.
  __device__ __forceinline__ void fetch() {
    __syncwarp();
    copy(slot_, slot_ + stride());
    look_up();
    slot_ += kUnitSteps * stride();
    if (slot_ == ring_ + plan_.slots * stride()) slot_ = ring_, phase_ ^= 1;
  }
  __device__ __forceinline__ void copy(uint8_t* first, uint8_t* second) {
    if (fetch_unit_ >= fetch_stop_) return;  // nothing is left
    const DecodeCopies c = copies();
    const int bytes = c.exact ? layout_.exact_bytes : layout_.copy_bytes, per_slot = c.exact ? 8 : layout_.copies;
    const bool later = lane_ >= per_slot;
    uint8_t* to = later ? second + (lane_ - per_slot) * bytes : first + lane_ * bytes;
    const uint8_t* from = c.exact ? exact_address() : block_address(c);
    copy_blocks(barrier(first), barrier(second), to, later, from, bytes);
    fetch_unit_ += plan_.warps;
  }

  // ---- Queries

  __device__ __forceinline__ float* plain() const {  // [rows, d]
    return reinterpret_cast<float*>(shared_ + plan_.plain);
  }
  __device__ __forceinline__ DecodeRow* rows() const { return reinterpret_cast<DecodeRow*>(shared_ + plan_.rows); }

  // The row `r` of the segment's block: token and head among all, position of its query; false: there is no such row.
  __device__ __forceinline__ bool find_row(const DecodePlace& at, int r, int& token, int& head, int& position) const {
    const int index = at.block * kRows + r;
    if (index >= at.about.rows(a_)) return false;
    const int i = index / a_.group;
    token = a_.first_query(at.sequence) + i;
    head = at.head * a_.group + index % a_.group;
    position = at.about.length - at.about.queries + i;
    return true;
  }

  __device__ __forceinline__ void read_query(int token, int head, float (&y)[X::kPerLane]) const {
    const int64_t start = token * a_.q_token_stride + head * a_.q_head_stride;
#pragma unroll
    for (int i = 0; i < X::kPerLane; ++i) y[i] = read_float(a_.q, a_.dtype, start + channel(i));
  }
  // The channel of a lane's element i when a warp holds a row.
  __device__ __forceinline__ int channel(int i) const {
    return X::Rotation::channel(lane_, i / X::Rotation::kVec) + i % X::Rotation::kVec;
  }

  // Rotates the rows of a segment, a warp per row, and lays them out as operands; ends with all warps holding theirs.
  __device__ __forceinline__ void prepare_queries(const DecodePlace& at) {
    uint8_t* operands = shared_ + plan_.queries;  // [N, frags, 32 lanes, x and y, 4]
    for (int r = warp_; r < kRows; r += plan_.warps) {
      int token, head, position;
      float y[X::kPerLane] = {};
      DecodeRow row{1, 0, 0, 0, 0};
      const bool real = find_row(at, r, token, head, position);
      if (real) {
        read_query(token, head, y);
        if (a_.center) {
#pragma unroll
          for (int i = 0; i < X::kPerLane; ++i) {
            row.shift = fmaf(y[i], a_.center[int64_t{at.head} * D + channel(i)], row.shift);
          }
        }
        const Attention::Exact exact = a_.exact(at.sequence, position);
        row.first = max(a_.first_visible(position), exact.sinks), row.end = exact.recent;
      }
      if (a_.tail) {
#pragma unroll
        for (int i = 0; i < X::kPerLane; ++i) plain()[r * D + channel(i)] = y[i];
      }
      rotate<typename X::Rotation>(y, a_.key_signs, lane_);
      float largest = 1e-30f;
#pragma unroll
      for (int i = 0; i < X::kPerLane; ++i) largest = max_or_nan(largest, fabsf(y[i]));
#pragma unroll
      for (int bit = 1; bit < 32; bit *= 2) {
        largest = max_or_nan(largest, __shfl_xor_sync(0xffffffff, largest, bit));
        row.shift += __shfl_xor_sync(0xffffffff, row.shift, bit);
      }
      constexpr float kLargest = 127 * 256;  // so that the high byte stays within +-127
      const float scale = a_.softmax_scale * kLog2E, factor = (scale < 0 ? -kLargest : kLargest) / largest;
      int sum = 0;
#pragma unroll
      for (int i = 0; i < X::kPerLane; ++i) {
        const int x = __float2int_rn(y[i] * factor), high = (x + 128) >> 8;
        const auto place = Keys::place(channel(i));
        uint8_t* to = operands + ((r / 4 * X::kFrags + place.frag) * 32 + 8 * (r % 4) + place.t) * 8 + 4 * place.half +
                      place.byte;
        to[0] = static_cast<uint8_t>(high);
        to[4 * 8] = static_cast<uint8_t>(x - 256 * high);  // the next column: four lanes on
        sum += x;
      }
#pragma unroll
      for (int bit = 1; bit < 32; bit *= 2) sum += __shfl_xor_sync(0xffffffff, sum, bit);
      if (lane_ == 0) {
        row.unit = max_or_nan(largest / kLargest * fabsf(scale) * format::kLevelUnit * Keys::kUnit, 1e-30f);
        row.shift *= scale;
        row.zero = Keys::kZero * sum;
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
    all_first_ = 0, all_end_ = INT32_MAX;
    const int last = min(kRows, at.about.rows(a_) - at.block * kRows);
#pragma unroll 1
    for (int r = 0; r < last; ++r) {
      all_first_ = max(all_first_, rows()[r].first), all_end_ = min(all_end_, rows()[r].end);
    }
  }

  // ---- A unit of keys

  // The lane's tokens of a step, two for each pair of scores: an even token below 16 (or 24, see ValueCodes::kMixed) and the next.
  // Chosen so that after the transposition a lane holds the weights of its tokens in the order of the values' operands.
  static constexpr int kPairStep = Values::kMixed ? 8 : 16;  // from the first pair of tokens to the second
  __device__ __forceinline__ int first_token() const {
    return Values::kMixed ? (g_ & 1 ? g_ + 15 : g_) : (g_ & 1 ? g_ + 7 : g_);
  }
  // Of a section whose rows are `row` bytes, with `next` from tokens 0-15 to 16-31: from the slot's start to the lane's first token,
  // and from there to the second pair.
  __device__ __forceinline__ int to_first(int row, int next) const {
    const int token = first_token();
    return (token & 15) * row + (token >> 4) * next;
  }
  static __device__ __forceinline__ int to_second(int row, int next) { return Values::kMixed ? 8 * row : next; }

  // The slots of the unit at hand.
  __device__ __forceinline__ void slots(uint8_t* (&base)[kUnitSteps]) const {
#pragma unroll
    for (int step = 0; step < kUnitSteps; ++step) base[step] = slot_ + step * stride();
  }

  // begin: the first token of the unit
  __device__ __forceinline__ void attend(int begin) {
    uint8_t* base[kUnitSteps];
    slots(base);
    float score[N][4 * kUnitSteps], value_scale[4 * kUnitSteps];
#pragma unroll
    for (int step = 0; step < kUnitSteps; ++step) {
      wait_barrier(barrier(base[step]), phase_);
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        float s[N][2];
        multiply_keys(base[step], pair, s);
        const uint8_t* scales = base[step] + layout_.value_scales + to_first(2, layout_.next_scales);
        if (pair) scales += to_second(2, layout_.next_scales);
        const float2 v = __half22float2(*reinterpret_cast<const __half2*>(scales));
        const int i = 4 * step + 2 * pair;
        value_scale[i] = v.x, value_scale[i + 1] = v.y;
#pragma unroll
        for (int n = 0; n < N; ++n) score[n][i] = s[n][0], score[n][i + 1] = s[n][1];
      }
    }
    if (a_.soft_cap > 0) cap(score);
    const bool edge = begin < all_first_ || begin + kUnitTokens > all_end_;
    if (edge) mask(begin + first_token(), score);

    uint2 weight[N][kUnitSteps];
    float factor[N];
    for_each<N>([&](auto n) { factor[n] = soften<n>(score[n], value_scale, edge, weight[n]); });
    multiply_values(base, weight, factor);
  }

  // Integer scores of the lane's rows for one of its pairs of tokens, times the key scales.
  __device__ __forceinline__ void multiply_keys(const uint8_t* base, int pair, float (&s)[N][2]) const {
    int sums[N][Keys::kSets][4] = {};
    const uint8_t* row = base + to_first(X::kKeyRow, layout_.next_keys);
    const uint8_t* plane = base + layout_.planes + to_first(X::kPlaneRow, layout_.next_planes);
    const uint8_t* scales = base + layout_.key_scales + to_first(2, layout_.next_scales);
    if (pair) {
      row += to_second(X::kKeyRow, layout_.next_keys);
      plane += to_second(X::kPlaneRow, layout_.next_planes);
      scales += to_second(2, layout_.next_scales);
    }
#pragma unroll
    for (int chunk = 0; chunk < Keys::kChunks; ++chunk) {
      typename Keys::Words x, y;
      typename Keys::Prepared p, q;
      Keys::load(row, plane, chunk, t_, x);
      Keys::load(row + X::kKeyRow, plane + X::kPlaneRow, chunk, t_, y);
      Keys::prepare(x, t_, p);
      Keys::prepare(y, t_, q);
      multiply_frags<0>(p, q, chunk, sums);
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
  template <int I>
  __device__ __forceinline__ void multiply_frags(const typename Keys::Prepared& x, const typename Keys::Prepared& y,
                                                 int chunk, int (&sums)[N][Keys::kSets][4]) const {
    if constexpr (I < Keys::kFrags) {
      uint32_t a[4], minus[4];
      Keys::template expand<I>(x, y, key_table_, a, minus);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const uint2 b = query_[n][chunk * Keys::kFrags + I];
        mma_bytes<Keys::kMasks>(sums[n][Keys::set_of(I)], a, b);
        if constexpr (Keys::kTwoTables) mma_bytes(sums[n][1], minus, b);
      }
      multiply_frags<I + 1>(x, y, chunk, sums);
    }
  }

  // Capped scores are in units of their own: 1 / log2(e).
  __device__ __forceinline__ void cap(float (&score)[N][4 * kUnitSteps]) const {
    const float limit = a_.soft_cap * kLog2E;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const DecodeRow& row = rows()[4 * n + t_];
#pragma unroll
      for (int i = 0; i < 4 * kUnitSteps; ++i)
        score[n][i] = limit * tanh_fast(fmaf(score[n][i], row.unit, row.shift) / limit);
    }
  }
  // Within 1e-6, absolute.
  static __device__ __forceinline__ float tanh_fast(float x) {
    return 1 - __fdividef(2.0f, exp2_fast(2 * kLog2E * x) + 1);
  }

  // Keys that a row does not see; their slots may hold anything.
  __device__ __forceinline__ void mask(int token, float (&score)[N][4 * kUnitSteps]) const {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const DecodeRow& row = rows()[4 * n + t_];
#pragma unroll
      for (int i = 0; i < 4 * kUnitSteps; ++i) {
        const int key = token + i / 4 * kStepTokens + i % 4 / 2 * kPairStep + i % 2;
        if (key < row.first || key >= row.end) score[n][i] = -INFINITY;
      }
    }
  }

  // Softmax weights of row n's tokens under the running maximum, times value scales, as the operands of the second product; returns
  // what one of their units is worth. edge: some keys are masked; what their scale is does not matter.
  template <int n>
  __device__ __forceinline__ float soften(const float (&score)[4 * kUnitSteps],
                                          const float (&value_scale)[4 * kUnitSteps], bool edge,
                                          uint2 (&weight)[kUnitSteps]) {
    constexpr int kScores = 4 * kUnitSteps;
    const float u = unit_[n];
    float most = score[0];
#pragma unroll
    for (int i = 1; i < kScores; ++i) most = fmaxf(most, score[i]);
    // The maximum may lag behind: weights up to 2^16 do no harm, and most units so need no rescaling.
    if (__any_sync(0xffffffff, (most - state_.max[n]) * u > 16)) rescale<n>(most, u);

    const float offset = -state_.max[n] * u;
    float w[kScores], largest = 1e-30f;
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const float p = exp2_fast(fmaf(score[i], u, offset));
      state_.total[n] += p;
      w[i] = p * value_scale[i];
    }
    if (edge) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) w[i] = score[i] == -INFINITY ? 0 : w[i];
    }
#pragma unroll
    for (int i = 0; i < kScores; ++i) largest = max_or_nan(largest, w[i]);
    largest = over_tokens(largest, [](float x, float y) { return max_or_nan(x, y); });
    constexpr float kLargest = 65500, kInteger = 8388608;  // adding 2^23 leaves an integer in the low bits
    const float up = __fdividef(kLargest, largest), down = largest * (1 / kLargest);
    uint32_t moved[kScores];
    uint32_t sum = 0;
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const uint32_t x = __float_as_uint(fmaf(w[i], up, kInteger));
      sum += x;
      moved[i] = transposed(select_bytes(x, x, 0x1010));
    }
    if constexpr (Values::kMasks) {
      state_.weights[n] =
          fmaf(static_cast<float>(static_cast<int>(sum - kScores * 0x4B000000u)), down, state_.weights[n]);
    }
    // Columns are a row's high and low bytes in turn.
    const uint32_t bytes = Values::kMixed ? (g_ & 1 ? 0x6420 : 0x7531) : (g_ & 1 ? 0x6240 : 0x7351);
#pragma unroll
    for (int step = 0; step < kUnitSteps; ++step) {
      weight[step].x = select_bytes(moved[4 * step], moved[4 * step + 1], bytes);
      weight[step].y = select_bytes(moved[4 * step + 2], moved[4 * step + 3], bytes);
    }
    return down;
  }

  template <int n>
  __device__ __forceinline__ void rescale(float most, float u) {
    most = fmaxf(over_tokens(most, [](float x, float y) { return fmaxf(x, y); }), state_.max[n]);  // of the lane's row
    const float by = exp2_fast((state_.max[n] - most) * u);
    state_.max[n] = most;
    state_.total[n] *= by, state_.weights[n] *= by;
#pragma unroll
    for (int i = 0; i < X::kTiles; ++i) state_.sums[i][n][0] *= by, state_.sums[i][n][1] *= by;
  }

  __device__ __forceinline__ void multiply_values(uint8_t* const (&base)[kUnitSteps],
                                                  const uint2 (&weight)[N][kUnitSteps], const float (&factor)[N]) {
#pragma unroll
    for (int group = 0; group < Values::kGroups; ++group) {
      typename Values::Words a[kUnitSteps], b[kUnitSteps];
#pragma unroll
      for (int step = 0; step < kUnitSteps; ++step) {
        const uint8_t* block = base[step] + layout_.values;
        Values::load(block, group, lane_, a[step]);
        Values::load(block + layout_.next_values, group, lane_, b[step]);
      }
      multiply_tiles<0>(a, b, group, weight, factor);
    }
  }
  template <int I>
  __device__ __forceinline__ void multiply_tiles(const typename Values::Words (&a)[kUnitSteps],
                                                 const typename Values::Words (&b)[kUnitSteps], int group,
                                                 const uint2 (&weight)[N][kUnitSteps], const float (&factor)[N]) {
    if constexpr (I < 4) {
      int sums[N][4] = {}, less[N][4] = {};
#pragma unroll
      for (int step = 0; step < kUnitSteps; ++step) {
        uint32_t plus[4], minus[4];
        Values::template expand<I>(a[step], b[step], value_table_, plus, minus);
#pragma unroll
        for (int n = 0; n < N; ++n) {
          mma_bytes<Values::kMasks, true>(sums[n], plus, weight[n][step]);
          if constexpr (Values::kTwoTables) mma_bytes<false, true>(less[n], minus, weight[n][step]);
        }
      }
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          int x = sums[n][2 * h] * 256 + sums[n][2 * h + 1];
          if constexpr (Values::kTwoTables) x -= less[n][2 * h] * 256 + less[n][2 * h + 1];
          float& to = state_.sums[4 * group + I][n][h];
          to = fmaf(static_cast<float>(x), factor[n], to);  // the upper rows' factor kUpper waits for the end
        }
      }
      multiply_tiles<I + 1>(a, b, group, weight, factor);
    }
  }

  // ---- The end of a segment

  __device__ __forceinline__ float* join() const { return reinterpret_cast<float*>(shared_ + plan_.join); }

  // Units [from, to) of the list were this block's share of the segment.
  __device__ __forceinline__ void finish_segment(const DecodePlace& at, int from, int to) {
    join_warps();
    __syncthreads();
    bool all = from == at.begin && to == at.end();
    if (!all) {
      float* part = this->part(static_cast<int>(blockIdx.x), from == at.begin);
      for (int i = threadIdx.x; i < kRows * X::kPart / 4; i += blockDim.x) {
        reinterpret_cast<float4*>(part)[i] = reinterpret_cast<const float4*>(join())[i];
      }
      all = join_blocks(block_of(at.begin), block_of(at.end() - 1));
    }
    if (all) finish_rows(at);
    __syncthreads();
  }

  // The result that a block leaves of a segment which it opens, or goes on with: [rows, 4 + d].
  __device__ __forceinline__ float* part(int block, bool opens) const {
    return plan_.parts + static_cast<int64_t>(2 * block + (opens ? 1 : 0)) * kRows * X::kPart;
  }

  // The warps' states become one, laid out by rows at the start of `join`.
  __device__ __forceinline__ void join_warps() {
    float m[N], total[N];
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const auto add = [](float x, float y) { return x + y; };
      total[n] = over_tokens(state_.total[n], add);
      m[n] =
          total[n] == 0 ? -INFINITY : fmaf(state_.max[n], unit_[n], a_.soft_cap > 0 ? 0.0f : rows()[4 * n + t_].shift);
      const float less = Values::kMasks ? Values::kTop * over_tokens(state_.weights[n], add) : 0.0f;
#pragma unroll
      for (int i = 0; i < X::kTiles; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float& x = state_.sums[i][n][h];
          if (h) x *= 1 / Values::kUpper;
          if constexpr (Values::kMasks) x = 2 * x - less;
          x *= format::kLevelUnit;
        }
      }
    }
    __syncthreads();  // scratch of exact keys was there
    for (int count = plan_.warps; count > 1;) {
      const int half = (count + 1) / 2;
      float* to = join() + (warp_ < half ? warp_ : warp_ - half) * X::kJoin * 32 + lane_;
      if (warp_ >= half && warp_ < count) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
          to[32 * n] = m[n], to[32 * (N + n)] = total[n];
#pragma unroll
          for (int i = 0; i < X::kTiles; ++i) {
            to[32 * (2 * N + (i * N + n) * 2)] = state_.sums[i][n][0];
            to[32 * (2 * N + (i * N + n) * 2 + 1)] = state_.sums[i][n][1];
          }
        }
      }
      __syncthreads();
      if (warp_ + half < count) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
          const float other = to[32 * n], top = fmaxf(m[n], other);
          const float mine = m[n] == -INFINITY ? 0 : exp2_fast(m[n] - top);
          const float theirs = other == -INFINITY ? 0 : exp2_fast(other - top);
          m[n] = top, total[n] = mine * total[n] + theirs * to[32 * (N + n)];
#pragma unroll
          for (int i = 0; i < X::kTiles; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              float& x = state_.sums[i][n][h];
              x = mine * x + theirs * to[32 * (2 * N + (i * N + n) * 2 + h)];
            }
          }
        }
      }
      __syncthreads();
      count = half;
    }
    if (warp_ == 0) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        float* row = join() + (4 * n + t_) * X::kPart;
        if (g_ == 0) row[0] = m[n], row[1] = total[n];
#pragma unroll
        for (int i = 0; i < X::kTiles; ++i) {
          row[X::kHead + 16 * i + g_] = state_.sums[i][n][0], row[X::kHead + 16 * i + 8 + g_] = state_.sums[i][n][1];
        }
      }
    }
  }

  // Leaves this block's part to the last of the blocks that share the segment; true: that is this one, and it has joined all, in their
  // order.
  __device__ __forceinline__ bool join_blocks(int first, int last) const {
    __syncthreads();
    int* flag = reinterpret_cast<int*>(rows() + kRows);
    const int count = last - first + 1;
    if (threadIdx.x == 0) *flag = count_arrival(plan_.arrivals + first, count);
    __syncthreads();
    if (!*flag) return false;

    // Four channels of a row for a thread; several threads share the parts where rows are few. Parts are read eight at a time, all at
    // once, under a running maximum.
    constexpr int kQuads = kRows * D / 4, kBatch = 8;
    const int groups = max(1, static_cast<int>(blockDim.x) / kQuads);
    constexpr int kShare = kRows * X::kPart;  // of a group
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
    if (groups > 1) {
      const int quad = static_cast<int>(threadIdx.x), r = quad / (D / 4), channel = 4 * (quad % (D / 4));
      float m = -INFINITY, total = 0;
      float4 sum{0, 0, 0, 0};
      if (quad < kQuads) {
        const float* from = join() + r * X::kPart;
        for (int g = 0; g < groups; ++g) m = fmaxf(m, from[g * kShare]);
        for (int g = 0; g < groups; ++g) {
          const float4 x = *reinterpret_cast<const float4*>(from + g * kShare + X::kHead + channel);
          const float weight = weight_of(from[g * kShare], m);
          total = fmaf(weight, from[g * kShare + 1], total);
          sum.x = fmaf(weight, x.x, sum.x), sum.y = fmaf(weight, x.y, sum.y);
          sum.z = fmaf(weight, x.z, sum.z), sum.w = fmaf(weight, x.w, sum.w);
        }
      }
      __syncthreads();
      if (quad < kQuads) {
        float* to = join() + r * X::kPart;
        if (channel == 0) to[0] = m, to[1] = total;
        *reinterpret_cast<float4*>(to + X::kHead + channel) = sum;
      }
      __syncthreads();
    }
    return true;
  }
  static __device__ __forceinline__ float weight_of(float part, float top) {
    return part == -INFINITY ? 0 : exp2_fast(part - top);
  }

  // From the sums of all keys of a segment, in the rotated space at the start of `join`, to results.
  __device__ __forceinline__ void finish_rows(const DecodePlace& at) const {
    for (int r = warp_; r < kRows; r += plan_.warps) {
      const float* from = join() + r * X::kPart;
      float m = from[0], total = from[1], y[X::kPerLane];
#pragma unroll
      for (int i = 0; i < X::kPerLane; ++i) y[i] = from[X::kHead + channel(i)];
      rotate_back<typename X::Rotation>(y, a_.value_signs, lane_);
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
      for (int i = 0; i < X::kPerLane; ++i) write_float(a_.out, a_.dtype, to * D + channel(i), y[i] * inverse);
      if (lane_ == 0) {
        const bool only_sink = by == 0;  // whose logit needs no rounding
        a_.lse[to] = total == 0 ? -INFINITY : only_sink ? a_.sink_logits[head] : (m + log2f(total)) * kLn2;
      }
    }
  }

  // ---- The exact tail

  // A unit of exact keys.
  __device__ __forceinline__ void attend_exact(const DecodePlace& at, int unit) {
    uint8_t* base[kUnitSteps];
    slots(base);
    const int first = unit * kUnitSteps * layout_.exact_keys;
#pragma unroll
    for (int step = 0; step < kUnitSteps; ++step) wait_barrier(barrier(base[step]), phase_);
    if (a_.dtype == ScalarType::BFloat16) {
      attend_exact_keys<__nv_bfloat16>(at, first, base);
    } else {
      attend_exact_keys<__half>(at, first, base);
    }
  }

  // x as a number of type T and one that holds what is left of it, side by side.
  template <typename T>
  static __device__ __forceinline__ uint32_t split(float x) {
    float kept[2];
    floats_of_words<T>({pack<T>(x, 0)}, kept);
    return pack<T>(x, x - kept[0]);
  }
  template <typename T>
  static __device__ __forceinline__ uint32_t pack(float x, float y) {
    if constexpr (std::is_same_v<T, __half>) {
      const __half2 both = __floats2half2_rn(x, y);
      return reinterpret_cast<const uint32_t&>(both);
    } else {
      const __nv_bfloat162 both = __floats2bfloat162_rn(x, y);
      return reinterpret_cast<const uint32_t&>(both);
    }
  }

  // Exact keys `first` and up, 0-7 in the first slot and 8-15 in the second, on tensor cores. A row again has two columns, so that its
  // results lie where those of codes do: a weight is the sum of two numbers of type T; a query is of that type, and leaves its second
  // column empty. The output of a row is rotated like that of codes.
  template <typename T>
  __device__ __forceinline__ void attend_exact_keys(const DecodePlace& at, int first,
                                                    uint8_t* const (&base)[kUnitSteps]) {
    static_assert(kUnitSteps == 2);
    const int per_slot = layout_.exact_keys, left = at.about.exact - first;
    const auto holds = [&](int j) { return j % 8 < per_slot && j / 8 * per_slot + j % 8 < left; };
    // What no one holds may be anything, and must not spoil a sum: there, another key is looked at, and counts nothing.
    const auto row_of = [&](int j) {
      return holds(j) ? (j < 8 ? base[0] : base[1]) + j % 8 * layout_.exact_bytes : base[0];
    };
    for_each<N>([&](auto n) {
      float dot[4] = {};
      const float* query = plain() + (4 * n + g_ / 2) * D + 16 * t_;
      const uint8_t *key0 = row_of(g_) + 16 * t_ * sizeof(T), *key1 = row_of(g_ + 8) + 16 * t_ * sizeof(T);
#pragma unroll
      for (int c = 0; c < D; c += 64) {
#pragma unroll
        for (int i = 0; i < 16; i += 4) {  // in any order of channels that both sides agree on
          const float4 q = *reinterpret_cast<const float4*>(query + c + i);
          const uint32_t q0 = g_ % 2 ? 0 : pack<T>(q.x, q.y), q1 = g_ % 2 ? 0 : pack<T>(q.z, q.w);
          const uint2 x = *reinterpret_cast<const uint2*>(key0 + (c + i) * sizeof(T));
          const uint2 y = *reinterpret_cast<const uint2*>(key1 + (c + i) * sizeof(T));
          mma_floats<T>(dot, {x.x, y.x, x.y, y.y}, q0, q1);
        }
      }

      // Scores of the lane's row for keys g and g + 8, in the numbers of the integer scores, so that one running maximum serves both.
      int token, head, position;
      const bool real = find_row(at, 4 * n + t_, token, head, position);
      const Attention::Exact exact = real ? a_.exact(at.sequence, position) : Attention::Exact{};
      const DecodeRow& row = rows()[4 * n + t_];
      const bool capped = a_.soft_cap > 0;
      float score[2], p[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int j = 8 * h + g_, k = exact_key(at, first + h * per_slot + g_);
        score[h] = dot[2 * h] * a_.softmax_scale;
        if (capped) score[h] = a_.soft_cap * tanh_fast(score[h] / a_.soft_cap);
        score[h] = capped ? score[h] * kLog2E : (score[h] * kLog2E - row.shift) / unit_[n];
        const bool sees = real && holds(j) && k >= a_.first_visible(position) && k <= position &&
                          (k < exact.sinks || k >= exact.recent);
        if (!sees) score[h] = -INFINITY;
      }
      const float most = fmaxf(score[0], score[1]), u = unit_[n];
      if (__any_sync(0xffffffff, (most - state_.max[n]) * u > 16)) rescale<n>(most, u);
      uint32_t weight[2];
      constexpr float kDown = 1.0f / 16;  // weights go up to 2^16, which is too much for float16
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        p[h] = score[h] == -INFINITY ? 0 : exp2_fast((score[h] - state_.max[n]) * u);
        state_.total[n] += p[h];
        weight[h] = transposed(split<T>(p[h] * kDown));
      }

      float sums[X::kTiles][2];
#pragma unroll
      for (int i = 0; i < X::kTiles; ++i) {  // of 16 channels
        float d[4] = {};
        const uint8_t* row = row_of(lane_ % 8 + lane_ / 16 * 8) + (D + 16 * i + lane_ / 8 % 2 * 8) * sizeof(T);
        mma_floats<T>(d, load_transposed(row), weight[0], weight[1]);
        sums[i][0] = d[0] + d[1], sums[i][1] = d[2] + d[3];
      }
      float* scratch = join() + warp_ * D;  // free until a warp leaves its state there, which waits for all
#pragma unroll 1
      for (int r = 0; r < 4; ++r) {
        __syncwarp();
        if (t_ == r) {
#pragma unroll
          for (int i = 0; i < X::kTiles; ++i) scratch[16 * i + g_] = sums[i][0], scratch[16 * i + 8 + g_] = sums[i][1];
        }
        __syncwarp();
        float y[X::kPerLane];
#pragma unroll
        for (int c = 0; c < X::kPerLane; ++c) y[c] = scratch[channel(c)];
        rotate<typename X::Rotation>(y, a_.value_signs, lane_);
#pragma unroll
        for (int c = 0; c < X::kPerLane; ++c) scratch[channel(c)] = y[c];
        __syncwarp();
        if (t_ != r) continue;
#pragma unroll
        for (int i = 0; i < X::kTiles; ++i) {
          // In the numbers of the sums (join_warps): before the factors that wait for the end.
          constexpr float kFactor = 1 / (kDown * format::kLevelUnit) / (Values::kMasks ? 2 : 1);
          state_.sums[i][n][0] = fmaf(scratch[16 * i + g_], kFactor, state_.sums[i][n][0]);
          state_.sums[i][n][1] = fmaf(scratch[16 * i + 8 + g_], kFactor * Values::kUpper, state_.sums[i][n][1]);
        }
      }
      __syncwarp();
    });
  }

  const Attention& a_;
  const SlotLayout& layout_;
  const DecodePlan& plan_;
  uint8_t* shared_;
  const int warp_, lane_, g_, t_;
  const LevelTable<Keys::kTwoTables> key_table_;
  const LevelTable<Values::kTwoTables> value_table_;
  int share_, longer_;  // of the list of work, see part_begin

  uint8_t *ring_, *slot_;  // the warp's slots, and the next to arrive
  uint32_t phase_;
  int fetch_unit_, fetch_end_, fetch_stop_;  // what is copied next
  int page_;

  uint2 query_[N][X::kFrags];
  float unit_[N];  // of rows 4 n + t
  int zero_[N];
  int all_first_, all_end_;  // keys that all rows see
  DecodeState<X> state_;
};

// Threads of a block, and blocks of a multiprocessor that registers must suffice for.
constexpr int decode_threads() { return 256; }
constexpr int decode_blocks(int n, int d) { return n * d <= 128 ? 2 : 1; }

template <class Keys, class Values, int D, int N>
__global__ void __launch_bounds__(decode_threads(), decode_blocks(N, D))
    decode_kernel(const __grid_constant__ Attention a, const __grid_constant__ SlotLayout layout,
                  const __grid_constant__ DecodePlan plan) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800  // decode_takes asks
  extern __shared__ __align__(128) uint8_t shared[];
  Decoder<Keys, Values, D, N>(a, layout, plan, shared).run();
#endif
}

}  // namespace turboquant::cuda
