// The launch of the split-KV kernel: which instance, and how its shared memory is divided.
#include "cuda/attention/split_kv.cuh"

#include <algorithm>
#include <bit>

#include "choices/attention.h"
#include "cuda/attention/head_dims.cuh"
#include "cuda/common/torch.cuh"

namespace turboquant::cuda::split_kv {
namespace {

// ---- The instance --------------------------------------------------------------------------------------------------

// Rows of a KV head in the sequences that the kernel takes.
int rows_of(const Attention& a) { return std::min(a.max_q_len, a.most_queries) * a.group; }

KernelEntry find_kernel_of(const Attention& a, int pair) {
  return with_head_dim<kSplitKvHeadDims>(a.record.head_dim, [&](auto d) { return find_kernel<d>(pair, rows_of(a)); });
}

// ---- Shared memory -------------------------------------------------------------------------------------------------

// As many warps as fit, up to `most_warps`, then as many stages, then room for the states of all warps instead of half
// of them. warps = 0: not even one warp fits.
SplitKvPlan plan_of(const KernelEntry& k, int most_warps, int blocks_per_multiprocessor, const StageLayout& layout,
                    const DeviceFacts& device, int d) {
  constexpr int kMostStages = 8, kFloat = sizeof(float);
  const int limit = std::min(device.shared_per_block,
                             device.shared_per_multiprocessor / blocks_per_multiprocessor - kReservedSharedBytes);
  SplitKvPlan best{};
  for (int warps = most_warps; warps >= 1 && best.warps == 0; --warps) {
    for (const int states : {warps, (warps + 1) / 2}) {
      // The same memory serves, one after the other, for the states of warps (Join::warps), for partial results of
      // groups of threads (Join::blocks) and for a row of the exact tail's output of each warp (ExactTail).
      const int part_rows = std::max(128 * warps / d, k.rows);
      const int join =
          round_up(kFloat * std::max({states * k.state_floats, part_rows * part_floats(d), warps * d}), 16);
      const int result = kFloat * k.rows * part_floats(d);
      const int rows = round_up(k.rows * static_cast<int>(sizeof(QueryRow)) + 8, 16);
      const int notes = (warps + 1) * static_cast<int>(sizeof(WarpNotes));
      const int raw = k.rows * layout.exact_bytes / 2, signs = 2 * kFloat * d + 2 * kMaxLevels;
      const int fixed = k.operand_bytes + raw + signs + join + result + rows + notes;
      const int stages = std::min((limit - fixed) / (warps * layout.stride), kMostStages) / kUnitStages * kUnitStages;
      if (stages < kUnitStages || stages <= best.stages) continue;
      best.warps = warps, best.states = states, best.stages = stages, best.pipeline_bytes = stages * layout.stride;
      best.operands = warps * best.pipeline_bytes;
      best.raw = best.operands + k.operand_bytes;
      best.signs = best.raw + raw;
      best.join = best.signs + signs;
      best.result = best.join + join;
      best.rows = best.result + result;
      best.notes = best.rows + rows;
      best.bytes = best.notes + notes;
    }
  }
  return best;
}

// Up to how many sequences a launch guesses its work. A lane reads the lengths of one or two; with more of them,
// reading all lengths twice costs more than the early start gains. Where levels are looked up, instructions are scarce,
// and a batch of more than 32 sequences takes longer if its blocks begin together.
int most_guessed(const Attention& a) { return a.key_levels || a.value_levels ? 32 : 64; }

int64_t blocks_of_rows(const Attention& a, int rows) { return (rows_of(a) + rows - 1) / rows; }

// ---- Few units of keys ---------------------------------------------------------------------------------------------

uint32_t reciprocal(int n) { return static_cast<uint32_t>(((1 << 24) + n - 1) / n); }

// How a block attends to few units of keys (split_kv/few_units.cuh), and up to how many tokens. They are as many as
// have room in the pipelines of the blocks of `grid`, which are filled once.
FewUnitsPlan few_units_of(const Attention& a, const DeviceFacts& device, const KernelEntry& k, const SplitKvPlan& plan,
                          const StageLayout& layout, int grid) {
  FewUnitsPlan few{};
  const int64_t segments = int64_t{a.seqs} * a.kv_heads;
  if (device.major != kFewUnitsMajor || !takes_few_units(a.record.head_dim) || a.dtype == Dtype::kFloat32) return few;
  if (segments > grid || blocks_of_rows(a, k.rows) > 1) return few;
  few.team_shift = std::countr_zero(static_cast<unsigned>(k.rows / 4 / few_row_groups(k.rows / 4)));
  const int state = k.rows * few_row_floats(a.record.head_dim) * static_cast<int>(sizeof(float));
  few.slots = std::min(plan.warps >> few.team_shift, (plan.rows - plan.join) / state);
  if (few.slots == 0) return few;
  few.stages = std::min(plan.warps * plan.stages / few.slots, 32 / layout.copies);
  few.parts = grid / static_cast<int>(segments);
  few.shares = std::min(std::max(plan.warps / k.rows, 1), few.slots);
  few.segments_reciprocal = reciprocal(static_cast<int>(segments)), few.heads_reciprocal = reciprocal(a.kv_heads);
  few.slots_reciprocal = reciprocal(few.slots);
  // A warp may have two rounds of exact keys.
  const int64_t exact = int64_t{a.tail ? a.sink_tokens + a.recent_window : 0} + a.max_q_len;
  const int64_t slots = int64_t{few.slots} * few.parts, tokens = few.stages * slots / kUnitStages * kUnitTokens;
  if (exact > 2 * 16 * slots) return few;
  const bool always = a.sliding_window > 0 && int64_t{a.sliding_window} + a.max_q_len + kUnitTokens <= tokens;
  few.tokens = always ? INT32_MAX : static_cast<int>(tokens);
  return few;
}

}  // namespace

void check_limits(const Attention& a, const StageLayout& layout, int64_t blocks_of_rows) {
  const int64_t tokens = int64_t{a.max_pages} * a.record.page_size;
  const int64_t exact = int64_t{a.sink_tokens} + a.ring +
                        std::max(kSplitKvCosts.least_exact, kKeyTilesCosts.least_exact) +
                        (a.new_keys ? a.max_q_len : 0);
  const int64_t units = tokens / kUnitTokens + 1 + exact + std::max(kSplitKvCosts.end, kKeyTilesCosts.end);
  // in floating point, where the product cannot overflow
  STD_TORCH_CHECK(1.0 * units * blocks_of_rows * a.kv_heads * a.seqs <= INT32_MAX, "paged_attention: ", a.seqs,
                  " sequences of up to ", tokens, " tokens are more work than one call can count");
  STD_TORCH_CHECK(a.num_pages * a.page_stride <= int64_t{UINT32_MAX} * layout.grain, "paged_attention: ", a.num_pages,
                  " pages of ", a.page_stride,
                  " bytes are more than one call can address: ", int64_t{UINT32_MAX} * layout.grain,
                  " bytes, less where pages do not start at multiples of 64 bytes");
}

// ---- The launch ----------------------------------------------------------------------------------------------------

SplitKvLaunch::SplitKvLaunch(const Attention& call, const Device& device, int pair)
    : call_(call), device_(device), entry_(find_kernel_of(call, pair)),
      layout_(call.record, call.page_stride, element_size(call.dtype)) {
  choose_shape();
  check_limits(call_, layout_, blocks_of_rows(call_, entry_.rows));
  plan_.codes = entry_.codes;
  plan_.grid = Divisor(grid_);
  plan_.group_reciprocal = (65536 + call.group - 1) / call.group;
  if (device.facts.major >= 9 && call.seqs <= most_guessed(call)) plan_.early = Early::kGuess;
  plan_.few = few_units_of(call, device.facts, entry_, plan_, layout_, grid_);
}

// Few segments get blocks of eight warps, so that fewer partial results have to be joined. Many segments get blocks of
// four warps: while one of them is at the end of a segment, the others of its multiprocessor use the time.
void SplitKvLaunch::choose_shape() {
  const DeviceFacts& facts = device_.facts;
  const auto shape = [&](int warps, int per_multiprocessor) {
    plan_ = plan_of(entry_, warps, per_multiprocessor, layout_, facts, call_.record.head_dim);
    grid_ = std::min(kMaxGrid, per_multiprocessor * facts.multiprocessors);
  };
  if (int64_t{call_.seqs} * call_.kv_heads * blocks_of_rows(call_, entry_.rows) > facts.multiprocessors) {
    shape(kMaxWarps / 2, entry_.small_blocks);
    if (plan_.warps == kMaxWarps / 2) return;
  }
  shape(kMaxWarps, entry_.blocks);
  STD_TORCH_CHECK(plan_.warps > 0, "paged_attention: a record of ", layout_.bytes,
                  " bytes for 32 tokens does not fit into the ", facts.shared_per_block,
                  " bytes of shared memory that a block can have");
}

void SplitKvLaunch::run(void* workspace, uint32_t* counters, cudaStream_t stream, Before before, Overlap overlap) {
  plan_.parts = static_cast<float*>(workspace), plan_.arrivals = counters, plan_.overlap = overlap;
  if (overlap.with_previous) plan_.early = Early::kWait;
  if (before == Before::kOwnStore) plan_.early = Early::kBesideStore;
  allow_shared_memory(kernel(), device_.index, plan_.bytes);
  void* arguments[] = {const_cast<Attention*>(&call_), &layout_, &plan_};
  check_cuda(launch_early(kernel(), grid_, plan_.warps * 32, plan_.bytes, arguments, stream, device_.facts.major),
             "paged_attention");
}

}  // namespace turboquant::cuda::split_kv
