// The kernel of chunks: attention of many query rows over many older codes, that of long sequences.
//
// Row tiles (kernel.cuh) expand a code once for each tile of 128 rows, which takes longer than the products of a tile
// do. Here a code is expanded once for all rows of a sequence: to a ring of tiles in global memory, small enough for
// the L2 cache, from where any block copies them. The warps that multiply are those of row tiles, with tiles of 128
// keys up to 128 channels, because nobody expands codes while they multiply.
//
// The codes of a sequence are cut into stretches. A filling is a stretch of one KV head; it takes a slot of the ring.
// What a tile of rows has found in its stretches so far, its state, waits in global memory for the next one. Behind the
// last one the same warps attend to the exact keys, those of the tail and then the call's own, which the tensor memory
// accelerator copies as in the kernel of prompts.
//
// A task is to expand a few tiles of a filling, or to attend to a filling by one tile of rows. Tasks are handed out in
// an order in which each waits only for tasks before it, so some block always gets on:
//   expanding fillings 0, 1, ... lookahead - 1,
//   then for each filling n: expanding filling n + lookahead, attending to filling n
// Fillings are ordered by stretch, then sequence, then KV head, so that between two stretches of a tile of rows all
// others have their turn, and none waits for long. A task waits
//   to expand:  until everyone has attended to the filling that had the slot before,
//   to attend:  until all of the filling is expanded, and until the tile of rows is done with the stretch before.
#pragma once

#include "cuda/attention/row_tiles/chunk_counters.cuh"
#include "cuda/attention/row_tiles/consumer.cuh"
#include "cuda/attention/row_tiles/exact_rows.cuh"

namespace turboquant::cuda::row_tiles {

// Named barriers of two warps that expand a tile, behind those of consumer.cuh
constexpr int kExpandingBarrier = 4;

// Where the ring has tiles of keys and of values, and what consumers need to know about them.
template <class S>
struct ExpandedTile {
  uint8_t* keys;
  uint8_t* values;
  TileInfo* info;
  __device__ __forceinline__ ExpandedTile(const ChunksPlan& p, int number)
      : keys(p.ring + int64_t{2} * number * S::kTileBytes), values(keys + S::kTileBytes),
        info(reinterpret_cast<TileInfo*>(p.ring + int64_t{2} * p.ring_tiles * S::kTileBytes) + number) {}
};

// Which keys of a sequence some of its rows read from codes: [begin, end).
struct CodedKeys {
  int begin, end;
};
__device__ __forceinline__ CodedKeys coded_keys(const Attention& a, int sequence, int queries) {
  const int length = a.length(sequence, queries);
  const Sight sight(a, sequence, length, queries);
  const int begin = max(sight.first(length - queries), 0);
  return {begin, max(sight.recent(length - 1), begin)};
}

// The tiles of kLongRows rows of all KV heads of a sequence, if it has enough rows and codes to be long; else 0.
__device__ __forceinline__ int long_tiles(const Attention& a, const Plan& plan, int sequence) {
  const int queries = a.num_queries(sequence), rows = queries * plan.group;
  if (rows < plan.chunks.least_rows) return 0;
  const CodedKeys coded = coded_keys(a, sequence, queries);
  const int least = rows < plan.chunks.many_rows ? kLeastCodes : 1;
  return coded.end - coded.begin < least ? 0 : ceil_div(rows, kLongRows) * a.kv_heads;
}
// Whether there are long sequences: enough of their tiles of rows. All lanes of a warp call it.
__device__ __forceinline__ bool any_long(const Attention& a, const Plan& plan) {
  int tiles = 0;
#pragma unroll 1
  for (int s = static_cast<int>(threadIdx.x % 32); s < a.seqs; s += 32) tiles += long_tiles(a, plan, s);
  return sum_of_lanes(tiles) >= plan.chunks.least_tiles;
}

// Numbers long sequences and the states of their tiles of rows. All lanes of a warp call it.
struct LongCounter {
  int sequences = 0, states = 0;  // so far

