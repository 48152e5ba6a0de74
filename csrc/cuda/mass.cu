// nvcc: -fmad=true
//
// paged_mass: the softmax weights that the queries of a call give each key, summed over queries and query heads.
//
// A thread block owns a span of the keys of one sequence and KV head, so that nobody else writes their masses. It
// expands keys and multiplies them with queries as the general attention kernel does, whose parts it is made of
// (attention/general), and goes through all rows, as many at a time as its shared memory holds. Denominators are known,
// so that a product becomes a weight at once, and the weights of a key are summed over the rows of a warp in registers,
// over warps in shared memory, and then added to its mass. That order depends on nothing but the number of rows.
//
// Exact keys, which can lie in every span, take a second launch.
#include <algorithm>

#include "cuda/attention/arguments.cuh"
#include "cuda/attention/general/code_expansion.cuh"
#include "cuda/attention/general/exact_tail.cuh"
#include "cuda/attention/general/mask.cuh"
#include "cuda/attention/general/queries.cuh"
#include "cuda/common/async_copy.cuh"
#include "cuda/common/device_facts.cuh"
#include "cuda/common/mma.cuh"

namespace turboquant::cuda {
namespace {

using general::BlockContext, general::Shape, general::SharedMemory, general::VisibleKeys, general::WorkItem;

struct MassArguments {
  general::Arguments x;
  const float* lse;  // [tokens, q_heads]
  float* mass;       // [seqs, kv_heads, keys]
  int64_t keys;
  int spans, span_keys;  // of a sequence
  bool exact;            // the exact keys, else those in codes
};

// What a block has in shared memory beside the parts of attention.
template <typename S>
struct MassMemory {
  float lse[S::kRows];                    // in units of log 2
  float sums[2][S::kRowWarps][S::kKeys];  // of a step, of the rows of a warp
};

// A span of keys, and as many rows as a block holds.
template <typename S>
class MassBlock {
 public:
  __device__ __forceinline__ MassBlock(const BlockContext<S>& block, const MassArguments& arguments,
                                       MassMemory<S>& memory)
      : block_(block), m_(arguments), memory_(memory), mask_(block), pages_(block), codes_(block), tail_(block),
        queries_(block) {}

  // Keys [begin, end), where they are in codes; ends with a synchronisation.
  __device__ __forceinline__ void run(int begin, int end) {
    mask_.prepare();
    load_lse();
    __syncthreads();
    const int steps = select(begin, end);
    if (steps > 0) {
      queries_.prepare(m_.exact);
      __syncthreads();
      add(steps);
    }
    __syncthreads();
  }

 private:
  static constexpr int kOctets = S::kKeyOctets / S::kColumnWarps;  // of keys, those of a warp
  static constexpr int kLaneKeys = 2 * kOctets;                    // keys of which a lane holds products
  static_assert(kOctets * S::kColumnWarps == S::kKeyOctets && S::kKeys <= S::kThreads && !S::kStaged && !S::kHopper);

  __device__ __forceinline__ void load_lse() const {
    for (int r = block_.thread.index; r < block_.work.rows; r += S::kThreads) {
      const WorkItem::Query at = block_.query(r);
      memory_.lse[r] = m_.lse[at.token * block_.a.q_heads + at.head] * kLog2E;
    }
  }

  // The keys that some row sees. Returns their steps.
  __device__ __forceinline__ int select(int begin, int end) {
    if (m_.exact) {
      tail_.select(mask_.first(), mask_.last());
      return tail_.steps();
    }
    pages_.select(mask_.first(), mask_.last(), begin, end);
    return pages_.steps();
  }

  // All steps. With two buffers an iteration expands the keys of the next step while it multiplies those of this one,
  // and one half of the warps begins with the former (general/kernel.cuh).
  __device__ __forceinline__ void add(int steps) {
    constexpr int kFirst = S::kBuffers == 2 ? -1 : 0;  // the iteration before the first step only expands
    const int thread = block_.thread.index;
    const bool expands_first = block_.thread.warp / 4 % 2 == 0;
    if (!m_.exact) {
      for (int i = thread; i < (kFirst + 3) * pages_.tiles(); i += S::kThreads) {
        const int step = i / pages_.tiles(), tile = i % pages_.tiles();
        pages_.set_tile(step, tile, pages_.find_tile(step, tile));
      }
    }
#pragma unroll 1
    for (int step = kFirst; step < steps; ++step) {
      __syncthreads();
      const bool finds = !m_.exact && thread < pages_.tiles();
      uint8_t* tile = finds ? pages_.find_tile(step + 3, thread) : nullptr;
      if (step > 0) flush(step - 1);
      if constexpr (S::kBuffers == 1) {
        expand(step);
        __syncthreads();
        weigh(step);
      } else {
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
          if ((half == 0) == expands_first) {
            if (step + 1 < steps) expand(step + 1);
          } else if (step >= 0) {
            weigh(step);
          }
        }
      }
      if (finds) pages_.set_tile(step + 3, thread, tile);
      if (tile) prefetch_keys(tile);
    }
    __syncthreads();
    flush(steps - 1);
  }

