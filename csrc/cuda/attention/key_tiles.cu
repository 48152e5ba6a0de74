// The launch of the key-tile kernel: which instance, and how its shared memory is divided.
#include "cuda/attention/key_tiles.cuh"

#include <algorithm>
#include <utility>

#include "choices/attention.h"
#include "cuda/attention/head_dims.cuh"
#include "cuda/attention/key_tiles/exact.cuh"
#include "cuda/attention/key_tiles/expansion.cuh"
#include "cuda/attention/key_tiles/join.cuh"
#include "cuda/attention/split_kv.cuh"
#include "cuda/common/torch.cuh"

namespace turboquant::cuda::key_tiles {
namespace {

constexpr bool takes_all_pairs() {
  for (const CodesOfPair& pair : kSplitKvPairs) {
    if (index_of_codes<kKeyCodes>(pair.keys) < 0 || index_of_codes<kValueCodes>(pair.values) < 0) return false;
  }
  return true;
}
static_assert(takes_all_pairs(), "choose_attention lets key tiles have all pairs of split-KV");

// The kernel that is compiled for keys of these codes and takes so many rows.
template <int D>
KernelEntry kernel_of_keys(const format::Codes& codes, int rows) {
  KernelEntry found{};
  const auto try_all = [&]<int... KEYS>(std::integer_sequence<int, KEYS...>) {
    ((codes == kKeyCodes[KEYS] ? void(found = find_kernel<D, KEYS>(rows)) : void()), ...);
  };
  try_all(std::make_integer_sequence<int, std::size(kKeyCodes)>{});
  return found;
}
KernelEntry kernel_of(const Attention& call, const CodesOfPair& pair) {
  const int rows = std::min(call.max_q_len, call.tokens) * call.group;
  return with_head_dim<kKeyTilesHeadDims>(call.record.head_dim,
                                          [&](auto d) { return kernel_of_keys<d>(pair.keys, rows); });
}

}  // namespace

KeyTilesLaunch::KeyTilesLaunch(const Attention& call, const Device& device, int pair, int least_queries)
    : call_(call), device_(device), entry_(kernel_of(call, kSplitKvPairs[pair])),
      layout_(call.record, call.page_stride, element_size(call.dtype)) {
  call_.most_queries = call.max_q_len, call_.least_queries = least_queries;
  const DeviceFacts& facts = device.facts;
  grid_ = std::min(split_kv::kMaxGrid, entry_.blocks * facts.multiprocessors);
  lay_out(std::min(facts.shared_per_block, facts.shared_per_multiprocessor / entry_.blocks - kReservedSharedBytes));
  plan_.group_reciprocal = (65536 + call.group - 1) / call.group;
  plan_.clears = least_queries == 0, plan_.grid = Divisor(grid_);
  plan_.values = index_of_codes<kValueCodes>(kSplitKvPairs[pair].values);
  plan_.order = entry_.order, plan_.key_step = entry_.key_step, plan_.key_offset = entry_.key_offset;
  split_kv::check_limits(call_, layout_, 1);
}

void KeyTilesLaunch::lay_out(int shared_limit) {
  const auto up = [](int n) { return round_up(n, 128); };
  const int d = call_.record.head_dim, rows = entry_.rows, part_bytes = rows * split_kv::part_floats(d) * 4;
  Plan& p = plan_;
  p.warps = kThreads / 32, p.copies = 2 * layout_.copies, p.unit_bytes = 2 * layout_.bytes;
  // The ring comes first, then what is needed while units are attended to, then what is needed always.
  int bytes = 0;
  const auto place = [&](int& at, int size) { at = bytes, bytes += up(size); };
  place(p.operands, entry_.query_bytes), place(p.weights, entry_.weight_bytes);
  const int passing = bytes;
  place(p.table, RowTable::bytes(rows)), place(p.factors, kWeightBuffers * Plan::factors_of(rows) * 4);
  place(p.exchange, View::exchange_bytes(rows)), place(p.barriers, View::kBarrierBytes),
      place(p.present, kMaxStages * 4);
  place(p.signs, 2 * d * 4 + 2 * split_kv::kMaxLevels),
      place(p.rows, rows * static_cast<int>(sizeof(split_kv::QueryRow)) + 8);
  place(p.notes, (kThreads / 32 + 1) * static_cast<int>(sizeof(split_kv::WarpNotes)));
  p.stages = std::min((shared_limit - bytes) / p.unit_bytes, kMaxStages);
  p.join = p.exact = 0, p.result = up(std::max(part_bytes + join_bytes(rows), exact_bytes(d, rows)));
  const int ring = std::max(p.stages * p.unit_bytes, up(p.result + part_bytes - passing));
  for (int* at : {&p.operands, &p.weights, &p.table, &p.factors, &p.exchange, &p.barriers, &p.present, &p.signs,
                  &p.rows, &p.notes}) {
    *at += ring;
  }
  p.bytes = ring + bytes;
  STD_TORCH_CHECK(p.stages >= 2 && p.bytes <= shared_limit, "paged_attention: a record of ", layout_.bytes,
                  " bytes for 32 tokens does not fit into the ", shared_limit,
                  " bytes of shared memory that a block can have");
}

void KeyTilesLaunch::run(void* workspace, uint32_t* counters, cudaStream_t stream, Overlap overlap) {
  plan_.parts = static_cast<float*>(workspace), plan_.arrivals = counters, plan_.overlap = overlap;
  allow_shared_memory(entry_.kernel, device_.index, plan_.bytes);
  void* arguments[] = {&call_, &layout_, &plan_};
  check_cuda(launch_early(entry_.kernel, grid_, kThreads, plan_.bytes, arguments, stream, device_.facts.major),
             "paged_attention");
}

}  // namespace turboquant::cuda::key_tiles