  // Of the next 32 sequences, one for each lane: its tiles of rows, 0 if it is not long; its number among long ones,
  // and that of its first state.
  __device__ __forceinline__ int next(const Attention& a, const Plan& plan, int sequence, int& number, int& state) {
    int tiles = sequence < a.seqs ? long_tiles(a, plan, sequence) : 0;
    state = states + sum_of_lanes_before(tiles);
    states = min(states + sum_of_lanes(tiles), 1 << 30);
    // Where queries of sequences overlap, there are more rows than tokens, for which the host has made room.
    if (state + tiles > plan.chunks.most_states) tiles = 0;
    const unsigned some = __ballot_sync(0xffffffff, tiles > 0);
    number = sequences + __popc(some & ((1u << threadIdx.x % 32) - 1));
    sequences = min(sequences + __popc(some), kMaxLong);
    return number < kMaxLong ? tiles : 0;
  }
};

// Tells row tiles which sequences are long. One warp calls it.
__device__ __forceinline__ void number_states(const Attention& a, const Plan& plan, bool any) {
  LongCounter counter;
#pragma unroll 1
  for (int first = 0; first < a.seqs; first += 32) {
    const int s = first + static_cast<int>(threadIdx.x % 32);
    int number, state;
    const int tiles = any ? counter.next(a, plan, s, number, state) : 0;
    if (s < a.seqs) plan.first_states[s] = tiles > 0 ? state : -1;
  }
}

// How work is cut, which all blocks derive from the lengths. One warp computes it and hands out tasks; all its lanes
// call everything.
template <class S>
class TaskList {
 public:
  // to: the long sequences, in shared memory
  __device__ __forceinline__ TaskList(const Attention& a, const Plan& plan, LongSequence* to)
      : a_(a), plan_(plan), list_(to) {
    const int lane = threadIdx.x % 32, grid = static_cast<int>(gridDim.x);
    LongCounter counter;
    for (int first = 0; first < a.seqs; first += 32) {
      const int s = first + lane;
      int number, state;
      const int tiles = counter.next(a, plan, s, number, state);
      if (tiles > 0) {
        const CodedKeys coded = coded_keys(a, s, a.num_queries(s));
        to[number] = {.sequence = s,
                      .begin = coded.begin / S::kKeys,
                      .end = ceil_div(coded.end, S::kKeys),
                      .blocks = quotient(tiles, a.kv_heads),
                      .state = state};
      }
    }
    count_ = counter.sequences;
    // Blocks attend to so many fillings at once. Half as many are expanded ahead.
    const int busy = ceil_div(grid * count_ * a.kv_heads, counter.states) + 1;
    lookahead_ = busy / 2 + 1;
    const int slots = busy + lookahead_ + 1;
    while ((2 << stretch_log_) * slots <= plan.chunks.ring_tiles && (2 << stretch_log_) * S::kKeys <= kMostKeys) {
      ++stretch_log_;
    }
    slots_ = min(plan.chunks.ring_tiles >> stretch_log_, ChunkCounters::kMaxSlots);
    expanding_tasks_ = ceil_div(1 << stretch_log_, S::kExpandedAtOnce);
    __syncwarp();
    int fillings = 0, attending_tasks = 0;
    for (int i = lane; i < count_; i += 32) {
      LongSequence& x = to[i];
      x.first_stretch = x.begin >> stretch_log_;
      x.stretches = ((x.end - 1) >> stretch_log_) + 1 - x.first_stretch;
      fillings += x.stretches, attending_tasks += x.stretches * x.blocks;
    }
    __syncwarp();
    fillings_ = sum_of_lanes(fillings) * a.kv_heads;
    total_ = fillings_ * expanding_tasks_ + sum_of_lanes(attending_tasks) * a.kv_heads;
  }

  // Takes the next task; sequence -1: there is none left. One lane writes it.
  __device__ __forceinline__ void take(Task& to) {
    const int number = next_item(plan_.chunks.counters, total_);
    if (number >= total_) {
      to.sequence = -1;
      return;
    }
    for (;;) {
      const int expands = expanding_.filling < fillings_ ? expanding_tasks_ : 0;
      const int attends = ahead_ == lookahead_ ? list_[attending_.index].blocks : 0;
      if (number < before_ + expands + attends) {
        if (threadIdx.x % 32 == 0) describe_task(number - before_, expands, to);
        return;
      }
      before_ += expands + attends;
      if (ahead_ == lookahead_) {
        advance(attending_);
      } else {
        ++ahead_;
      }
      if (expanding_.filling < fillings_) advance(expanding_);
    }
  }

