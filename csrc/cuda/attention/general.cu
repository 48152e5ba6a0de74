// nvcc: -fmad=true
//
// Attention of many queries over packed pages.
//
// A thread block has up to 256 rows, a row being one query of one query head of a KV head, and goes through the keys
// that they see, 16 to 64 at a time. The levels of those keys and values are expanded into shared memory as float16,
// which holds them exactly, in the order in which tensor cores read them. Each warp then computes scores, softmax
// weights and sums of values for its own rows, with all sums in registers. While one half of the warps expands the
// next keys, the other half multiplies.
//
// Why this is the attention of the decoded cache:
//   * Keys and values stay rotated. The query is rotated once, the sum of values is rotated back once.
//   * A query is rounded to float16 with a power of two of its own (general/queries.cuh). Its products with levels,
//     times the key's scale, are its scores.
//   * Weights are relative to a reference that changes by powers of two only, and their float16 products with the
//     values' scales lose nothing that counts (general/softmax.cuh).
//   * Exact keys of the tail come first, in the same way: unrotated queries, keys and values as float16 with a power
//     of two per vector (general/exact_tail.cuh). Their sum is rotated, the keys in codes are added, and the whole is
//     rotated back.
//   * A scale that is NaN, as in a page that nobody wrote or a token that could not be encoded, reaches only the rows
//     that see its token: levels are finite whatever the bytes are, and the score or weight of a key that a row does
//     not see is replaced, not multiplied.
#include "cuda/attention/general.cuh"

#include <algorithm>

#include "cuda/attention/arguments.cuh"
#include "cuda/attention/general/kernel.cuh"
#include "cuda/common/device_facts.cuh"
#include "cuda/common/torch.cuh"

namespace turboquant::cuda {
namespace {

using general::Shape, general::SharedMemory;

// Blocks that clear the results of tokens that belong to no sequence. These are few in what engines call: only captured
// batches are padded. Without cu_seqlens_q there are none, because every token is a sequence.
constexpr int kMostClearBlocks = 64;

}  // namespace

// False where the device has too little shared memory for this shape.
template <typename S>
bool GeneralLaunch::choose(const Attention& a, int most_shared) {
  general::Arguments& x = arguments_;
  const int tile_tokens = a.record.tile_tokens();
  if (S::kStaged && S::kKeys < tile_tokens) return false;
  const int bytes = SharedMemory<S>::bytes(x.layout.head_dim, S::kKeys / tile_tokens * x.layout.tile_bytes);
  if (bytes > most_shared) return false;
  const int64_t rows = int64_t{a.max_q_len} * a.group;
  x.row_blocks = static_cast<int>(divide_up(rows, S::kRows));
  x.work_blocks = num_blocks(int64_t{x.row_blocks} * a.kv_heads * a.seqs, 1);
  x.clear_blocks = a.query_begin ? static_cast<unsigned>(std::min(a.tokens, kMostClearBlocks)) : 0;
  kernel_ = general::general_kernel<S>, threads_ = S::kThreads, bytes_ = bytes;
  blocks_ = num_blocks(int64_t{x.work_blocks} + x.clear_blocks, 1);
  return true;
}

// Many rows and keys at once; false beyond 256 channels.
template <bool HOPPER>
bool GeneralLaunch::choose_large(const Attention& a, int most_shared) {
  const int d = a.record.head_dim;
  if (d <= 64) return choose<Shape<64, HOPPER ? 1 : 2, HOPPER ? 16 : 8, 1, 64, 2, true, HOPPER>>(a, most_shared);
  if (d <= 96) return choose<Shape<96, 2, 8, 1, 64, 2, true, HOPPER>>(a, most_shared);
  if (d <= 128) return choose<Shape<128, 2, 8, 1, 64, 2, true, HOPPER>>(a, most_shared);
  if (d <= 192) return choose<Shape<192, 1, 8, 1, 32, 2, true, HOPPER>>(a, most_shared);
  if (d <= 256) return choose<Shape<256, 1, 8, 1, 32, 2, true, HOPPER>>(a, most_shared);
  return false;
}

// Few rows and keys at once: for devices with less shared memory, and for large d.
bool GeneralLaunch::choose_small(const Attention& a, int most_shared) {
  const int d = a.record.head_dim;
  if (d <= 128 && choose<Shape<128, 2, 4, 1, 16, 2, false>>(a, most_shared)) return true;
  if (d <= 256 && choose<Shape<256, 1, 2, 2, 16, 2, false>>(a, most_shared)) return true;
  return choose<Shape<1024, 1, 1, 4, 16, 1, false>>(a, most_shared);
}

GeneralLaunch::GeneralLaunch(const Attention& a, const DeviceFacts& device) : arguments_(a) {
  const int most = device.shared_per_block;
  const bool large = device.warpgroup_products ? choose_large<true>(a, most) : choose_large<false>(a, most);
  if (!large && !choose_small(a, most)) refuse_head_dim("paged_attention", a.record.head_dim, device);
}

void GeneralLaunch::run(cudaStream_t stream) const {
  allow_shared_memory(reinterpret_cast<const void*>(kernel_), current_device().index, bytes_);
  kernel_<<<blocks_, threads_, bytes_, stream>>>(arguments_);
  check_cuda(cudaGetLastError(), "paged_attention");
}

}  // namespace turboquant::cuda
