// Attention of calls that have few units of keys: so few that their time is that of the instructions which a warp
// executes one after the other, and, where a model's weights have passed through the caches since the last call, that
// of fetching these instructions. So this code is short, and what is done once is done by all warps at the same time:
//   - Block b has part b / segments of segment b % segments. All parts of a segment take its stages of 32 keys in turn,
//     and so do the warps of a block. A warp takes at most eight rows; where there are more, warps with other rows
//     share its stages.
//   - A part has room for all of its stages, so that all copies are issued at once, and no stage is used twice.
//   - Page ids, signs, centers and queries are loaded before the lengths are known.
//   - Exact keys are read 16 at a time, from where they are, while codes are on their way. Their weights are not
//     rounded. All blocks of a segment have some of them, and warps without any take more stages of codes.
//   - The warps' states lie in shared memory row by row. A warp joins those of a row, and goes on to the results of
//     that row or leaves them to the segment's last block, which joins the parts of all blocks in the same way.
//   - Blocks without work rehearse: one warp executes a third of the code that the others need later, on whatever lies
//     in shared memory, and leaves nothing. So that code is in the L2 cache in time.
// Lengths decide on the device which calls are taken; every block decides alike.
#pragma once

#include "cuda/attention/counters.cuh"
#include "cuda/attention/padding.cuh"
#include "cuda/attention/split_kv/unit.cuh"

namespace turboquant::cuda::split_kv {

// What UnitProducts asks about the 4 M rows of a warp.
template <int D, int M>
class FewQueries {
  using X = SplitKvTraits<D, M>;

 public:
  // rows, operands: of the warp.
  __device__ __forceinline__ void load(const BlockView& block, const QueryRow* rows, const uint8_t* operands) {
    rows_ = rows + block.t;
#pragma unroll
    for (int n = 0; n < M; ++n) {
#pragma unroll
      for (int i = 0; i < X::kFrags; ++i) {
        operand_[n][i] = reinterpret_cast<const uint2*>(operands)[(n * X::kFrags + i) * 32 + block.lane];
      }
      scale_[n] = block.call.soft_cap > 0 ? 1.0f : row(n).scale, zero_[n] = row(n).zero;
    }
  }
  __device__ __forceinline__ uint2 operand(int n, int frag) const { return operand_[n][frag]; }
  __device__ __forceinline__ float scale(int n) const { return scale_[n]; }
  __device__ __forceinline__ int zero(int n) const { return zero_[n]; }
  __device__ __forceinline__ const QueryRow& row(int n) const { return rows_[4 * n]; }
  __device__ __forceinline__ bool all_see(int begin, int end) const {
    bool all = true;
#pragma unroll
    for (int n = 0; n < M; ++n) all &= row(n).first <= begin && end <= row(n).end;
    return __all_sync(0xffffffff, all);
  }

 private:
  const QueryRow* rows_;
  uint2 operand_[M][X::kFrags];
  float scale_[M];
  int zero_[M];
};

// M: groups of four rows of a warp.
template <int D, int M>
class FewUnits {
  static_assert(takes_few_units(D));
  using X = SplitKvTraits<D, M>;
  using Lanes = RowLanes<D>;
  static constexpr int kPer = Lanes::kPerLane, kRowFloats = few_row_floats(D);
  static constexpr int kRows = 4 * M;  // of a warp

 public:
  explicit __device__ __forceinline__ FewUnits(const BlockView& block)
      : block_(block.call, block.layout, block.plan, block.shared, hidden_thread()), products_(block_),
        plan_(block.plan.few) {}

  __device__ __forceinline__ bool possible() const { return plan_.tokens > 0; }

  // Whether no sequence has too many keys. early: the previous kernel may still be writing the lengths.
  __device__ __forceinline__ bool takes_call(bool early) const {
    int most = 0;
#pragma unroll 1
    for (int s = block_.lane; s < block_.call.seqs; s += 32) {
      most = max(most, Attention::read(block_.call.seq_lens + s, early));
    }
    return !__any_sync(0xffffffff, most > plan_.tokens);
  }