 private:
  static constexpr int kMostKeys = 8192;  // of a stretch

  // A filling
  struct Cursor {
    int filling = 0, level = 0, index = 0, head = 0;  // level: stretch of the sequence
  };
  __device__ __forceinline__ void advance(Cursor& x) const {
    if (++x.filling == fillings_) return;
    if (++x.head < a_.kv_heads) return;
    x.head = 0;
    do {
      if (++x.index == count_) x.index = 0, ++x.level;
    } while (list_[x.index].stretches <= x.level);
  }

  __device__ __forceinline__ void describe_task(int i, int expands, Task& x) const {
    const Cursor& at = i < expands ? expanding_ : attending_;
    const LongSequence& of = list_[at.index];
    const int stretch = of.first_stretch + at.level;
    x.expands = i < expands;
    x.uses = quotient(at.filling, slots_), x.slot = at.filling - x.uses * slots_;
    x.last_use = at.filling + slots_ >= fillings_;
    x.first_tile = stretch << stretch_log_, x.head = at.head, x.blocks = of.blocks;
    x.expand_target = (x.uses + 1) * expanding_tasks_, x.ring_tile = x.slot << stretch_log_;
    const int end = x.first_tile + (1 << stretch_log_);
    if (x.expands) {
      x.sequence = of.sequence, x.queries = a_.num_queries(x.sequence), x.length = a_.length(x.sequence, x.queries);
      const int first = x.first_tile + i * S::kExpandedAtOnce;
      x.begin = max(first, of.begin), x.end = min(min(first + S::kExpandedAtOnce, end), of.end);
    } else {
      const int block = of.blocks - 1 - (i - expands);
      const Seen seen = describe_rows<S>(a_, plan_.group, of.sequence, block, x);
      const int begin = x.first / S::kKeys, behind = ceil_div(x.coded_end, S::kKeys);
      x.begin = seen.coded ? max(begin, x.first_tile) : 0, x.end = seen.coded ? min(behind, end) : 0;
      x.state = of.state + at.head * of.blocks + block;
      x.turn = stretch - (begin >> stretch_log_);
      x.turns = ((behind - 1) >> stretch_log_) + 1 - (begin >> stretch_log_);
      x.finishes = seen.coded ? x.begin < x.end && x.turn + 1 == x.turns : at.level == 0;
      x.first = x.coded_tiles = 0;  // tiles of codes are numbered from position 0 on, and those of exact keys apart
      x.own_first = max(x.recent, x.new_begin);
      x.exact = x.sinks + max(min(x.own_first, seen.high + 1) - x.recent, 0);
      x.tail_tiles = ceil_div(x.exact, S::kKeys);
      x.exact_tiles = x.tail_tiles + ceil_div(max(seen.high + 1 - x.own_first, 0), S::kKeys);
      x.common_begin = x.tail_tiles + ceil_div(max(seen.by_all - x.own_first, 0), S::kKeys);
      x.common_end = x.tail_tiles + max(seen.low + 1 - x.own_first, 0) / S::kKeys;
    }
  }

