// The kernel of paged_mass: the weights of query rows, summed for each key.
//
// A thread block owns a span of the keys of one sequence and KV head, so that nobody else writes their masses, and a
// warp owns 32 of these keys at a time. It copies their codes to a place of its own in shared memory, one or two steps
// ahead, expands them to float16 (attention/general/expansion.cuh) as the left operand of products, and multiplies them
// with 8 N query rows, which all warps share. A lane then holds products of four keys with some rows. Their
// denominators are known, so that a product becomes a weight at once, and the weights of a key are summed in one
// register. No warp waits for another one.
//
// More rows than 8 N come one set after the other. The order in which the weights of a key are summed depends on
// nothing but the number of rows.
//
// Exact keys, which can lie in every span, take a launch of their own, with EXACT. They are read where they are.
#pragma once

#include "cuda/attention/general/exact_tail.cuh"
#include "cuda/attention/general/mask.cuh"
#include "cuda/attention/general/queries.cuh"
#include "cuda/attention/row_tiles/expansion.cuh"
#include "cuda/common/async_copy.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/mass/plan.cuh"

namespace turboquant::cuda::mass {

using general::Sees, general::VisibleKeys, general::WorkItem;

// What a block knows of its rows. Base-2 score = product * factor + shift.
template <int N>
struct RowNotes {
  // Factor; and shift less lse, where a product becomes a weight by nothing else. A row that adds nothing, since it has
  // no keys or is behind the last row, has a factor of 0 and -inf.
  float2 weight[8 * N];
  float lse[8 * N];  // in units of log 2; 0 where `weight` has it
  VisibleKeys visible[8 * N];
};

// Shared memory of a block beside queries and stages.
template <int N>
struct OwnMemory {
  RowNotes<N> notes;
  general::LevelTables levels;
  float hartley[format::kMaxBlocks];  // row 1 of the transform's odd factor
};
template <int N>
constexpr int kOwnBytes = sizeof(OwnMemory<N>);

template <int N, bool EXACT>
class MassBlock {
 public:
  __device__ __forceinline__ MassBlock(const MassArguments& m, const WorkItem& work, OwnMemory<N>& own, uint8_t* shared)
      : m_(m), x_(m.x), a_(m.x.a), layout_(m.x.layout), work_(work), notes_(own.notes), levels_(own.levels),
        hartley_(own.hartley), warp_(threadIdx.x / 32), lane_(threadIdx.x % 32), g_(lane_ / 4), t_(lane_ % 4),
        warps_(blockDim.x / 32), slices_((layout_.octets + 3) / 4), queries_(reinterpret_cast<uint4*>(shared)),
        stages_(shared + query_bytes(N, m.x.layout.head_dim) + warp_ * m.warp_bytes) {}

  // The keys of [begin, end) that some row sees; ends with a synchronisation.
  __device__ __forceinline__ void run(int begin, int end) {
    for (int r = threadIdx.x; r < kRows; r += blockDim.x) note_row(r);
    __syncthreads();
    select(begin, end);
    if constexpr (EXACT) {
      if (steps_ > 0 && prepare_queries(stages_)) {
        for (int step = warp_; step < steps_; step += warps_) add_exact(step);
      }
    } else if (steps_ > 0) {
      for (int i = 0; i + 1 < m_.stages; ++i) fill();
      if (prepare_queries(stage(m_.stages - 1))) add_codes();
      wait_for_committed_copies();
    }
    __syncthreads();
  }

 private:
  static constexpr int kRows = 8 * N, kRowsAtOnce = rows_at_once(N);

  using Products = float[2][N][4];  // of keys g and g + 8 (and 16 more) with rows 8 n + 2 t and the next one
  static constexpr int kLaneKeys = 4;
  __device__ __forceinline__ int lane_key(int i) const { return g_ + 8 * i; }

