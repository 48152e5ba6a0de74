// The launch of key tiles, row tiles and warp tiles: which instance, and how its shared memory is divided.
#include "cuda/mla/launch.cuh"

#include "cuda/attention/counters.cuh"
#include "cuda/common/torch.cuh"
#include "cuda/mla/row_tiles/shape.cuh"
#include "cuda/mla/warp_tiles/shape.cuh"

namespace turboquant::cuda::mla {
namespace {

// max_q_len may be any upper bound, but no sequence has more queries than there are tokens.
int most_queries(const Attention& a) { return std::min(a.max_q_len, a.tokens); }

}  // namespace

// The kernel of R channels, and how its shared memory is divided.
template <int R>
void LatentLaunch::find(LatentKernel kernel) {
  const DeviceFacts& facts = device_.facts;
  entry_ = find_kernel<R>(kernel, call_.most_rows());
  const int per_block = facts.shared_per_multiprocessor / entry_.blocks - kReservedSharedBytes;
  const int limit = std::min(facts.shared_per_block, per_block);
  if (kernel == LatentKernel::kWarpTiles) {
    plan_ = plan_of_warp_tiles<WarpShape<R>>(call_);
    entry_.blocks = std::min(entry_.blocks, facts.shared_per_multiprocessor / (plan_.bytes + kReservedSharedBytes));
    return;
  }
  if constexpr (has_row_tiles(R)) {
    if (kernel == LatentKernel::kRowTiles) {
      plan_ = plan_of_row_tiles<RowShape<R>>(call_.record, limit);
      STD_TORCH_CHECK(plan_.raw_slots >= 2, "mla_attention: codes of two tiles do not fit into shared memory");
    }
  }
  if (kernel != LatentKernel::kRowTiles) plan_ = Plan(call_.record, entry_.rows, limit);
  STD_TORCH_CHECK(plan_.rows >= entry_.rows * (kPartHead + R) * 4,
                  "mla_attention: sums of a segment do not fit where codes and queries are");
}

LatentLaunch::LatentLaunch(const Latents& call, LatentKernel kernel, const Device& device)
    : call_(call), device_(device) {
  switch (call.record.latent_dim) {
    case 128: find<128>(kernel); break;
    case 256: find<256>(kernel); break;
    default: find<512>(kernel);
  }
  grid_ = entry_.blocks * device.facts.multiprocessors;
  plan_.grid = Divisor(grid_);
  plan_.row_blocks =
      checked_int((call.most_rows() + entry_.rows - 1) / entry_.rows, "the number of rows of a sequence");
  segments_ = int64_t{call.a.seqs} * plan_.row_blocks;
  const int64_t by_tokens = int64_t{call.a.tokens} * call.a.q_heads / entry_.rows + call.a.seqs;
  if (by_tokens < segments_) plan_.row_blocks = 0, segments_ = by_tokens;
  joins_later_ = segments_ <= grid_;
  const bool has_exact = call.a.tail || call.a.new_keys;
  plan_.few_rows = has_exact ? std::min(most_queries(call.a), kExactApart) * call.a.q_heads : 0;
  check_limits();
  plan_join();
}

// Units of work of the longest sequence.
double LatentLaunch::most_units() const {
  const Attention& a = call_.a;
  const int64_t tokens = int64_t{a.max_pages} * call_.record.page_size;
  const int64_t exact = int64_t{a.sink_tokens} + a.ring + 1 + (a.new_keys ? most_queries(a) : 0);
  return 1.0 * (tokens / kUnitTokens + 1 + exact / kExactPerUnit + 1);
}

// The kernel counts units of work in 32 bits.
void LatentLaunch::check_limits() const {
  const Attention& a = call_.a;
  const double blocks = 1.0 * a.tokens * a.q_heads / entry_.rows + a.seqs;
  STD_TORCH_CHECK((most_units() + kMostOfEnd) * blocks <= INT32_MAX, "mla_attention: ", a.seqs, " sequences of up to ",
                  int64_t{a.max_pages} * call_.record.page_size, " tokens are more work than one call can count");
}

// Who joins the parts of a segment depends on how many there are, which only the device knows.
void LatentLaunch::plan_join() {
  parts_ = grid_ / segments_;
  plan_.most_parts = !joins_later_ ? kFewParts : parts_ <= kFewParts ? kMostOfWarp : grid_;
  const double parts = std::min<double>(most_units(), grid_);  // of the longest segment
  plan_.num_long = parts > plan_.most_parts ? static_cast<int>(divide_up(grid_, plan_.most_parts)) : 0;
}

cudaError_t LatentLaunch::join(void** arguments, cudaStream_t stream) const {
  const int rows = most_queries(call_.a) * call_.a.q_heads, major = device_.facts.major;
  const int behind = plan_.num_long * kJoinWarps;
  const auto launch = [&](const void* kernel, unsigned blocks, int of_each, int cluster) {
    return launch_early(kernel, dim3(blocks, of_each), 32 * kJoinWarps, 0, arguments, stream, major, cluster);
  };
  if (!joins_later_) return launch(entry_.join_few, entry_.rows / kJoinWarps, behind, 1);
  if (parts_ <= kFewParts) return launch(entry_.join_few, num_blocks(rows, kJoinWarps), call_.a.seqs + behind, 1);
  int cluster = 1;
  while (major >= 9 && cluster < kMostJoinBlocks && cluster * kJoinWarps * kFewParts < parts_) cluster *= 2;
  return launch(entry_.join, rows * cluster, call_.a.seqs, cluster);
}

void LatentLaunch::run(void* workspace, cudaStream_t stream) {
  plan_.images = static_cast<uint8_t*>(workspace);
  plan_.parts = reinterpret_cast<float*>(plan_.images + segments_ * plan_.image_bytes);
  plan_.exact_parts = plan_.parts + part_floats();
  auto* counters = reinterpret_cast<uint32_t*>(plan_.exact_parts + exact_floats());
  plan_.arrivals = zeroed_counters(device_.index, stream, grid_, counters);
  auto* segments = reinterpret_cast<SharedBy*>(counters + grid_);
  plan_.segments = joins_later_ ? segments : nullptr;
  plan_.long_segments = reinterpret_cast<LongSegment*>(segments + segments_);
  allow_shared_memory(entry_.kernel, device_.index, plan_.bytes);
  allow_shared_memory(entry_.prepare, device_.index, 1, true);  // so that blocks of the next kernel begin beside it
  const int major = device_.facts.major;
  void* arguments[] = {const_cast<Latents*>(&call_), &plan_, &entry_.rows};
  plan_.image_blocks = checked_int(segments_ * (entry_.rows / kImageRows), "the number of blocks of rows");
  const int64_t few_blocks = call_.a.seqs * divide_up(plan_.few_rows, kImageRows);
  const dim3 prepared(checked_int(plan_.image_blocks + few_blocks, "the number of blocks of rows"));
  check_cuda(launch_early(entry_.prepare, prepared, 32 * kImageRows, 0, arguments, stream, major), "mla_attention");
  check_cuda(launch_early(entry_.kernel, dim3(grid_), entry_.threads, plan_.bytes, arguments, stream, major),
             "mla_attention");
  if (joins_later_ || plan_.num_long > 0) check_cuda(join(arguments, stream), "mla_attention");
}

}  // namespace turboquant::cuda::mla