  const Attention& a_;
  const Plan& plan_;
  LongSequence* const list_;
  int count_ = 0, lookahead_ = 0, stretch_log_ = 0, slots_ = 1, expanding_tasks_ = 0, fillings_ = 0, total_ = 0;
  int before_ = 0, ahead_ = 0;    // tasks before the current filling; fillings that are expanded ahead so far
  Cursor expanding_, attending_;  // the fillings of the tasks from `before_` on
};

// What a warp does with each task, but for the one that hands them out.
template <typename F>
__device__ __forceinline__ void for_each_task(ChunkNotes& notes, F&& f) {
  for (uint32_t n = 0;; ++n) {
    const int slot = n % kItems;
    wait_barrier(&notes.task_full[slot], n / kItems % 2);
    const Task& task = notes.tasks[slot];
    if (task.sequence < 0) return;
    f(task);
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(&notes.task_empty[slot]);
  }
}

// The next task is taken when the last keys of the one before are on their way, so that its first ones follow. Taken
// earlier, a task would wait here while other blocks have nothing to do.
template <class S>
__device__ __forceinline__ void hand_out_tasks(const Attention& a, const Plan& plan, ChunkNotes& notes) {
  TaskList<S> list(a, plan, notes.sequences);
  for (uint32_t n = 0;; ++n) {
    const int slot = n % kItems, phase = n / kItems % 2;
    wait_barrier(&notes.task_empty[slot], phase ^ 1);
    if (n > 0) wait_barrier(&notes.copied, (n - 1) % 2);
    list.take(notes.tasks[slot]);
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(&notes.task_full[slot]);
    wait_barrier(&notes.task_full[slot], phase);
    if (notes.tasks[slot].sequence < 0) return;
  }
}

// Rows of the exact tail: keys from number `first` on, or their values. One warp copies them.
template <class S, bool VALUES>
__device__ __forceinline__ void copy_tail(const Attention& a, const Task& task, int first, uint8_t* to,
                                          uint64_t* barrier) {
  const ExactRows<S, VALUES> rows{a};
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll 1
  for (int row = lane / 8; row < S::kKeys; row += 4) {
    const bool exists = first + row < task.exact;
    rows.copy(rows.place(to, row), exists ? rows.row(task, first + row) + 16 * rows.word() : nullptr);
  }
  arrive_after_copies(barrier);
  __syncwarp();
  if (lane == 0) arrive(barrier);
}

// Expanded keys, and what is known about them, or values; then those exact keys or values that rows see at their end.
// map: of own ones
template <class S, bool VALUES>
__device__ __forceinline__ void copy_tasks(const Attention& a, const Plan& plan, const CUtensorMap& map, Notes& notes,
                                           ChunkNotes& tasks, uint8_t* shared) {
  uint64_t* const full = VALUES ? notes.value_full : notes.key_full;
  uint64_t* const empty = VALUES ? notes.value_empty : notes.key_empty;
  const int stages = VALUES ? plan.value_stages : plan.key_stages, first_stage = VALUES ? plan.key_stages : 0;
  const ChunkCounters counters(plan.chunks.counters);
  RingPlace stage;
  uint32_t phases = 0;  // of tasks.expanded, a bit for each
  const auto let_next_be_taken = [&] {
    if (!VALUES && threadIdx.x % 32 == 0) arrive(&tasks.copied);
  };
  for_each_task(tasks, [&](const Task& task) {
    if (task.expands) {  // codes are copied into the stages meanwhile
      let_next_be_taken();
      const int slot = tasks.slot_of(task);
      wait_barrier(&tasks.expanded[slot], phases >> slot & 1);
      phases ^= 1u << slot;
      return;
    }
    if (task.begin < task.end) {
      if (threadIdx.x % 32 == 0) {
        wait_for_count(counters.expanded + task.slot, task.expand_target);
        publish_global_memory();
      }
      __syncwarp();
    }
    for (int tile = task.begin; tile < task.end; ++tile, stage.advance(stages)) {
      wait_barrier(&empty[stage.slot], stage.phase ^ 1);
      if (threadIdx.x % 32 == 0) {
        const ExpandedTile<S> from(plan.chunks, task.ring_tile + tile - task.first_tile);
        uint64_t* const barrier = &full[stage.slot];
        expect(barrier, S::kTileBytes + (VALUES ? 0 : static_cast<int>(sizeof(TileInfo))));
        copy_bulk(shared + (first_stage + stage.slot) * S::kTileBytes, VALUES ? from.values : from.keys, S::kTileBytes,
                  barrier);
        if (!VALUES) {
          copy_bulk(reinterpret_cast<uint8_t*>(&notes.info[stage.slot]), reinterpret_cast<const uint8_t*>(from.info),
                    sizeof(TileInfo), barrier);
        }
      }
      __syncwarp();  // no lane may be a turn of the ring behind
    }
    const int exact = task.finishes ? task.exact_tiles : 0;
    for (int tile = 0; tile < exact; ++tile, stage.advance(stages)) {
      uint64_t* const barrier = &full[stage.slot];
      uint8_t* const to = shared + (first_stage + stage.slot) * S::kTileBytes;
      wait_barrier(&empty[stage.slot], stage.phase ^ 1);
      if (tile < task.tail_tiles) {
        copy_tail<S, VALUES>(a, task, tile * S::kKeys, to, barrier);
      } else if (threadIdx.x % 32 == 0) {
        const int token = task.first_query + task.own_first - task.new_begin + (tile - task.tail_tiles) * S::kKeys;
        copy_own_tile<S>(to, map, task.head, token, barrier);
      }
      __syncwarp();
    }
    let_next_be_taken();
  });
}

// Expands tiles: of each, one warp the keys and the next one the values. Codes are copied into the stages of tiles,
// which nobody uses meanwhile.
template <class S>
class TileExpander : UnitExpander<S> {
  using Base = UnitExpander<S>;
  using Base::exponent_of, Base::power_of_two, Base::not_finite, Base::r_, Base::lane_, Base::half_bytes_, Base::scale_;
  static constexpr int kUnits = S::kKeys / kUnitKeys;