  __device__ __forceinline__ void select(int begin, int end) {
    const VisibleKeys first = notes_.visible[0], last = notes_.visible[work_.rows - 1];
    if constexpr (EXACT) {
      exact_.select(a_, work_.sequence, first, last);
      steps_ = (exact_.count + kStepKeys - 1) / kStepKeys;
    } else {
      begin_ = max(general::coded_begin(first, last), begin), end_ = min(last.recent, end);
      all_begin_ = max(begin_, last.coded_begin()), all_end_ = min(end_, first.recent);
      aligned_begin_ = begin_ / kStepKeys * kStepKeys;
      steps_ = end_ > begin_ ? (end_ - aligned_begin_ + kStepKeys - 1) / kStepKeys : 0;
    }
  }

  // ---- Queries

  // What is known of a row before its query is read.
  __device__ __forceinline__ void note_row(int r) const {
    notes_.visible[r] = visible_keys(a_, work_, r);
    float lse = -INFINITY;
    if (r < work_.rows) {
      const WorkItem::Query at = work_.query(r, a_.group);
      lse = m_.lse[at.token * a_.q_heads + at.head] * kLog2E;
    }
    notes_.lse[r] = lse;
  }

  // Queries as right operands of products, and the weights of their rows. Their shared memory is
  // uint4 [slices, N, 32 lanes]: octet t of the slice, of row g. scratch: of this warp. Ends with a synchronisation.
  // False: no row adds anything.
  __device__ __forceinline__ bool prepare_queries(uint8_t* scratch) const {
    const int d = layout_.head_dim;
    const format::Channels channels = a_.channels.of_head(work_.kv_head, d);
    const float* center = x_.centered(EXACT) ? channels.center : nullptr;
    float* rows = reinterpret_cast<float*>(scratch);
    bool some = false;
    for (int first = kRowsAtOnce * warp_; first < kRows; first += kRowsAtOnce * warps_) {
#pragma unroll
      for (int k = 0; k < kRowsAtOnce; ++k) {
        const float shift = load_query(x_, work_, first + k, center, channels.inverse, !EXACT, lane_, rows + k * d);
        if (lane_ == 0) notes_.weight[first + k].y = shift;
      }
      __syncwarp();
      if (!EXACT) general::transform_rows(rows, d, kRowsAtOnce, x_.split, hartley_, lane_);
#pragma unroll 1
      for (int k = 0; k < kRowsAtOnce; ++k) {
        const int r = first + k;
        const auto store = [&](int o, const uint4& word) {
          queries_[(o / 4 * N + r / 8) * 32 + r % 8 * 4 + o % 4] = by_nibbles() ? in_nibble_order(word) : word;
        };
        const float factor = round_query(x_, rows + k * d, !EXACT, 4 * slices_, lane_, store);
        if (lane_ == 0) some = weigh_row(r, factor) || some;
      }
      __syncwarp();
    }
    return __syncthreads_or(some);
  }
  // Returns whether the row adds anything.
  __device__ __forceinline__ bool weigh_row(int r, float factor) const {
    const float lse = notes_.lse[r];
    const bool adds = lse != -INFINITY, capped = a_.soft_cap > 0;
    const float shift = notes_.weight[r].y, rest = capped ? shift : shift - lse;
    // a factor of NaN must not be taken for a row that adds nothing
    notes_.weight[r] = adds ? float2{factor, factor == factor ? rest : factor} : float2{0, -INFINITY};
    notes_.lse[r] = capped ? lse : 0;
    return adds;
  }

  // ---- Keys in codes

  __device__ __forceinline__ int position(int step) const { return aligned_begin_ + step * kStepKeys; }
  __device__ __forceinline__ uint8_t* stage(int slot) const { return stages_ + slot * m_.stage.bytes; }

  // All steps of this warp, the first of which are being copied.
  __device__ __forceinline__ void add_codes() {
    int used = 0;
#pragma unroll 1
    for (int step = warp_; step < steps_; step += warps_) {
      if (m_.stages == 2) {
        wait_for_committed_copies();
      } else {
        wait_for_committed_copies<1>();
      }
      __syncwarp();
      fill();
      add_step(step, stage(used), present_ >> 2 * used & 3);
      if (++used == m_.stages) used = 0;
    }
  }