  // Starts to load what does not depend on the length.
  __device__ __forceinline__ void begin() {
    const Attention& a = block_.call;
    segments_ = a.seqs * a.kv_heads;
    part_ = divided(blockIdx.x, plan_.segments_reciprocal), segment_ = blockIdx.x - part_ * segments_;
    sequence_ = divided(segment_, plan_.heads_reciprocal), head_ = segment_ - sequence_ * a.kv_heads;
    slot_ = block_.warp >> plan_.team_shift, member_ = block_.warp - (slot_ << plan_.team_shift);
    if (part_ >= plan_.parts) return;
    page_ = page_of(0);
    load_now(a.key_signs + channel(), sign_);
    const format::Channels of_head = a.channels.of_head(head_, D);
    if (of_head.center) load_now(of_head.center + channel(), center_);
    if (of_head.inverse) load_now(of_head.inverse + channel(), inverse_);
    const Attention::Queries queries = a.queries_of(sequence_);
    work_.first_query = queries.first, work_.queries = queries.count;
    load_query(block_.warp);
  }

  // After `begin`, if takes_call.
  __device__ __forceinline__ void run() {
    const Attention& a = block_.call;
    if (a.query_begin || a.tokens > a.seqs) {
      clear_padding<uint16_t>(a, D, int64_t{blockIdx.x} * blockDim.x + threadIdx.x, int64_t{gridDim.x} * blockDim.x);
    }
    const bool beside_store = block_.plan.early == Early::kBesideStore;
    const int exact = part_ < plan_.parts ? find_work() : 0;
    // Exact keys have no block of their own, which would have to be joined, unless a warp had more than two tasks of
    // them.
    const int blocks = min(plan_.parts, max(max(rounds(coded_), (rounds(exact) + 1) / 2), 1));
    rehearses_ = part_ >= blocks;
    if (part_ >= plan_.parts || work_.queries == 0 || (rehearses_ && block_.warp > 0)) {
      if (beside_store) block_.plan.overlap.begin();  // whoever waits for this kernel must have waited for both
      return;
    }
    const bool mine = slot_ < plan_.slots;
    // Blocks take tasks of exact keys in turn, and the last slots take them first, because the first warps prepare
    // queries. without: how many slots of this block have none.
    int exact_task = mine ? (plan_.slots - 1 - slot_) * blocks + part_ : exact;
    const int without = plan_.slots - __popc(__ballot_sync(0xffffffff, block_.lane < plan_.slots &&
                                                                           block_.lane * blocks + part_ < exact));
    int task = part_ * plan_.slots;  // the block's first task of codes
    if (rehearses_) {
      task = max(coded_ - 1, 0), exact_task = 0;
    } else {
      if (threadIdx.x == 0) init_barrier(ready(), block_.plan.warps);
      barriers_ready();
      __syncthreads();
      // Copies are issued first, but behind a store that this kernel runs beside. A loop, so that the code exists once.
#pragma unroll 1
      for (int turn = 0; turn < 2; ++turn) {
        if ((turn == 0) == beside_store) {
          if (part_ * plan_.slots < coded_) prepare_queries();
        } else {
          if (beside_store) block_.plan.overlap.begin();
          if (mine && member_ == 0) issue_copies();
        }
      }
    }
    const auto executes = [&](int i) { return !rehearses_ || (part_ + segment_) % 3 == i; };
    const bool has_exact = executes(0) && attend_exact(exact_task, exact, blocks * plan_.slots);
    if (executes(1)) attend_codes(task, has_exact, without, mine);
    if (executes(2)) join(blocks);
    if (rehearses_ && beside_store) block_.plan.overlap.begin();
  }

 private:
  // threadIdx.x as the compiler cannot know it. Otherwise it computes what this code and that of long calls have in
  // common before it chooses between them, and both spill.
  static __device__ __forceinline__ unsigned hidden_thread() {
    unsigned thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
  }

  // Finds the work of the segment; returns the number of its tasks of exact keys.
  __device__ __forceinline__ int find_work() {
    work_ = work_of_sequence<16, kSplitKvCosts>(block_.call, Divisor(kExactKeys), sequence_, false);
    coded_ = kUnitStages * work_.coded;
    return (work_.exact() + kExactKeys - 1) / kExactKeys;
  }
  // How many blocks so many tasks fill.
  __device__ __forceinline__ int rounds(int tasks) const {
    return divided(tasks + plan_.slots - 1, plan_.slots_reciprocal);
  }

  static __device__ __forceinline__ int divided(int x, uint32_t reciprocal) {
    return static_cast<int>(uint64_t{static_cast<uint32_t>(x)} * reciprocal >> 24);
  }
  __device__ __forceinline__ int channel() const { return block_.lane * kPer; }