 public:
  __device__ __forceinline__ TileExpander(const Attention& a, const Plan& plan, uint8_t* shared, Notes& notes)
      : Base(plan), a_(a), plan_(plan), notes_(notes), warp_((threadIdx.x - S::kProducers) / 32),
        raw_(shared + warp_ / 2 * kUnits * plan.raw_stride),
        scales_(reinterpret_cast<__half*>(shared + plan.scales) + warp_ * S::kKeys) {}

  // Each pair of warps needs room for the codes of a tile. Pairs for which there is no room do nothing, and the others
  // take their tiles.
  __device__ __forceinline__ void run(const Task& task) {
    const int room = plan_.queries / (kUnits * plan_.raw_stride), step = min(room, S::kExpandedAtOnce);
    if (warp_ / 2 >= step) return;
    for (int tile = task.begin + warp_ / 2; tile < task.end; tile += step) {
      expand(task, tile, ExpandedTile<S>(plan_.chunks, task.ring_tile + tile - task.first_tile));
      sync_threads(kExpandingBarrier + warp_ / 2, 64);  // both warps are done with the codes
    }
  }

 private:
  __device__ __forceinline__ void expand(const Task& task, int tile, const ExpandedTile<S>& to) {
    const int first_token = tile * S::kKeys;
    const CodedKeys coded = coded_keys(a_, task.sequence, task.queries);
    const unsigned present = copy_codes(task, first_token, coded);
    prepare_scales(first_token, coded, present, to.info);
    const Tables tables(values() ? notes_.value_table : notes_.key_table);
#pragma unroll 1
    for (int u = 0; u < kUnits; ++u) {
      const uint8_t* const unit = raw_ + u * plan_.raw_stride;
      const __half* const scales = scales_ + u * kUnitKeys;
      if (values()) {
        Base::template expand_unit<true>(plan_.value_kind, unit, scales, tables, to.values + u * S::kDim * kSwizzleRow);
      } else {
        Base::template expand_unit<false>(plan_.key_kind, unit, scales, tables, to.keys + u * kUnitKeys * kSwizzleRow);
      }
    }
  }
  __device__ __forceinline__ bool values() const { return warp_ % 2; }