  // Issues the copies of the warp's next step, if there is one.
  __device__ __forceinline__ void fill() {
    const int tiles = 1 << tile_bits(), number = fills_ & ((32 >> tile_bits()) - 1);
    if (number == 0) find_tiles();
    const auto of_lane = [&](int lane) {
      return reinterpret_cast<const uint8_t*>(__shfl_sync(0xffffffff, reinterpret_cast<uint64_t>(tile_), lane));
    };
    const uint8_t *first = of_lane(number * tiles), *second = of_lane(number * tiles + tiles - 1);
    const int slot = slot_;
#pragma unroll 1
    for (int i = 0; i < tiles; ++i) {
      const uint8_t* tile = i == 0 ? first : second;
      if (tile) copy(stage(slot), i, tile);
    }
    commit_copies();
    const unsigned bits = (first ? 1u : 0u) | (second ? 2u : 0u);
    present_ = (present_ & ~(3u << 2 * slot)) | bits << 2 * slot;
    slot_ = slot + 1 == m_.stages ? 0 : slot + 1;
    ++fills_;
  }

  __device__ __forceinline__ int tile_bits() const { return 5 - layout_.tile_shift; }  // a step has one tile or two

  // The addresses of the tiles of this warp's next steps, one in each lane; null where there are no keys.
  __device__ __forceinline__ void find_tiles() {
    const int shift = layout_.tile_shift, step = (fills_ + (lane_ >> tile_bits())) * warps_ + warp_;
    const int at = position(step) + ((lane_ & ((1 << tile_bits()) - 1)) << shift);
    tile_ = nullptr;
    if (step >= steps_ || at >= end_ || at + (1 << shift) <= begin_) return;
    const int64_t page = a_.block_table[work_.sequence * a_.table_stride + (at >> layout_.page_shift)];
    if (page < 0 || page >= a_.num_pages) return;
    const int number = (at & ((1 << layout_.page_shift) - 1)) >> shift;
    tile_ = a_.pages + number * layout_.tile_bytes +
            format::record_offset<int64_t>(page, work_.kv_head, a_.page_stride, layout_.record_bytes);
  }

  // Issues the copies of tile i of a step.
  __device__ __forceinline__ void copy(uint8_t* stage, int i, const uint8_t* tile) const {
    const Stage& s = m_.stage;
    const int shift = layout_.tile_shift, before = i << shift;  // keys of the tiles before it
    const int lines = 1 << shift >> s.line_shift, together = 32 >> s.lane_shift;
    const int first_line = lane_ >> s.lane_shift, first_chunk = lane_ & ((1 << s.lane_shift) - 1);
    const int line_bytes = layout_.key_row_bytes << s.line_shift;
#pragma unroll 1
    for (int chunk = first_chunk; chunk < s.line_chunks; chunk += 32) {
      const uint8_t* from = tile + first_line * line_bytes + 16 * chunk;
      uint32_t to = shared_address(stage) + before * s.row_stride + first_line * s.line_stride + 16 * chunk;
#pragma unroll 1
      for (int line = first_line; line < lines; line += together) {
        copy_async(to, from);
        from += together * line_bytes, to += together * s.line_stride;
      }
    }
    const auto copy_section = [&](int to, int from, int key_bytes) {
#pragma unroll 1
      for (int at = 16 * lane_; at < key_bytes << shift; at += 16 * 32) {
        copy_async(shared_address(stage) + to + before * key_bytes + at, tile + from + at);
      }
    };
    copy_section(s.planes, layout_.key_planes, layout_.key_plane_bytes);
    copy_section(s.scales, layout_.key_scales, 2);
  }

  __device__ __forceinline__ void add_step(int step, const uint8_t* stage, unsigned present) const {
    const int first = position(step), mine = first + lane_key(t_);
    const auto exists = [&](int key) { return (present >> (key >> layout_.tile_shift) & 1) != 0; };
    const bool writes = mine >= begin_ && mine < end_ && mine < m_.keys && exists(lane_key(t_));
    float* to = mass() + mine;
    const float before = writes ? *to : 0;  // read ahead of its use

    Products x = {};
    multiply_codes(stage, x);
    float scale[kLaneKeys], total[kLaneKeys] = {};
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i) {
      const __half* scales = reinterpret_cast<const __half*>(stage + m_.stage.scales);
      scale[i] = __half2float(scales[lane_key(i)]) * key_unit();
    }
    const bool all_exist = present == 3;
    if (all_exist && first >= all_begin_ && first + kStepKeys <= all_end_ && !(a_.soft_cap > 0)) {
      add_weights(x, scale, total);
    } else {
      int at[kLaneKeys];
#pragma unroll
      for (int i = 0; i < kLaneKeys; ++i) at[i] = exists(lane_key(i)) ? first + lane_key(i) : -1;
      add_seen_weights(x, scale, at, total);
    }
    const float sum = sum_over_lanes(total);
    if (writes) *to = before + sum;
  }