  // Loads of a lane's channels that the compiler neither delays nor leaves out.
  static __device__ __forceinline__ void load_now(const float* from, float (&x)[kPer]) {
    if constexpr (kPer == 4) {
      asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                   : "l"(from));
    } else {
      static_assert(kPer == 2);
      asm volatile("ld.global.v2.f32 {%0, %1}, [%2];" : "=f"(x[0]), "=f"(x[1]) : "l"(from));
    }
  }
  static __device__ __forceinline__ void load_now(const void* from, uint32_t (&x)[kPer / 2]) {
    if constexpr (kPer == 4) {
      asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "l"(from));
    } else {
      asm volatile("ld.global.b32 %0, [%1];" : "=r"(x[0]) : "l"(from));
    }
  }
  static __device__ __forceinline__ void store(const float (&x)[kPer], float* to) {
    if constexpr (kPer == 4) {
      *reinterpret_cast<float4*>(to) = float4{x[0], x[1], x[2], x[3]};
    } else {
      *reinterpret_cast<float2*>(to) = float2{x[0], x[1]};
    }
  }
  __device__ __forceinline__ void floats_of(const uint32_t (&word)[kPer / 2], float (&y)[kPer]) const {
    if (block_.call.dtype == Dtype::kBFloat16) {
      floats_of_words<__nv_bfloat16>(word, y);
    } else {
      floats_of_words<__half>(word, y);
    }
  }

  // Row `r` of the block; false: there is no such row.
  __device__ __forceinline__ bool find(int r, RowPlace& row) const {
    const int group = block_.call.group;
    if (r >= work_.queries * group) return false;
    const int i = r * block_.plan.group_reciprocal >> 16;  // r / group, exact because r is small
    row = {work_.first_query + i, (head_ - i) * group + r, work_.length - work_.queries + i};
    return true;
  }
  __device__ __forceinline__ const uint8_t* query(const RowPlace& row) const {
    const Attention& a = block_.call;
    return static_cast<const uint8_t*>(a.q) + (row.token * a.q_token_stride + row.head * a.q_head_stride) * 2;
  }
  __device__ __forceinline__ void load_query(int r) {
    RowPlace row;
    if (find(r, row)) load_now(query(row) + 2 * channel(), query_);
  }

  // ---- Copies of codes

  // The lane's tile among those of the slot: lanes count the stages, and the tiles of a stage.
  __device__ __forceinline__ int stage_of_lane() const { return block_.lane >> (block_.layout.copies - 1); }
  __device__ __forceinline__ int task_of_lane() const {
    return (stage_of_lane() * plan_.parts + part_) * plan_.slots + slot_;
  }
  // first: the token of task 0
  __device__ __forceinline__ int token_of_lane(int first) const {
    const int tile = block_.lane & (block_.layout.copies - 1);
    return first + task_of_lane() * kStageTokens + (tile << block_.layout.copy_shift);
  }
  __device__ __forceinline__ int page_of(int first) const {
    const Attention& a = block_.call;
    const int page = token_of_lane(first) >> block_.layout.page_shift;
    if (stage_of_lane() >= plan_.stages || page >= a.max_pages) return -1;
    int id;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(id) : "l"(a.block_table + sequence_ * a.table_stride + page));
    return id;
  }

  __device__ __forceinline__ int stage(int slot, int i) const {
    return (slot * plan_.stages + i) * block_.layout.stride;
  }
  __device__ __forceinline__ uint64_t* barrier(int stage) const {
    return reinterpret_cast<uint64_t*>(block_.shared + stage + block_.layout.bytes);
  }

  // All stages of the slot.
  __device__ __forceinline__ void issue_copies() {
    const Attention& a = block_.call;
    const StageLayout& layout = block_.layout;
    if (work_.first != 0) page_ = page_of(work_.first);
    if (stage_of_lane() >= plan_.stages || task_of_lane() >= coded_) return;
    const int token = token_of_lane(work_.first), to = stage(slot_, stage_of_lane());
    const bool held = token < a.new_begin(work_.length, work_.queries) &&
                      token + (1 << layout.copy_shift) > a.first_visible(work_.length - work_.queries) &&
                      static_cast<unsigned>(page_) < static_cast<unsigned>(a.num_pages);
    expect(barrier(to), held ? layout.copy_bytes : 0);
    if (!held) return;
    const uint32_t tile = (token & ((1 << layout.page_shift) - 1)) >> layout.copy_shift;
    const uint32_t grains = format::record_offset<uint32_t>(page_, head_, layout.page_grains, layout.record_grains) +
                            tile * layout.tile_grains;
    copy_bulk(block_.shared + to + (block_.lane & (layout.copies - 1)) * layout.copy_bytes,
              a.pages + uint64_t{grains} * layout.grain, layout.copy_bytes, barrier(to));
  }

  // ---- Queries

  __device__ __forceinline__ uint64_t* ready() const {  // queries and levels are in shared memory
    return reinterpret_cast<uint64_t*>(block_.shared + block_.plan.notes);
  }
  __device__ __forceinline__ uint8_t* operands() const { return block_.shared + block_.plan.operands; }

  __device__ __forceinline__ void prepare_queries() {
    const int lane = block_.lane, rows = kRows << plan_.team_shift;
    if (block_.warp == block_.plan.warps - 1) products_.copy_level(lane);
#pragma unroll 1
    for (int r = block_.warp; r < rows; r += block_.plan.warps) {
      if (r != block_.warp) load_query(r);
      prepare_query(r);
    }
    __syncwarp();
    if (lane == 0) arrive(ready());
  }

  // As Queries::prepare does it for one row.
  __device__ __forceinline__ void prepare_query(int r) {
    const Attention& a = block_.call;
    const int lane = block_.lane;
    float y[kPer] = {};
    QueryRow row{1, 0, 0, 0, INT32_MAX};  // where there is no row, no key needs to be excluded
    RowPlace place;
    if (find(r, place)) {
      floats_of(query_, y);
      row.first = max(a.first_visible(place.position), work_.tail.sinks);
      row.end = a.recent(work_.tail, place.position, a.new_begin(work_.length, work_.queries));
    }
    if (a.channels.center) {
#pragma unroll
      for (int i = 0; i < kPer; ++i) row.shift = fmaf(y[i], center_[i], row.shift);
#pragma unroll
      for (int bit = 1; bit < 32; bit *= 2) row.shift += __shfl_xor_sync(0xffffffff, row.shift, bit);
    }
    if (a.channels.inverse) {
#pragma unroll
      for (int i = 0; i < kPer; ++i) y[i] *= inverse_[i];
    }
#pragma unroll
    for (int i = 0; i < kPer; ++i) y[i] *= sign_[i];
    transform<typename Lanes::Rotation>(y, lane);
    if (block_.plan.codes.shifts) subtract_neighbours<D>(y, lane);
    float largest = kLeastQuery;
#pragma unroll
    for (int i = 0; i < kPer; ++i) largest = max_or_nan(largest, fabsf(y[i]));
    largest = __int_as_float(max_of_lanes(__float_as_int(largest)));
    const float scale = a.softmax_scale * kLog2E;
    const float factor = (scale < 0 ? -kMostQuery : kMostQuery) / largest;
    int x[kPer], sum = 0;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      x[i] = __float2int_rn(y[i] * factor);
      sum += x[i] * block_.plan.codes.twice_zero(channel() + i);
    }
    if (block_.plan.codes.order == CodeOrder::kInterleaved) {
      store_operands<CodeOrder::kInterleaved>(r, x);
    } else if (block_.plan.codes.order == CodeOrder::kPlain) {
      store_operands<CodeOrder::kPlain>(r, x);
    } else {
      store_operands<CodeOrder::kShared>(r, x);
    }
    sum = sum_of_lanes(sum);
    if (lane == 0) {
      row.scale = max_or_nan(largest / kMostQuery * fabsf(scale) * format::kLevelUnit * block_.plan.codes.key_unit,
                             kLeastQuery);
      row.shift *= scale;
      row.zero = sum >> 1;
      block_.rows()[r] = row;
    }
  }

  template <CodeOrder ORDER>
  __device__ __forceinline__ void store_operands(int r, const int (&x)[kPer]) const {
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      store_operand(operand_of_row<D>(operands(), r, X::Operands::place(ORDER, channel() + i)), x[i]);
    }
  }

  // ---- Exact keys (few_units_exact.cuh)

  static constexpr int kExactKeys = 16;  // of a task

  // The lane's key of the task, or its value: lanes 0-15 have keys, lanes 16-31 their values. i: among the exact keys.
  __device__ __forceinline__ const uint8_t* exact_row(int i) const {
    const Attention& a = block_.call;
    const bool is_value = block_.lane >= kExactKeys;
    // Beside a store, a block that rehearses reads a new token's key only: the tail is being written.
    const int position = work_.exact_key(rehearses_ ? work_.exact() - 1 : i);
    const int new_begin = a.new_begin(work_.length, work_.queries);
    if (position >= new_begin) {
      return static_cast<const uint8_t*>(a.new_row(work_.first_query + position - new_begin, head_, is_value));
    }
    const int rows = a.sink_tokens + a.ring, row = format::tail_row(position, a.sink_tokens, a.ring);
    const int64_t at = format::tail_offset<int64_t>(work_.tail.slot, a.tail_stride, head_, row, rows, int64_t{D}, 0);
    return static_cast<const uint8_t*>(a.tail) + (at + (is_value ? D : 0)) * kExactElementBytes;
  }
  static __device__ __forceinline__ const uint8_t* of_lane(const uint8_t* p, int lane) {
    return reinterpret_cast<const uint8_t*>(__shfl_sync(0xffffffff, reinterpret_cast<uint64_t>(p), lane));
  }

  // The warp's tasks of exact keys; leaves their state. False: it has none.
  __device__ __forceinline__ bool attend_exact(int task, int tasks, int step);
  template <typename T>
  __device__ __forceinline__ void attend_exact_as(int task, int tasks, int step);
  // Rows 4 n to 4 n + 3 of the warp.
  template <typename T>
  __device__ __forceinline__ void attend_exact_rows(int n, int task, int tasks, int step);
  // Adds a weighted value to the sums of all rows. A row with weight 0 does not see it: then it may be NaN.
  template <typename T>
  __device__ __forceinline__ void add_value(const uint8_t* row, const float* weights, float (&sum)[4][kPer]) const;
  // Rotates the sums as values were rotated.
  __device__ __forceinline__ void leave_exact(float* rows, float m, float total, const float (&sum)[4][kPer]);

  // ---- Codes

  // How many stages of codes take as long as a task of exact keys.
  static constexpr int kStagesOfExact = 3;

  // The warp's tasks of codes; leaves the state of all of its tasks. The block's stages are counted as `i`: one of each
  // slot, then the next of each slot. Slots without exact keys have the first ones, as long as others are busy with
  // theirs, and then all slots take them in turn, whoever has copied them.
  // first: the block's first task; without: how many of its slots have no exact keys.
  __device__ __forceinline__ void attend_codes(int first, bool has_exact, int without, bool mine) {
    float* rows = state(block_.warp);
    const int ahead = kStagesOfExact * without, slots = plan_.slots, skipped = (plan_.parts - 1) * slots;
    int i = has_exact ? ahead + slot_ : slot_, round = divided(i, plan_.slots_reciprocal);
    int task = first + i + round * skipped;
    if (!mine || task >= coded_) {
      if (mine && !has_exact && block_.lane < kRows) set_head(rows + block_.lane * kRowFloats, -INFINITY, 0);
      return;
    }
    if (!rehearses_) wait_barrier(ready(), 0);
    FewQueries<D, M> queries;
    queries.load(block_, block_.rows() + member_ * kRows, operands() + member_ * M * X::kFrags * 32 * sizeof(uint2));
    RunningSoftmax<D, M> softmax;
    softmax.clear();
#pragma unroll 1
    while (task < coded_) {
      const int from[1] = {stage(i - round * slots, round)};
      with_pair<D>(block_.plan.codes.pair, [&](auto pair) {
        products_.template attend<typename decltype(pair)::type>(
            queries, work_.first + task * kStageTokens, from,
            [&](int s) {
              if (!rehearses_) wait_barrier(barrier(s), 0);
            },
            softmax);
      });
      i += i < ahead ? without : slots;
      round = divided(i, plan_.slots_reciprocal);
      task = first + i + round * skipped;
    }
    for_each<M>([&](auto n) { leave_codes(queries, softmax, n, rows + (4 * n + block_.t) * kRowFloats, has_exact); });
  }

  // Leaves row 4 n + t at `row`, beside the state of exact keys that may be there.
  __device__ __forceinline__ void leave_codes(const FewQueries<D, M>& queries, const RunningSoftmax<D, M>& softmax,
                                              int n, float* row, bool has_exact) const {
    const auto add = [](float x, float y) { return x + y; };
    float total = over_tokens(softmax.total[n], add);
    float m = total == 0
                  ? -INFINITY
                  : fmaf(softmax.max[n], queries.scale(n), block_.call.soft_cap > 0 ? 0.0f : queries.row(n).shift);
    float codes_by = 1, exact_by = 0;
    if (has_exact) {
      const float2 head = *reinterpret_cast<const float2*>(row + D);
      const float top = fmaxf(m, head.x);
      codes_by = weight_of(m, top), exact_by = weight_of(head.x, top);
      m = top, total = codes_by * total + exact_by * head.y;
    }
    const float unit = format::kLevelUnit * codes_by;
    const float less = block_.plan.codes.value_top * over_tokens(softmax.weights[n], add) * unit;
#pragma unroll
    for (int i = 0; i < X::kTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float x = fmaf(block_.plan.codes.value_steps[h] * unit, softmax.sums[i][n][h], -less);
        float& to = row[16 * i + 8 * h + block_.g];
        if (has_exact) x = fmaf(exact_by, to, x);
        to = x;
      }
    }
    __syncwarp();
    if (block_.g == 0) set_head(row, m, total);
  }

  // ---- The join (few_units_join.cuh)

  // Of warp i, or of the rows of such a warp: [kRows, kRowFloats], sums in the rotated space, then the maximum and the
  // denominator.
  __device__ __forceinline__ float* state(int i) const { return block_.join() + i * kRows * kRowFloats; }
  static __device__ __forceinline__ void set_head(float* row, float m, float total) {
    *reinterpret_cast<float2*>(row + D) = float2{m, total};
  }
  __device__ __forceinline__ float* partial(int part, int r) const {
    const int64_t block = part * segments_ + segment_;
    return block_.plan.parts + (2 * block * (kRows << plan_.team_shift) + r) * part_floats(D);
  }

  // blocks: those that share the segment
  __device__ __forceinline__ void join(int blocks);
  // Joins the row of `count` states into a result, or into the block's partial result.
  __device__ __forceinline__ void join_row(int r, int count, bool whole, const float (&sign)[kPer]) const;
  // Joins the partial results of `blocks` blocks into a few states, in the order of the parts: a warp has a row and a
  // share of the parts.
  __device__ __forceinline__ void gather(int blocks) const;

  static __device__ __forceinline__ float max_over_lanes(float x) {
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, bit));
    return x;
  }
  static __device__ __forceinline__ float sum_over_lanes(float x) {
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) x += __shfl_xor_sync(0xffffffff, x, bit);
    return x;
  }
  static __device__ __forceinline__ void load_part(const float* from, float (&x)[kPer]) {
    if constexpr (kPer == 4) {
      const float4 w = __ldcg(reinterpret_cast<const float4*>(from));
      x[0] = w.x, x[1] = w.y, x[2] = w.z, x[3] = w.w;
    } else {
      const float2 w = __ldcg(reinterpret_cast<const float2*>(from));
      x[0] = w.x, x[1] = w.y;
    }
  }

  const BlockView block_;
  const UnitProducts<D, M> products_;
  const FewUnitsPlan& plan_;

  int segments_, segment_, part_, sequence_, head_;  // all segments; the block's segment and its part of it
  int slot_, member_;                                // the warp's team, and which of the team it is
  int page_;                                         // of the lane's tile
  uint32_t query_[kPer / 2];                         // the lane's channels of a row
  float sign_[kPer], center_[kPer], inverse_[kPer];
  SequenceWork work_{};  // at first its queries only
  int coded_ = 0;        // stages of codes
  bool rehearses_ = false;
};

// Where there is no code for few units.
struct NoFewUnits {
  explicit __device__ __forceinline__ NoFewUnits(const BlockView&) {}
  __device__ __forceinline__ bool possible() const { return false; }
  __device__ __forceinline__ bool takes_call(bool) const { return false; }
  __device__ __forceinline__ void begin() const {}
  __device__ __forceinline__ void run() const {}
};
#if defined(__CUDA_ARCH__)
constexpr bool kHasFewUnits = __CUDA_ARCH__ / 100 == kFewUnitsMajor;
#else
constexpr bool kHasFewUnits = false;
#endif
// For blocks of 4 N rows, in a kernel with this code or without it.
template <int D, int N, bool FEW>
using FewUnitsOf = std::conditional_t<FEW && kHasFewUnits, FewUnits<D, few_row_groups(N)>, NoFewUnits>;

}  // namespace turboquant::cuda::split_kv