  // Waits for the tile's codes, which the warp of keys copies; returns which tiles of the record exist.
  __device__ __forceinline__ unsigned copy_codes(const Task& task, int first_token, const CodedKeys& coded) {
    const int log_count = 6 - r_.tile_shift, count = 1 << log_count;  // tiles of the record in a unit
    const int token = first_token + (lane_ << r_.tile_shift);
    const bool wanted = lane_ < kUnits * count && token < coded.end && token + (1 << r_.tile_shift) > coded.begin;
    const int page = wanted ? a_.block_table[task.sequence * a_.table_stride + (token >> r_.page_shift)] : -1;
    const bool exists = page >= 0 && page < a_.num_pages;
    const unsigned present = __ballot_sync(0xffffffff, exists);
    uint64_t* const barrier = &notes_.raw_full[warp_ / 2];
    if (!values() && lane_ == 0) expect(barrier, __popc(present) * r_.tile_bytes);
    __syncwarp();
    if (!values() && exists) {
      const int at = (token & ((1 << r_.page_shift) - 1)) >> r_.tile_shift;
      copy_bulk(raw_ + (lane_ >> log_count) * plan_.raw_stride + (lane_ & (count - 1)) * r_.tile_bytes,
                a_.pages + page * a_.page_stride + int64_t{task.head} * r_.record_bytes + at * r_.tile_bytes,
                r_.tile_bytes, barrier);
    }
    wait_barrier(barrier, phase_);
    phase_ ^= 1;
    return present;
  }

  // As Producer::prepare_scales, for all units of a tile: this warp scales keys or values, and both warps look at both.
  __device__ __forceinline__ void prepare_scales(int first_token, const CodedKeys& coded, unsigned present,
                                                 TileInfo* to) {
    TileInfo info{};
    uint32_t of_keys[2 * kUnits], of_values[2 * kUnits];
    int most_key = 0, most_value = 0;
#pragma unroll
    for (int i = 0; i < 2 * kUnits; ++i) {
      const int s = 32 * i + token_at(lane_), token = first_token + s;
      const uint8_t* const from = raw_ + i / 2 * plan_.raw_stride + scale_ + i % 2 * half_bytes_;
      const bool seen = token >= coded.begin && token < coded.end, exists = present >> (s >> r_.tile_shift) & 1;
      of_keys[i] = of_values[i] = 0;
      if (seen && exists) {
        of_keys[i] = *reinterpret_cast<const uint16_t*>(from);
        of_values[i] = *reinterpret_cast<const uint16_t*>(from + r_.value_scales - r_.key_scales);
      }
      const bool bad = not_finite(of_keys[i]) || not_finite(of_values[i]);
      if (bad) of_keys[i] = of_values[i] = 0;
      info.poison[i] = __ballot_sync(0xffffffff, bad), info.absent[i] = __ballot_sync(0xffffffff, seen && !exists);
      info.special |= (info.poison[i] | info.absent[i]) != 0;
      most_key = max(most_key, static_cast<int>(of_keys[i] & 0x7FFF));
      most_value = max(most_value, static_cast<int>(of_values[i] & 0x7FFF));
    }
    const int key_exponent = exponent_of(max_of_lanes(most_key));
    info.value_exponent = exponent_of(max_of_lanes(most_value)), info.key_factor = power_of_two(key_exponent);
    const int exponent = values() ? info.value_exponent : key_exponent;
    const float factor = power_of_two(-exponent) * step_of(values() ? plan_.value_kind : plan_.key_kind);
#pragma unroll
    for (int i = 0; i < 2 * kUnits; ++i) {
      const uint16_t scale = static_cast<uint16_t>(values() ? of_values[i] : of_keys[i]);
      scales_[32 * i + lane_] = __float2half_rn(__half2float(__ushort_as_half(scale)) * factor);
    }
    if (!values() && lane_ == 0) *to = info;
    __syncwarp();
  }

  const Attention& a_;
  const Plan& plan_;
  Notes& notes_;
  const int warp_;
  uint8_t* const raw_;    // codes of the warp's tile, [kUnits, raw_stride]
  __half* const scales_;  // [kKeys]
  uint32_t phase_ = 0;    // of the barrier of these codes
};

// A warpgroup that multiplies, or expands.
template <class S, typename T>
class ChunkConsumer : Consumer<S, T> {
  using Base = Consumer<S, T>;

 public:
  __device__ __forceinline__ ChunkConsumer(const Attention& a, const Plan& plan, uint8_t* shared)
      : Base(a, plan, shared), counters_(plan.chunks.counters), expander_(a, plan, shared, this->notes_),
        tasks_(*reinterpret_cast<ChunkNotes*>(shared + plan.raw)) {}