  // Codes of four bits of the uniform grid take fewer instructions: they become eight times their level, in another
  // order. Channel i of an octet then stands beside channel i + 4, in queries, too.
  __device__ __forceinline__ bool by_nibbles() const {
    return !EXACT && a_.record.key_width() == format::Width::k4 && !a_.key_levels;
  }
  __device__ __forceinline__ float key_unit() const {
    return format::kLevelUnit * (by_nibbles() ? step_of(row_tiles::ExpansionKind::kNibbles) : 1.0f);
  }
  static __device__ __forceinline__ uint4 in_nibble_order(const uint4& x) {
    return {select_bytes(x.x, x.z, 0x5410), select_bytes(x.x, x.z, 0x7632), select_bytes(x.y, x.w, 0x5410),
            select_bytes(x.y, x.w, 0x7632)};
  }

  __device__ __forceinline__ void multiply_codes(const uint8_t* stage, Products& x) const {
    using format::Width;
    switch (a_.record.key_width()) {
      case Width::k2: return multiply_width<Width::k2>(stage, x);
      case Width::k3: return multiply_width<Width::k3>(stage, x);
      case Width::k4:
        if (by_nibbles()) return multiply_nibbles(stage, x);
        return multiply_width<Width::k4>(stage, x);
      case Width::k5:
        if (layout_.octets % 4 == 0) return multiply_width<Width::k5, true>(stage, x);
        return multiply_width<Width::k5>(stage, x);
      case Width::k8: return multiply_width<Width::k8>(stage, x);
      case Width::k1: return;  // no width of keys
    }
  }
  template <format::Width WIDTH, bool WHOLE = false>
  __device__ __forceinline__ void multiply_width(const uint8_t* stage, Products& x) const {
    const uint4 table = levels_.keys;
    const uint8_t* plane_table = format::has_plane(WIDTH) && a_.key_levels ? levels_.plane_keys : nullptr;
    multiply_octets(stage, x, [&](const uint8_t* row, const uint8_t* plane, int o) {
      return general::key_levels<WIDTH>(general::key_codes<WIDTH, WHOLE>(row, plane, layout_.octets, o), table,
                                        plane_table);
    });
  }
  __device__ __forceinline__ void multiply_nibbles(const uint8_t* stage, Products& x) const {
    const row_tiles::Tables none(reinterpret_cast<const int8_t*>(&levels_.keys));  // is not looked at
    multiply_octets(stage, x, [&](const uint8_t* row, const uint8_t*, int o) {
      __half2 pair[4];
      row_tiles::expand<row_tiles::ExpansionKind::kNibbles>(reinterpret_cast<const uint32_t*>(row)[o], 0, none, pair);
      return uint4{row_tiles::as_word(pair[0]), row_tiles::as_word(pair[1]), row_tiles::as_word(pair[2]),
                   row_tiles::as_word(pair[3])};
    });
  }
  // x += keys * queries. expand(row, plane, o): octet o of a key
  template <typename Expand>
  __device__ __forceinline__ void multiply_octets(const uint8_t* stage, Products& x, Expand&& expand) const {
    const uint8_t *row = stage + g_ * m_.stage.row_stride,
                  *plane = stage + m_.stage.planes + g_ * layout_.key_plane_bytes;
#pragma unroll 1
    for (int slice = 0; slice < slices_; ++slice) {
      const int o = min(4 * slice + t_, layout_.octets - 1);  // the queries are zeros beyond d
      uint4 key[kLaneKeys];
#pragma unroll
      for (int i = 0; i < kLaneKeys; ++i) {
        key[i] = expand(row + 8 * i * m_.stage.row_stride, plane + 8 * i * layout_.key_plane_bytes, o);
      }
      multiply_slice(slice, key, x);
    }
  }
  // x += keys * queries, of a slice. key: octet t of the lane's keys
  __device__ __forceinline__ void multiply_slice(int slice, const uint4 (&key)[kLaneKeys], Products& x) const {
    uint4 k[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 &g = key[2 * i], &h = key[2 * i + 1];
      k[i][0] = {g.x, h.x, g.y, h.y}, k[i][1] = {g.z, h.z, g.w, h.w};
    }
    const uint4* query = queries_ + slice * N * 32 + lane_;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const uint4 q = query[n * 32];
#pragma unroll
      for (int i = 0; i < 2; ++i) mma_halves(x[i][n], k[i][0], q.x, q.y);
#pragma unroll
      for (int i = 0; i < 2; ++i) mma_halves(x[i][n], k[i][1], q.z, q.w);
    }
  }

  // ---- Exact keys

  // A lane reads octet t of every slice of its four keys.
  __device__ __forceinline__ void add_exact(int step) const {
    const int new_begin = a_.new_begin(a_.length(work_.sequence), a_.num_queries(work_.sequence));
    const float* center = x_.centered(true) ? a_.channels.center + int64_t{work_.kv_head} * layout_.head_dim : nullptr;
    int at[kLaneKeys];
    const void* vector[kLaneKeys];
    float scale[kLaneKeys], up[kLaneKeys];
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i) {
      at[i] = exact_.position(step * kStepKeys + lane_key(i));
      vector[i] = at[i] >= 0 ? exact_vector(x_, work_, at[i], new_begin, false) : nullptr;
      uint32_t largest = 0;
      for (int o = t_; vector[i] && o < layout_.octets; o += 4) {
        float y[8];
        load_exact(x_, vector[i], center, o, y);
#pragma unroll
        for (int c = 0; c < 8; ++c) largest = max(largest, magnitude_bits(y[c]));
      }
      largest = max_of_lanes<4>(largest);
      const int e = general::half_exponent(largest);
      const bool finite = largest < kInfinityBits;
      if (!finite) vector[i] = nullptr;
      scale[i] = finite ? general::clamped_power_of_two(e - general::kHalfExponent) : quiet_nan();
      up[i] = general::clamped_power_of_two(general::kHalfExponent - e);
    }
    Products x = {};