  // Everything of a tile but its values, ahead of the loads of expand.
  __device__ __forceinline__ void prefetch_keys(const uint8_t* tile) const {
    const RecordLayout& layout = block_.x.layout;
    prefetch_bytes(tile, layout.value_blocks);
    prefetch_bytes(tile + layout.key_scales, 2 << layout.tile_shift);
  }

  __device__ __forceinline__ void expand(int step) const {
    if (m_.exact) {
      tail_.expand_keys_only(step);
    } else {
      codes_.expand_keys_only(pages_, step);
    }
  }

  // A step's sums over the rows of this warp.
  __device__ __forceinline__ void weigh(int step) {
    if (block_.thread.team_row() >= block_.work.rows) return;
    float total[kLaneKeys] = {};
    if (m_.exact || mask_.team_sight(pages_.position(step)).any) {
      float x[S::kStrips][4 * kOctets] = {};
      multiply(step, x);
#pragma unroll
      for (int i = 0; i < S::kStrips; ++i) add_weights(i, step, x[i], total);
    }
    sum_over_rows(total);
    store_sums(step, total);
  }

  // x = queries * keys, of this warp's rows and octets of keys.
  __device__ __forceinline__ void multiply(int step, float (&x)[S::kStrips][4 * kOctets]) const {
    const auto& thread = block_.thread;
    const uint4* key = block_.shared.keys(step) + thread.column_warp * kOctets * 32 + thread.lane;
    const uint4* query = block_.shared.queries() + thread.row_warp * S::kStrips * S::kKeySlices * 64 + thread.lane;
#pragma unroll(S::kWhole ? S::kKeySlices : 1)
    for (int slice = 0; slice < S::kKeySlices; ++slice) {
      if (32 * slice >= block_.x.layout.head_dim) break;
      uint4 q[S::kStrips][2];
#pragma unroll
      for (int i = 0; i < 2 * S::kStrips; ++i) {
        q[i / 2][i % 2] = query[(i / 2 * S::kKeySlices + slice) * 64 + i % 2 * 32];
      }
#pragma unroll
      for (int o = 0; o < kOctets; ++o) {
        const uint4 k = key[(slice * S::kKeyOctets + o) * 32];
#pragma unroll
        for (int i = 0; i < S::kStrips; ++i) mma_halves(x[i] + 4 * o, q[i][0], k.x, k.y);
#pragma unroll
        for (int i = 0; i < S::kStrips; ++i) mma_halves(x[i] + 4 * o, q[i][1], k.z, k.w);
      }
    }
  }

  // Products of a strip become weights, which are added to the totals of their keys.
  __device__ __forceinline__ void add_weights(int strip, int step, const float (&x)[4 * kOctets],
                                              float (&total)[kLaneKeys]) const {
    const general::BlockConstants<S>& constants = block_.shared.constants();
    const general::KeyScalars<S>& keys = block_.shared.scalars(step);
    const int first = block_.thread.column_warp * 4 * kOctets + block_.thread.t;  // a pair of keys
    const float cap = block_.a.soft_cap * kLog2E, inverse = 1 / cap;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = block_.thread.lane_row(2 * strip + h);
      const float factor = constants.factor[r], shift = constants.shift[r];
      const float lse = r < block_.work.rows ? memory_.lse[r] : -INFINITY;
      typename general::Mask<S>::Sees sees = mask_.seen_by(r, m_.exact);
      if (lse == -INFINITY) sees.count = sees.recent_count = 0;
#pragma unroll
      for (int o = 0; o < kOctets; ++o) {
        const float2 scale = reinterpret_cast<const float2*>(keys.key_scale)[first + 4 * o];
        const int2 position = reinterpret_cast<const int2*>(keys.position)[first + 4 * o];
        const auto weight = [&](float product, float key_scale, int at) {
          float score = product * key_scale * factor + shift;
          if (cap > 0) score = cap * tanhf(score * inverse);
          return sees(at) ? exp2_fast(score - lse) : 0;
        };
        total[2 * o] += weight(x[4 * o + 2 * h], scale.x, position.x);
        total[2 * o + 1] += weight(x[4 * o + 2 * h + 1], scale.y, position.y);
      }
    }
  }