  __device__ __forceinline__ void run() { for_each_task(tasks_, *this); }
  // Inlined: products of warpgroups in a function of their own would wait for each other.
  __device__ __forceinline__ void operator()(const Task& task) {
    if (task.expands) {
      expand(task);
    } else {
      attend(task);
    }
  }

 private:
  __device__ __forceinline__ bool first_thread() const { return threadIdx.x == S::kProducers; }
  static __device__ __forceinline__ void meet() { sync_threads(kConsumersBarrier, S::kConsumers); }

  __device__ __forceinline__ void expand(const Task& task) {
    if (task.uses > 0) {
      if (first_thread()) wait_for_count(counters_.uses + task.slot, task.uses);
      meet();
    }
    expander_.run(task);
    __syncwarp();
    if (this->lane_ == 0) arrive(&tasks_.expanded[tasks_.slot_of(task)]);
    publish_global_memory();
    __threadfence();
    meet();
    if (first_thread()) atomicAdd(counters_.expanded + task.slot, 1);
  }

  __device__ __forceinline__ void attend(const Task& task) {
    this->item_ = &task;
    const bool works = task.begin < task.end;
    this->find_positions();
    if (works) {
      typename Base::QueryWords words;
      if (task.turn == 0) {
        this->rotate_queries(words);
        this->begin_rows();
        if (task.turns > 1) save_queries(words);
      } else {
        if (first_thread()) wait_for_count(counters_.turns + task.state, task.turn);
        meet();
        load_state();
        load_queries(words);
      }
      this->see_codes();
      this->lay_out([&](int i, int j) { return words[i][j]; });
      this->template pass<false>(task.begin, task.end);
      if (task.finishes) {
        this->leave_rotation();
      } else {
        save_state();
        __threadfence();
      }
    } else {
      this->begin_rows();
    }
    if (task.finishes) {
      this->exponent_ = 0;
      if (task.exact_tiles > 0) {
        this->prepare_exact();
        this->template pass<true>(0, task.exact_tiles);
      }
      this->finish();
    }
    meet();
    if (first_thread()) leave(task, works);
  }

  // What has been found about these rows so far. Every thread has its own part.
  __device__ __forceinline__ float* state() const {
    const int number = static_cast<const Task*>(this->item_)->state;
    return this->plan_.states + int64_t{number} * S::kStateFloats + (threadIdx.x - S::kProducers);
  }
  __device__ __forceinline__ void load_state() {
    const float* from = state();
#pragma unroll
    for (int i = 0; i < 2; ++i, from += 2 * kStateThreads) {
      this->reference_[i] = __ldcg(from), this->total_[i] = __ldcg(from + kStateThreads);
    }
#pragma unroll
    for (int i = 0; i < S::kSums; ++i, from += kStateThreads) this->sums_[i] = __ldcg(from);
    this->exponent_ = static_cast<int>(__ldcg(from));
  }
  __device__ __forceinline__ void save_state() const {
    float* to = state();
#pragma unroll
    for (int i = 0; i < 2; ++i, to += 2 * kStateThreads) {
      __stcg(to, this->reference_[i]), __stcg(to + kStateThreads, this->total_[i]);
    }
#pragma unroll
    for (int i = 0; i < S::kSums; ++i, to += kStateThreads) __stcg(to, this->sums_[i]);
    __stcg(to, static_cast<float>(this->exponent_));
  }