#pragma unroll 1
    for (int slice = 0; slice < slices_; ++slice) {
      const int o = 4 * slice + t_;
      uint4 key[kLaneKeys];
#pragma unroll
      for (int i = 0; i < kLaneKeys; ++i) {
        float y[8] = {};
        if (vector[i] && o < layout_.octets) load_exact(x_, vector[i], center, o, y);
        const auto pair = [&](int c) { return general::halves(y[c] * up[i], y[c + 1] * up[i]); };
        key[i] = {pair(0), pair(2), pair(4), pair(6)};
      }
      multiply_slice(slice, key, x);
    }
    float total[kLaneKeys] = {};
    add_seen_weights(x, scale, at, total);
    const float sum = sum_over_lanes(total);
    const int mine = t_ < 2 ? (t_ == 0 ? at[0] : at[1]) : (t_ == 2 ? at[2] : at[3]);
    if (mine >= 0 && mine < m_.keys) mass()[mine] += sum;
  }

  // ---- Weights

  __device__ __forceinline__ float* mass() const {
    return m_.mass + (int64_t{work_.sequence} * a_.kv_heads + work_.kv_head) * m_.keys;
  }

  // The weights of keys that every row sees, to the totals of the lane's keys. scale: of the keys
  __device__ __forceinline__ void add_weights(const Products& x, const float (&scale)[kLaneKeys],
                                              float (&total)[kLaneKeys]) const {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const float4 row = reinterpret_cast<const float4*>(notes_.weight)[4 * n + t_];  // and the next one
#pragma unroll
      for (int i = 0; i < kLaneKeys; ++i) {
        const float* product = x[i / 2][n] + 2 * (i % 2);
        total[i] += exp2_fast(fmaf(product[0] * scale[i], row.x, row.y));
        total[i] += exp2_fast(fmaf(product[1] * scale[i], row.z, row.w));
      }
    }
  }

  // The same of keys that some rows do not see, and with a soft cap. at: positions of the keys, -1: there is none
  __device__ __forceinline__ void add_seen_weights(const Products& x, const float (&scale)[kLaneKeys],
                                                   const int (&at)[kLaneKeys], float (&total)[kLaneKeys]) const {
    const float cap = a_.soft_cap * kLog2E, inverse = 1 / cap;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int r = 8 * n + 2 * t_ + h;
        const float2 row = notes_.weight[r];
        const float lse = notes_.lse[r];
        const bool adds = row.y != -INFINITY;
        const Sees sees(notes_.visible[r], EXACT);
#pragma unroll
        for (int i = 0; i < kLaneKeys; ++i) {
          float score = fmaf(x[i / 2][n][2 * (i % 2) + h] * scale[i], row.x, row.y);
          if (cap > 0) score = cap * tanh_fast(score * inverse) - lse;
          total[i] += adds && sees(at[i]) ? exp2_fast(score) : 0;
        }
      }
    }
  }

  // The total of key lane_key(t), over the four lanes that hold parts of it.
  __device__ __forceinline__ float sum_over_lanes(const float (&total)[kLaneKeys]) const {
    const bool high = t_ & 2, odd = t_ & 1;
    const auto exchange = [](float give, float keep, int bit) { return keep + __shfl_xor_sync(0xffffffff, give, bit); };
    const float even_key = exchange(high ? total[0] : total[2], high ? total[2] : total[0], 2);
    const float odd_key = exchange(high ? total[1] : total[3], high ? total[3] : total[1], 2);
    return exchange(odd ? even_key : odd_key, odd ? odd_key : even_key, 1);
  }

  const MassArguments& m_;
  const Arguments& x_;
  const Attention& a_;
  const RecordLayout& layout_;
  const WorkItem work_;
  RowNotes<N>& notes_;
  const general::LevelTables& levels_;
  const float* hartley_;
  const int warp_, lane_, g_, t_, warps_;
  const int slices_;  // of 32 channels
  uint4* queries_;
  uint8_t* stages_;  // of this warp
  int steps_;        // of all warps
  general::ExactKeys exact_;
  int begin_, end_, aligned_begin_;  // keys in codes that some row sees; a step begins at a multiple of kStepKeys
  int all_begin_, all_end_;          // that all rows see
  // Of this warp: steps whose copies were issued, the slot that is filled next, which tiles of slot i exist (bits 2 i
  // and 2 i + 1; of a single tile both), and addresses of tiles (find_tiles)
  int fills_ = 0, slot_ = 0;
  uint32_t present_ = 0;
  const uint8_t* tile_ = nullptr;
};

