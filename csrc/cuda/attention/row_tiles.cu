// The launch of the row-tile kernel and, before it, of the kernels that gather older tokens, of prompts and of chunks:
// which instances, and how their memory is divided.
#include "cuda/attention/row_tiles.cuh"

#include <algorithm>
#include <bit>

#include "cuda/attention/head_dims.cuh"
#include "cuda/attention/row_tiles/chunk_counters.cuh"
#include "cuda/attention/row_tiles/expansion.cuh"
#include "cuda/codec/bulk.cuh"
#include "cuda/common/box_maps.cuh"
#include "cuda/common/torch.cuh"

namespace turboquant::cuda::row_tiles {
namespace {

// Prompts of up to so many queries are attended to in tiles of 64 rows. Two blocks then share a multiprocessor, and one
// computes while the other begins or ends an item, which takes as long as two or three tiles of 128 keys. Longer
// prompts gain more from tiles of 128 rows, which read keys half as often.
constexpr int kShortQueries = 2048;
// Prompts of at most so many queries, whatever their group, are not worth a launch: decode steps and drafts are not.
constexpr int kFewQueries = 32;

// A sequence is long only with so many rows, 8 tiles of them: with fewer, expanding codes once saves little. Many calls
// have none, so what the host knows must leave room for enough tiles of rows to fill three quarters of the device.
constexpr int kLeastLongRows = 1024;
// With so many rows, a sequence is long with any number of older tokens, if the call's own tokens are read as they are:
// the kernel of chunks attends to these faster than row tiles do. Where no sequence can have many codes, calls have
// twice as many rows before a kernel is launched that may find nothing to do.
constexpr int kManyRows = 8192;
// Memory for expanded codes, whatever the context: what 16,384 keys of eight KV heads of 128 channels take, and about
// what an L2 cache holds.
constexpr int64_t kRingBytes = int64_t{64} << 20;

// Memory for older tokens that are gathered: 24,576 of eight KV heads of 128 channels.
constexpr int64_t kGatheredBytes = int64_t{96} << 20;
constexpr int kLeastMemory = 1024;  // tokens: some are for rows of zeros
// A sequence is gathered if it has more than one tile of rows, and for each of them and of its rows few older tokens:
// to decode a token once must be less work than to expand it for each tile. Where rows read all from codes, row tiles
// have less to do; and where blocks have few tiles, it counts that long ones are not cut into parts.
constexpr int kLeastGatheredRows = 65, kMostOlder = 8192;
constexpr float kOlderOfRow = 4, kCodesOfRow = 1.5;
constexpr double kManyItems = 2;  // for each block
// A block must have so many tiles of rows on average, as far as the host knows, and one more for so many sequences, all
// of whose lengths the kernel reads. With fewer, the launch takes longer than it saves where nothing is older.
constexpr double kLeastItems = 0.9, kSequencesOfItem = 128;

// Calls whose sequences have at most so many keys, and up to 192 rows, have tiles of 64 rows: three of them are less
// work than two of 128, and where two blocks share a multiprocessor, one computes while the other begins or ends an
// item. Behind more keys than these it counts more that codes are expanded for each tile.
constexpr int kFewKeys = 2048;
bool fits_three_tiles(const Attention& a) {
  const int64_t rows = int64_t{a.max_q_len} * a.group;
  return rows > 128 && rows <= 192 && a.room <= kFewKeys && row_tiles_channels(a.record.head_dim) <= 128;
}

// How the kernel expands codes that choose_attention lets through.
ExpansionKind kind_of(format::Width width, bool table) {
  switch (width) {
    case format::Width::k1: break;
    case format::Width::k2: return ExpansionKind::kPairs;
    case format::Width::k3: return ExpansionKind::kSpread;
    case format::Width::k4: return table ? ExpansionKind::kLevels : ExpansionKind::kNibbles;
    case format::Width::k5: return ExpansionKind::kPlanes;
    case format::Width::k8: break;
  }
  return ExpansionKind::kBytes;
}

// The instance of a head_dim.
template <typename F>
KernelEntry with_channels(int head_dim, F&& f) {
  return with_head_dim<kRowTilesChannels>(row_tiles_channels(head_dim), f);
}

}  // namespace

RowTilesLaunch::RowTilesLaunch(const Attention& call, const Device& device, int least_queries)
    : call_(call), device_(device) {
  const bool many = int64_t{call.max_q_len} * call.group > 64;
  if (!many || fits_three_tiles(call) || !choose_shape(2)) choose_shape(1);
  if (many && call.max_q_len > kFewQueries) choose_prompts();
  if (many) choose_chunks();
  if (prompts_.grid > 0) choose_gather();
  if (!call.new_keys && !gathers()) prompts_.grid = 0;  // there are no prompts then
  check_limits();
  tiles_.plan.clears = least_queries == 0;
  for (Plan* plan : {&tiles_.plan, &prompts_.plan, &chunks_.plan}) {
    plan->layout = RecordLayout(call.record);
    plan->split = format::split_dim(call.record.head_dim);
    plan->norm = block_norm(plan->split);
    plan->key_kind = kind_of(call.record.key_width(), call.key_levels);
    plan->value_kind = kind_of(call.record.value_width(), call.value_levels);
    plan->least_rows = least_queries * call.group;
    plan->prompts_apart = prompts_.grid > 0;
    plan->group = Divisor(call.group);
  }
}

// Tiles of 64 or 128 rows; false: not even the fewest stages fit. Many stages of tiles are worth less than a ring of
// raw stages in which copies can run ahead, and two blocks of a multiprocessor are worth more than both.
bool RowTilesLaunch::choose_shape(int groups) {
  const DeviceFacts& facts = device_.facts;
  auto& [entry, plan, maps, grid] = tiles_;
  entry = with_channels(call_.record.head_dim, [&](auto d) { return find_kernel<d>(groups, call_.dtype); });
  plan.raw_stride = raw_stride(call_.record);
  const auto fits = [&](int blocks, int ahead) {
    const int per_block = facts.shared_per_multiprocessor / blocks - kReservedSharedBytes;
    constexpr int kStages[][2] = {{4, 4}, {2, 3}, {2, 2}};  // of keys and of values
    for (const auto& [keys, values] : kStages) {
      // A barrier knows one phase from the next, but not from the one after that, so no warp may be a turn of the ring
      // behind another.
      if (keys < entry.stream_warps) continue;
      plan.key_stages = keys, plan.value_stages = values, grid = blocks * facts.multiprocessors;
      if (entry.lay_out(plan, std::min(facts.shared_per_block, per_block)) &&
          plan.raw_stages >= entry.stream_warps + ahead) {
        return true;
      }
    }
    return false;
  };
  return fits(entry.blocks, 3) || fits(entry.blocks, 1) || fits(1, 1) || fits(1, 0);
}

// Boxes of exact keys or values of so many tokens, each of a tile's; false: there cannot be any (map_boxes).
bool RowTilesLaunch::map_tiles(const void* data, int64_t tokens, int64_t token_stride, int64_t head_stride, int keys,
                               CUtensorMap& to) const {
  const Attention& a = call_;
  return map_boxes(data, a.dtype, {a.record.head_dim, a.kv_heads, tokens}, {head_stride, token_stride}, {64, 1, keys},
                   to);
}
bool RowTilesLaunch::map_own_tokens(Kernel& kernel) const {
  const Attention& a = call_;
  const int keys = kernel.entry.keys;
  return map_tiles(a.new_keys, a.tokens, a.new_key_token_stride, a.new_key_head_stride, keys, kernel.maps.keys) &&
         map_tiles(a.new_values, a.tokens, a.new_value_token_stride, a.new_value_head_stride, keys, kernel.maps.values);
}

// The kernel of prompts. It does not cut tiles of rows into parts, so row tiles are faster where there are few of them,
// and long ones. Without boxes, row tiles take all.
void RowTilesLaunch::choose_prompts() {
  const Attention& a = call_;
  auto& [entry, plan, maps, grid] = prompts_;
  const int groups = a.max_q_len <= kShortQueries ? 1 : 2;
  entry = with_channels(a.record.head_dim, [&](auto d) { return find_prompts_kernel<d>(groups, a.dtype, false); });
  const int64_t items = int64_t{a.tokens} * a.group / entry.rows * a.kv_heads;
  if (a.max_q_len > kShortQueries && items < device_.facts.multiprocessors) return;
  if (a.new_keys && !map_own_tokens(prompts_)) return;
  for (const int stages : {3, 2}) {
    plan.key_stages = plan.value_stages = stages;
    const int per_block = device_.facts.shared_per_multiprocessor / entry.blocks - kReservedSharedBytes;
    if (!entry.lay_out(plan, std::min(device_.facts.shared_per_block, per_block))) continue;
    grid = entry.blocks * device_.facts.multiprocessors;
    return;
  }
}

// The kernel of chunks, where the host cannot rule out that there are long sequences with enough tiles of rows.
void RowTilesLaunch::choose_chunks() {
  const Attention& a = call_;
  auto& [entry, plan, maps, grid] = chunks_;
  entry = with_channels(a.record.head_dim, [&](auto d) { return find_chunks_kernel<d>(a.dtype); });
  const int64_t rows = int64_t{a.tokens} * a.group;
  ChunksPlan chunks{};
  chunks.least_rows = static_cast<int>(std::max(int64_t{kLeastLongRows}, (rows + kMaxLong - 1) / kMaxLong));
  chunks.least_tiles = device_.facts.multiprocessors * 3 / 4;
  const int64_t most_long = std::min(int64_t{a.seqs}, rows / chunks.least_rows);
  const int64_t states = (rows / kLongRows + most_long) * a.kv_heads;
  chunks.many_rows = a.new_keys ? kManyRows : INT32_MAX;
  const int64_t most_rows = int64_t{a.max_q_len} * a.group;
  const bool few_codes = a.new_keys && most_rows >= 2 * int64_t{kManyRows};  // are enough to be long
  const bool some = most_rows >= chunks.least_rows && (a.room >= kLeastCodes || few_codes);
  if (!some || states < chunks.least_tiles || (a.new_keys && !map_own_tokens(chunks_))) return;
  plan.raw_stride = raw_stride(a.record);
  for (const int stages : {3, 2}) {
    plan.key_stages = plan.value_stages = stages;
    if (!entry.lay_out(plan, device_.facts.shared_per_block)) continue;
    grid = device_.facts.multiprocessors;
    states_ = chunks.most_states = static_cast<int>(states);
    chunks.ring_tiles = static_cast<int>(kRingBytes / (2 * entry.bytes));
    plan.chunks = chunks;
    return;
  }
}

// The kernel that gathers older tokens, where there are likely to be some.
void RowTilesLaunch::choose_gather() {
  const Attention& a = call_;
  const int d = a.record.head_dim;
  // A table with no page more than the longest prompt needs probably holds prompts without older tokens.
  if (a.room < a.max_q_len + (a.new_keys ? a.record.page_size : 0)) return;
  if (a.tail && !a.new_keys) return;  // the tail has copies of all of the call's tokens then, for every tile of rows
  const double rows = static_cast<double>(a.tokens - a.seqs) * a.group;
  const double items = rows / prompts_.entry.rows * a.kv_heads / prompts_.grid;
  if (items < kLeastItems + a.seqs / kSequencesOfItem) return;
  const int64_t most = kGatheredBytes / (int64_t{4} * a.kv_heads * d) & -16;
  if (most < kLeastMemory) return;
  gather_ = find_gather_kernel(d, a.dtype);
  if (!gather_.kernel) return;
  const int64_t of_sequence = int64_t{a.room} + 48 + (a.tail ? a.sink_tokens + a.recent_window : 0);
  GatherPlan& plan = prompts_.plan.gather;
  plan.rows = static_cast<int>(std::min(most, (a.seqs * of_sequence + 143) & -16));
  plan.least_rows = kLeastGatheredRows, plan.most_tokens = kMostOlder;
  plan.tokens_of_row = (a.new_keys ? kOlderOfRow : kCodesOfRow) * static_cast<float>(std::min(items / kManyItems, 1.0));
  // Without own tokens both launches are for gathered sequences only, so they are left out unless all can be gathered.
  const bool all = a.room <= plan.tokens_of_row * a.max_q_len * a.group && a.seqs * of_sequence <= most;
  if (!a.new_keys && !all) {
    gather_ = {}, plan = {};
    return;
  }
  const int groups = prompts_.entry.rows / 64;
  const KernelEntry with_older =
      with_channels(d, [&](auto channels) { return find_prompts_kernel<channels>(groups, a.dtype, true); });
  prompts_.entry.kernel = with_older.kernel;  // of the same shape
}
int64_t RowTilesLaunch::gathered_bytes() const {
  return int64_t{prompts_.plan.gather.rows} * call_.kv_heads * call_.record.head_dim * 2;
}

int64_t RowTilesLaunch::ring_bytes() const {
  return chunks_.plan.chunks.ring_tiles * (int64_t{2} * chunks_.entry.bytes + static_cast<int64_t>(sizeof(TileInfo)));
}
int RowTilesLaunch::num_counters() const {
  // Rounded up, so that calls of many sizes need few sets of counters
  const int turns = static_cast<int>(std::bit_ceil(static_cast<uint32_t>(states_)));
  return 2 * tiles_.grid + 1 + (prompts_.grid > 0) + (chunks_.grid > 0 ? ChunkCounters::kFixed + turns : 0);
}

// The kernel counts tiles of keys, of all tiles of rows, in 32 bits. What the host knows about them: no sequence is
// longer than block_table is wide, and all have the call's tokens together.
void RowTilesLaunch::check_limits() const {
  const Attention& a = call_;
  const int64_t tokens = int64_t{a.max_pages} * a.record.page_size + (a.new_keys ? a.max_q_len : 0);
  const int64_t tiles = tokens / kUnitKeys + 3;  // one more of codes, and of sinks and recent tokens
  const double blocks = 1.0 * a.tokens * a.group / tiles_.entry.rows + a.seqs;
  STD_TORCH_CHECK(tiles * blocks * a.kv_heads <= INT32_MAX, "paged_attention: ", a.seqs, " sequences of up to ", tokens,
                  " tokens are more work than one call can count");
}

void RowTilesLaunch::run(void* workspace, uint32_t* counters, cudaStream_t stream, bool beside) {
  uint8_t* const memory = static_cast<uint8_t*>(workspace);
  tiles_.plan.parts = reinterpret_cast<float*>(memory + shared_bytes());
  float* const states = tiles_.plan.parts + part_floats();
  int* const first_states = reinterpret_cast<int*>(states + state_floats());
  int* const first_rows = first_states + call_.seqs;
  uint16_t* const absent = reinterpret_cast<uint16_t*>(first_rows + call_.seqs);
  tiles_.plan.counters = counters;
  prompts_.plan.counters = tiles_.plan.counters + 2 * tiles_.grid + 1;
  chunks_.plan.chunks.ring = memory;
  chunks_.plan.chunks.counters = prompts_.plan.counters + (prompts_.grid > 0);
  bool gathered = false;
  if (gathers() && map_gathered(memory)) {  // else row tiles take all, as without boxes of own tokens
    prompts_.plan.gather.first_rows = first_rows, prompts_.plan.gather.absent = absent;
    tiles_.plan.gather = prompts_.plan.gather;
    gather(memory, stream, beside);
    beside = gathered = true;
  }
  if (prompts_.grid > 0) {
    // The kernel of prompts waits for tokens that are gathered, if there may be any (GatheredRows). That of chunks
    // expands codes in the same memory, and so waits for the kernel of prompts.
    prompts_.plan.overlap = {.with_previous = beside, .with_next = !gathered || chunks_.grid == 0};
    launch(prompts_, stream);
    beside = prompts_.plan.overlap.with_next;
  }
  if (chunks_.grid > 0) {
    chunks_.plan.overlap = {.with_previous = beside, .with_next = true};
    beside = true;
    chunks_.plan.states = states;
    chunks_.plan.first_states = tiles_.plan.first_states = first_states;
    launch(chunks_, stream);
  }
  tiles_.plan.overlap = {.with_previous = beside, .with_next = false};
  launch(tiles_, stream);
}

bool RowTilesLaunch::map_gathered(const uint8_t* data) {
  const int64_t d = call_.record.head_dim, of_token = call_.kv_heads * d;
  const auto map = [&](const uint8_t* from, CUtensorMap& to) {
    return map_tiles(from, prompts_.plan.gather.rows, of_token, d, prompts_.entry.keys, to);
  };
  return map(data, prompts_.maps.older_keys) && map(data + gathered_bytes(), prompts_.maps.older_values);
}

void RowTilesLaunch::gather(uint8_t* to, cudaStream_t stream, bool beside) {
  const Attention& a = call_;
  DecodeArguments codes{};
  codes.source[0] = {a.record.key_width(), a.key_levels, a.key_signs, {nullptr, nullptr, a.channels.inverse}, to};
  codes.source[1] = {a.record.value_width(), a.value_levels, a.value_signs, {}, to + gathered_bytes()};
  codes.sources = 2, codes.heads = a.kv_heads, codes.dtype = a.dtype;
  codes.pages = {const_cast<uint8_t*>(a.pages), a.num_pages, static_cast<uint32_t>(a.page_stride), a.kv_heads};
  codes.layout = prompts_.plan.layout;
  codes.table = a.block_table, codes.table_stride = a.table_stride, codes.max_pages = a.max_pages;
  Plan plan = prompts_.plan;
  plan.overlap = {.with_previous = beside, .with_next = true};
  if (chunks_.grid > 0) plan.chunks = chunks_.plan.chunks;  // which sequences are long
  void* arguments[] = {const_cast<Attention*>(&call_), &plan, &codes};
  const int blocks = gather_.blocks * device_.facts.multiprocessors;
  check_cuda(launch_early(gather_.kernel, blocks, gather_.threads, 0, arguments, stream, device_.facts.major),
             "paged_attention");
}

void RowTilesLaunch::launch(Kernel& kernel, cudaStream_t stream) {
  auto& [entry, plan, maps, grid] = kernel;
  allow_shared_memory(entry.kernel, device_.index, plan.bytes);
  void* arguments[] = {const_cast<Attention*>(&call_), &plan, &maps};  // row tiles take two of them
  check_cuda(launch_early(entry.kernel, grid, entry.threads, plan.bytes, arguments, stream, device_.facts.major),
             "paged_attention");
}

}  // namespace turboquant::cuda::row_tiles