  // Over the eight rows whose lanes hold the same keys: each step of the exchange halves the keys that a lane is left
  // with, as long as there are two.
  __device__ __forceinline__ void sum_over_rows(float (&total)[kLaneKeys]) const {
    int count = kLaneKeys;
#pragma unroll
    for (int bit = 16; bit >= 4; bit /= 2) {
      const bool upper = block_.thread.lane & bit;
      if (count > 1) {
        count /= 2;
#pragma unroll
        for (int i = 0; i < kLaneKeys / 2; ++i) {
          if (i >= count) break;
          const float give = upper ? total[i] : total[i + count], keep = upper ? total[i + count] : total[i];
          total[i] = keep + __shfl_xor_sync(0xffffffff, give, bit);
        }
      } else {
        total[0] += __shfl_xor_sync(0xffffffff, total[0], bit);
      }
    }
  }
  __device__ __forceinline__ void store_sums(int step, const float (&total)[kLaneKeys]) const {
    int first = 0, count = kLaneKeys;  // of the lane's keys, those that it is left with
#pragma unroll
    for (int bit = 16; bit >= 4; bit /= 2) {
      if (count == 1) continue;
      count /= 2;
      if (block_.thread.lane & bit) first += count;
    }
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i) {
      if (i >= count) break;
      const int key = first + i,
                at = (block_.thread.column_warp * kOctets + key / 2) * 8 + 2 * block_.thread.t + key % 2;
      memory_.sums[step % 2][block_.thread.row_warp][at] = total[i];
    }
  }

  // Adds a step's sums to the masses of its keys.
  __device__ __forceinline__ void flush(int step) const {
    const int key = block_.thread.index;
    if (key >= S::kKeys) return;
    const int position = m_.exact ? tail_.position(step, key) : pages_.position(step) + key;
    const bool exists = m_.exact ? position >= 0 : pages_.holds(position);
    if (!exists || position >= m_.keys) return;
    const int warps = (block_.work.rows + S::kTeamRows - 1) / S::kTeamRows;
    float sum = 0;
    for (int w = 0; w < warps; ++w) sum += memory_.sums[step % 2][w][key];
    const WorkItem& work = block_.work;
    m_.mass[(int64_t{work.sequence} * block_.a.kv_heads + work.kv_head) * m_.keys + position] += sum;
  }

  const BlockContext<S>& block_;
  const MassArguments& m_;
  MassMemory<S>& memory_;
  general::Mask<S> mask_;
  general::PageStages<S> pages_;
  general::CodeExpansion<S> codes_;
  general::ExactTail<S> tail_;
  general::Queries<S> queries_;
};

template <typename S>
__device__ __forceinline__ void fill_tables(const MassArguments& m, general::BlockConstants<S>& constants) {
  const int thread = threadIdx.x;
  constants.levels.fill(m.x.a.record, m.x.a.key_levels, m.x.a.value_levels, thread);
  if (thread < format::kMaxBlocks) {
    constants.hartley[thread] = thread < m.x.split.blocks ? format::hartley(m.x.split.blocks, thread) : 0;
  }
}

template <typename S>
__global__ void __launch_bounds__(S::kThreads, 2) mass_kernel(const __grid_constant__ MassArguments m) {
  extern __shared__ uint4 dynamic[];
  __shared__ MassMemory<S> memory;
  const SharedMemory<S> shared(reinterpret_cast<uint8_t*>(dynamic));
  const Attention& a = m.x.a;
  const unsigned span = blockIdx.x % m.spans, rest = blockIdx.x / m.spans;
  const int kv_head = static_cast<int>(rest % a.kv_heads), sequence = static_cast<int>(rest / a.kv_heads);
  const int begin = static_cast<int>(span) * m.span_keys;
  if (!m.exact && begin >= a.length(sequence)) return;
  fill_tables<S>(m, shared.constants());
  const int rows = a.num_queries(sequence) * a.group, first_query = a.first_query(sequence);
#pragma unroll 1
  for (int first = 0; first < rows; first += S::kRows) {
    const WorkItem work{sequence, kv_head, first, min(rows - first, S::kRows), first_query};
    const BlockContext<S> block{m.x, a, work, shared, general::Thread<S>()};
    MassBlock<S>(block, m, memory).run(begin, begin + m.span_keys);
  }
}