template <int N, bool EXACT>
__global__ void __launch_bounds__(32 * kMostWarps, 2) mass_kernel(const __grid_constant__ MassArguments m) {
  extern __shared__ uint4 dynamic[];
  __shared__ OwnMemory<N> own;
  const Attention& a = m.x.a;
  const unsigned span = blockIdx.x % m.spans, rest = blockIdx.x / m.spans;
  const int kv_head = static_cast<int>(rest % a.kv_heads), sequence = static_cast<int>(rest / a.kv_heads);
  const int begin = static_cast<int>(span) * m.span_keys;
  if (!EXACT && begin >= a.length(sequence)) return;
  own.levels.fill(a.record, a.key_levels, a.value_levels, threadIdx.x);
  if (threadIdx.x < format::kMaxBlocks) {
    own.hartley[threadIdx.x] = threadIdx.x < m.x.split.blocks ? format::hartley(m.x.split.blocks, threadIdx.x) : 0;
  }
  const int rows = a.num_queries(sequence) * a.group, first_query = a.first_query(sequence);
#pragma unroll 1
  for (int first = 0; first < rows; first += 8 * N) {
    const WorkItem work{sequence, kv_head, first, min(rows - first, 8 * N), first_query};
    MassBlock<N, EXACT>(m, work, own, reinterpret_cast<uint8_t*>(dynamic)).run(begin, begin + m.span_keys);
  }
}

}  // namespace turboquant::cuda::mass
