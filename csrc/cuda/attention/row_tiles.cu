// The launch of the row-tile kernel: which instance, and how its shared memory is divided.
#include "cuda/attention/row_tiles.cuh"

#include <algorithm>

#include "cuda/attention/counters.cuh"
#include "cuda/attention/head_dims.cuh"
#include "cuda/attention/row_tiles/expansion.cuh"
#include "cuda/common/torch.cuh"

namespace turboquant::cuda::row_tiles {
namespace {

// How the kernel expands codes that choose_attention lets through.
Kind kind_of(format::Width width, bool table) {
  switch (width) {
    case format::Width::k1: break;
    case format::Width::k2: return kPairs;
    case format::Width::k3: return kSpread;
    case format::Width::k4: return table ? kLevels : kNibbles;
    case format::Width::k5: return kPlanes;
    case format::Width::k8: break;
  }
  return kBytes;
}

}  // namespace

RowTilesLaunch::RowTilesLaunch(const Attention& call, const Device& device, int least_queries)
    : call_(call), device_(device) {
  const bool many = int64_t{call.max_q_len} * call.group > 64;
  if (!many || !choose_shape(2)) choose_shape(1);
  check_limits();
  plan_.layout = RecordLayout(call.record);
  plan_.key_kind = kind_of(call.record.key_width(), call.key_levels);
  plan_.value_kind = kind_of(call.record.value_width(), call.value_levels);
  plan_.least_rows = least_queries * call.group;
  plan_.clears = least_queries == 0;
}

// Tiles of 64 or 128 rows; false: not even the fewest stages fit. Many stages of tiles are worth less than a ring of
// raw stages in which copies can run ahead, and two blocks of a multiprocessor are worth more than both.
bool RowTilesLaunch::choose_shape(int groups) {
  const DeviceFacts& facts = device_.facts;
  entry_ = with_head_dim<kRowTilesHeadDims>(call_.record.head_dim,
                                            [&](auto d) { return find_kernel<d>(groups, call_.dtype); });
  plan_.raw_stride = raw_stride(call_.record);
  const auto fits = [&](int blocks, int ahead) {
    const int per_block = facts.shared_per_multiprocessor / blocks - kReservedSharedBytes;
    constexpr int kStages[][2] = {{4, 4}, {2, 3}, {2, 2}};  // of keys and of values
    for (const auto& [keys, values] : kStages) {
      // A barrier knows one phase from the next, but not from the one after that, so no warp may be a turn of the ring
      // behind another.
      if (keys < entry_.stream_warps) continue;
      plan_.key_stages = keys, plan_.value_stages = values, grid_ = blocks * facts.multiprocessors;
      if (entry_.lay_out(plan_, std::min(facts.shared_per_block, per_block)) &&
          plan_.raw_stages >= entry_.stream_warps + ahead) {
        return true;
      }
    }
    return false;
  };
  return fits(entry_.blocks, 3) || fits(entry_.blocks, 1) || fits(1, 1) || fits(1, 0);
}

// The kernel counts tiles of keys, of all tiles of rows, in 32 bits. What the host knows about them: no sequence is
// longer than block_table is wide, and all have the call's tokens together.
void RowTilesLaunch::check_limits() const {
  const Attention& a = call_;
  const int64_t tokens = int64_t{a.max_pages} * a.record.page_size + (a.new_keys ? a.max_q_len : 0);
  const int64_t tiles = tokens / kUnitKeys + 3;  // one more of codes, and of sinks and recent tokens
  const double blocks = 1.0 * a.tokens * a.group / entry_.rows + a.seqs;
  STD_TORCH_CHECK(tiles * blocks * a.kv_heads <= INT32_MAX, "paged_attention: ", a.seqs, " sequences of up to ", tokens,
                  " tokens are more work than one call can count");
}

void RowTilesLaunch::run(void* workspace, cudaStream_t stream) {
  plan_.parts = static_cast<float*>(workspace);
  plan_.counters =
      zeroed_counters(device_.index, stream, num_counters(), static_cast<uint32_t*>(workspace) + part_floats());
  allow_shared_memory(entry_.kernel, device_.index, plan_.bytes);
  void* arguments[] = {const_cast<Attention*>(&call_), &plan_};
  check_cuda(launch_early(entry_.kernel, grid_, entry_.threads, plan_.bytes, arguments, stream, device_.facts.major),
             "paged_attention");
}

}  // namespace turboquant::cuda::row_tiles