// ---- Host side -----------------------------------------------------------------------------------------------------

constexpr int kMostSpanKeys = 2048, kLeastSpanKeys = 256;  // multiples of the keys of a step
constexpr int kBlocksPerMultiprocessor = 4;                // as many at least, where sequences are long enough

// Cuts the keys of all sequences, which have up to `keys`, into spans. The queries of a call are prepared for each
// span, so that long ones are cheaper, unless they leave multiprocessors idle.
void cut_spans(MassArguments& m, int64_t keys, const DeviceFacts& device) {
  const int64_t heads = int64_t{m.x.a.seqs} * m.x.a.kv_heads;
  const auto spans = [&](int64_t size) { return std::max<int64_t>((keys + size - 1) / size, 1); };
  m.span_keys = kMostSpanKeys;
  while (m.span_keys > kLeastSpanKeys &&
         heads * spans(m.span_keys) < int64_t{kBlocksPerMultiprocessor} * device.multiprocessors) {
    m.span_keys /= 2;
  }
  m.spans = static_cast<int>(spans(m.span_keys));
}

// False where the device has too little shared memory for this shape.
template <typename S>
bool launch_shape(MassArguments m, const Device& device, cudaStream_t stream) {
  const int bytes = SharedMemory<S>::bytes_without_values(m.x.layout.head_dim);
  if (bytes + static_cast<int>(sizeof(MassMemory<S>)) > device.facts.shared_per_block) return false;
  const auto kernel = mass_kernel<S>;
  allow_shared_memory(reinterpret_cast<const void*>(kernel), device.index, bytes);
  const auto launch = [&] {
    const int64_t heads = int64_t{m.x.a.seqs} * m.x.a.kv_heads;
    kernel<<<num_blocks(heads * m.spans, 1), S::kThreads, bytes, stream>>>(m);
    check_cuda(cudaGetLastError(), "paged_mass");
  };
  launch();
  if (!m.x.a.tail && !m.x.a.new_keys) return true;
  m.exact = true, m.spans = 1;
  launch();
  return true;
}

bool launch_any(const MassArguments& m, const Device& device, cudaStream_t stream) {
  const int d = m.x.layout.head_dim;
  const bool many = int64_t{m.x.a.max_q_len} * m.x.a.group > 16;
  if (d <= 128) {
    if (many && launch_shape<Shape<128, 2, 4, 2, 64, 2, false>>(m, device, stream)) return true;
    return launch_shape<Shape<128, 1, 1, 8, 64, 2, false>>(m, device, stream);
  }
  if (d <= 256) {
    if (many && launch_shape<Shape<256, 2, 4, 2, 32, 2, false>>(m, device, stream)) return true;
    return launch_shape<Shape<256, 1, 1, 4, 32, 2, false>>(m, device, stream);
  }
  return launch_shape<Shape<1024, 1, 1, 4, 32, 1, false>>(m, device, stream);
}

void add_mass(const AttentionCall& c, const format::Record& record, const Tensor& lse, const Tensor& mass) {
  check_alignment(c);
  if (c.q.numel() == 0 || mass.numel() == 0) return;
  const Launch launch(c.q);
  const AttentionArguments arguments(c, record);
  const Attention& a = arguments.call;
  const Device& device = device_of(c.q.get_device_index());
  const format::Split split = format::split_dim(record.head_dim);
  int log_block = 0;
  while (1 << log_block < split.block) ++log_block;
  MassArguments m{.x = {a, RecordLayout(record), split, block_norm(log_block), 0, 0, 0},
                  .lse = static_cast<const float*>(lse.data_ptr()),
                  .mass = static_cast<float*>(mass.data_ptr()),
                  .keys = mass.size(2),
                  .spans = 1,
                  .span_keys = 0,
                  .exact = false};
  cut_spans(m, std::min<int64_t>(m.keys, int64_t{a.max_pages} * record.page_size), device.facts);
  STD_TORCH_CHECK(launch_any(m, device, launch.stream()), "paged_mass of head_dim ", record.head_dim,
                  " needs more shared memory than the ", device.facts.shared_per_block,
                  " bytes that a block has on this device: supported there are up to 256");
}

}  // namespace
}  // namespace turboquant::cuda

STABLE_TORCH_LIBRARY_IMPL(turboquant, CUDA, m) {
  using namespace turboquant;
  m.impl("paged_mass", boxed<&paged_mass<turboquant::cuda::add_mass>>);
}