  // Rotated queries, behind the rest of the state: to rotate them again for each stretch takes longer.
  __device__ __forceinline__ float* query_state() const { return state() + (5 + S::kSums) * kStateThreads; }
  __device__ __forceinline__ void save_queries(const typename Base::QueryWords& words) const {
    float* to = query_state();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      __stcg(to, this->factor_[i]), __stcg(to + kStateThreads, this->shift_[i]), to += 2 * kStateThreads;
#pragma unroll
      for (int j = 0; j < S::kDim / 8; ++j, to += kStateThreads) __stcg(to, __uint_as_float(words[i][j]));
    }
  }
  __device__ __forceinline__ void load_queries(typename Base::QueryWords& words) {
    const float* from = query_state();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      this->factor_[i] = __ldcg(from), this->shift_[i] = __ldcg(from + kStateThreads), from += 2 * kStateThreads;
#pragma unroll
      for (int j = 0; j < S::kDim / 8; ++j, from += kStateThreads) words[i][j] = __float_as_uint(__ldcg(from));
    }
  }

  // Tells others what this block is done with. Whoever comes last to anything sets its counters back.
  __device__ __forceinline__ void leave(const Task& task, bool works) const {
    if (works) {
      set_count(counters_.turns + task.state, task.turn + 1 == task.turns ? 0 : task.turn + 1);
    } else {
      // Rows that see no key of the filling have not waited for it. Others may still attend to what was in the slot
      // before, and this arrival would count as one of theirs.
      wait_for_count(counters_.expanded + task.slot, task.expand_target);
    }
    if (!count_arrival(counters_.left + task.slot, task.blocks)) return;
    if (task.last_use) counters_.expanded[task.slot] = 0;
    set_count(counters_.uses + task.slot, task.last_use ? 0 : task.uses + 1);
  }

  const ChunkCounters counters_;
  TileExpander<S> expander_;
  ChunkNotes& tasks_;
};

template <class S, typename T>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks)
    chunks_kernel(const __grid_constant__ Attention a, const __grid_constant__ Plan plan,
                  const __grid_constant__ OwnMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  static_assert(S::kProducers == kWarpgroup);
  extern __shared__ __align__(1024) uint8_t shared[];
  Notes& notes = *reinterpret_cast<Notes*>(shared + plan.notes);
  ChunkNotes& tasks = *reinterpret_cast<ChunkNotes*>(shared + plan.raw);
  plan.overlap.enter();
  plan.overlap.wait();
  if (threadIdx.x < 32) {
    const bool any = any_long(a, plan);
    if (blockIdx.x == 0) number_states(a, plan, any), __threadfence();
    if (threadIdx.x == 0) tasks.any = any;
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < kMaxTileStages; ++i) {
      init_barrier(&notes.key_full[i], 1), init_barrier(&notes.value_full[i], 1);
      init_barrier(&notes.key_empty[i], 4 * S::kGroups), init_barrier(&notes.value_empty[i], 4 * S::kGroups);
    }
    for (int i = 0; i < kMaxRawStages; ++i) init_barrier(&notes.raw_full[i], 1);
    for (int i = 0; i < kItems; ++i) {
      init_barrier(&tasks.task_full[i], 1), init_barrier(&tasks.task_empty[i], 2 + 4 * S::kGroups);
      init_barrier(&tasks.expanded[i], 4 * S::kGroups);
    }
    init_barrier(&tasks.copied, 1);
    for (uint32_t& word : notes.broken) word = 0;
    barriers_ready();
  }
  if (threadIdx.x < 16) {
    notes.key_table[threadIdx.x] = nibble_table_byte(a.key_levels, a.record.key_width(), threadIdx.x);
    notes.value_table[threadIdx.x] = nibble_table_byte(a.value_levels, a.record.value_width(), threadIdx.x);
  }
  copy_signs<S>(a, plan, shared);
  __syncthreads();
  plan.overlap.let_next();  // which reads the numbers of states
  if (!tasks.any) return plan.overlap.leave();
  if (threadIdx.x < S::kProducers) {
    leave_registers<S::kProducerRegisters>();
    switch (threadIdx.x / 32) {
      case 0: return hand_out_tasks<S>(a, plan, tasks);
      case 1: return copy_tasks<S, false>(a, plan, maps.keys, notes, tasks, shared);
      case 2: return copy_tasks<S, true>(a, plan, maps.values, notes, tasks, shared);
      default: return;
    }
  } else {
    take_registers<S::kConsumerRegisters>();
    ChunkConsumer<S, T>(a, plan, shared).run();
  }
  plan.overlap.leave();
#endif
}

}  // namespace turboquant::cuda::row_tiles
