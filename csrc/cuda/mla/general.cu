// nvcc: -fmad=true
// The general kernel of latent attention: every dtype, width, grid and device, in float32 and without tensor cores. A
// block takes eight rows of a sequence through all their keys, eight at a time: keys become vectors in shared memory,
// first those in codes, then the exact ones.
#include "cuda/attention/padding.cuh"
#include "cuda/attention/softmax_math.cuh"
#include "cuda/codec/generic.cuh"
#include "cuda/common/torch.cuh"
#include "cuda/mla/launch.cuh"

namespace turboquant::cuda::mla {
namespace {

constexpr int kRows = 8, kKeys = 8, kThreads = 256, kWarps = kThreads / 32;
constexpr int kOwn = format::kMaxLatentDim / kThreads;  // channels of a thread
// Words of a token's row and of its plane, at most: 8 bits of a channel, and one.
constexpr int kRowWords = format::kMaxLatentDim / 4, kPlaneWords = format::kMaxLatentDim / 32;
constexpr int kTokenWords = kRowWords + kPlaneWords;

// Shared memory of a block. stride: latent and raw channels, and padding.
struct Memory {
  float *queries, *keys;        // [kRows, stride], [kKeys, stride]
  float* scores;                // [kRows, kKeys]: scores, then weights
  float *top, *total, *factor;  // [kRows]
  float* table;                 // [32]: levels
  uint32_t* codes;              // [kWarps, kTokenWords]: a token's row and plane

  __device__ __forceinline__ Memory(float* at, int stride)
      : queries(at), keys(queries + kRows * stride), scores(keys + kKeys * stride), top(scores + kRows * kKeys),
        total(top + kRows), factor(total + kRows), table(factor + kRows),
        codes(reinterpret_cast<uint32_t*>(table + 32)) {}
  static int bytes(int stride) {
    return 4 * ((kRows + kKeys) * stride + kRows * kKeys + 3 * kRows + 32 + kWarps * kTokenWords);
  }
};
__host__ __device__ constexpr int stride_of(int channels) { return channels + 4; }

class GeneralBlock {
 public:
  __device__ __forceinline__ GeneralBlock(const Latents& x, const GenericShape& shape, float* shared, int sequence,
                                          int first_row)
      : x_(x), a_(x.a), shape_(shape), stride_(stride_of(x.channels())), memory_(shared, stride_),
        warp_(threadIdx.x / 32), lane_(threadIdx.x % 32), sequence_(sequence), length_(a_.length(sequence_)),
        queries_(a_.num_queries(sequence_)), first_query_(a_.first_query(sequence_)), first_row_(first_row),
        tail_(a_.tail_of(sequence_, length_)) {}

  __device__ __forceinline__ void run() {
    const int rows = queries_ * a_.q_heads;
    if (first_row_ >= rows) return;
    rows_ = min(kRows, rows - first_row_);
    fill_levels(memory_.table, x_.levels, x_.record.width(), threadIdx.x, kThreads);
    if (threadIdx.x < kRows) memory_.top[threadIdx.x] = -INFINITY, memory_.total[threadIdx.x] = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) sums_[r][i] = 0;
    }
    load_queries(true);
    const RowSight last = sight(rows_ - 1), first = sight(0);
    attend(true, first.first, max(last.end, first.end));
    if (x_.signs || a_.channels.center) leave_codes();
    load_queries(false);
    if (tail_.sinks > 0) attend(false, 0, min(tail_.sinks, length_));
    if (tail_.any() || a_.new_keys) attend(false, max(min(first.end, last.end), min(tail_.sinks, length_)), length_);
    write();
  }

 private:
  __device__ __forceinline__ RowPlace place(int r) const {
    return place_of_row(a_, first_query_, length_, queries_, first_row_ + r);
  }
  __device__ __forceinline__ RowSight sight(int r) const {
    return sight_of(a_, tail_, length_, queries_, place(r).position);
  }

  // Queries as they came, or for codes: times inverse, rotated. A warp for a row.
  __device__ __forceinline__ void load_queries(bool coded) {
    __syncthreads();
    const int r = x_.record.latent_dim;
    for (int i = warp_; i < rows_; i += kWarps) {
      const RowPlace row = place(i);
      float* y = memory_.queries + i * stride_;
      const int64_t at = row.token * a_.q_token_stride + row.head * a_.q_head_stride;
      for (int c = lane_; c < r; c += 32) {
        float v = load_float(a_.q, a_.dtype, at + c);
        if (coded && a_.channels.inverse) v *= a_.channels.inverse[c];
        y[c] = coded && x_.signs ? v * x_.signs[c] : v;
      }
      __syncwarp();
      if (coded) transform_generic(y, shape_, true, lane_);
      const int64_t rope = row.token * x_.rope_token_stride + row.head * x_.rope_head_stride;
      for (int c = lane_; c < x_.record.rope_dim; c += 32) y[r + c] = load_float(x_.q_rope, a_.dtype, rope + c);
      if (!coded || !a_.channels.center) continue;
      float center = 0;
      for (int c = lane_; c < r; c += 32) {
        center = fmaf(load_float(a_.q, a_.dtype, at + c), a_.channels.center[c], center);
      }
#pragma unroll
      for (int bit = 1; bit < 32; bit *= 2) center += __shfl_xor_sync(0xffffffff, center, bit);
      if (lane_ == 0) memory_.factor[i] = center;
    }
    __syncthreads();
    if (threadIdx.x < kRows) center_ = coded && a_.channels.center ? memory_.factor[threadIdx.x] : 0;
    __syncthreads();
  }

  // Keys [begin, end), from codes or exact.
  __device__ __forceinline__ void attend(bool coded, int begin, int end) {
    for (int key = begin; key < end; key += kKeys) {
      const int count = min(kKeys, end - key);
      for (int k = warp_; k < kKeys; k += kWarps) {
        float* y = memory_.keys + k * stride_;
        if (k >= count) {
          for (int c = lane_; c < x_.channels(); c += 32) y[c] = 0;
        } else if (coded) {
          load_coded(y, key + k);
        } else {
          load_exact(y, key + k);
        }
      }
      __syncthreads();
      score(coded, key, count);
      __syncthreads();
      weigh();
      __syncthreads();
      sum();
      __syncthreads();
    }
  }

  __device__ __forceinline__ void load_coded(float* y, int position) const {
    const format::LatentRecord& r = x_.record;
    const int page = a_.block_table[sequence_ * a_.table_stride + position / r.page_size];
    if (page < 0 || page >= a_.num_pages) {
      for (int c = lane_; c < x_.channels(); c += 32) y[c] = 0;
      return;
    }
    const uint8_t* record = a_.pages + int64_t{page} * a_.page_stride;
    const int token = position % r.page_size;
    uint32_t* row = memory_.codes + warp_ * kTokenWords;
    const int words = r.row_bytes() / 4;
    for (int w = lane_; w < words; w += 32) {
      const int place = format::swapped_byte(r.row_bytes(), token, 4 * w);
      row[w] = *reinterpret_cast<const uint32_t*>(record + r.row_of(token) + place);
    }
    for (int w = lane_; w < r.plane_bytes() / 4; w += 32) {
      row[words + w] = reinterpret_cast<const uint32_t*>(record + r.plane_of(token))[w];
    }
    __syncwarp();
    const float scale = __half2float(*reinterpret_cast<const __half*>(record + r.scale_of(token)));
    for (int o = lane_; o < r.latent_dim / 8; o += 32) {
      put_generic_octet(y, r.latent_dim, o, key_octet(row, row + words, r.latent_dim / 8, r.width(), o), r.width(),
                        memory_.table, scale);
    }
    for (int c = lane_; c < r.rope_dim; c += 32) {
      y[r.latent_dim + c] = load_float(record + r.raw_channel(token, c), x_.rope_dtype, 0);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void load_exact(float* y, int position) const {
    const ExactKey key = exact_key(x_, first_query_, tail_.slot, length_, queries_, position);
    const int r = x_.record.latent_dim;
    for (int c = lane_; c < r; c += 32) y[c] = load_float(key.latent, a_.dtype, c);
    for (int c = lane_; c < x_.record.rope_dim; c += 32) y[r + c] = load_float(key.rope, a_.dtype, c);
  }

  // Four threads for a row and a key.
  __device__ __forceinline__ void score(bool coded, int first, int count) const {
    const int pair = threadIdx.x / 4, row = pair / kKeys, key = pair % kKeys;
    const float *q = memory_.queries + row * stride_, *k = memory_.keys + key * stride_;
    float x = 0;
    if (row < rows_) {
      for (int c = threadIdx.x % 4; c < x_.channels(); c += 4) x = fmaf(q[c], k[c], x);
    }
    x += __shfl_xor_sync(0xffffffff, x, 1), x += __shfl_xor_sync(0xffffffff, x, 2);
    if (threadIdx.x % 4) return;
    bool sees = row < rows_ && key < count;
    if (sees) {
      const RowSight s = sight(row);
      const int position = first + key;
      sees = coded ? position >= s.first && position < s.end
                   : position <= s.position && (position < tail_.sinks || position >= s.end);
    }
    memory_.scores[pair] = sees ? x : -INFINITY;
  }

  // Thread r: row r.
  __device__ __forceinline__ void weigh() const {
    const int r = threadIdx.x;
    if (r >= kRows) return;
    float* x = memory_.scores + r * kKeys;
    float top = memory_.top[r];
    for (int k = 0; k < kKeys; ++k) {
      if (x[k] != -INFINITY) x[k] = (x[k] + center_) * a_.softmax_scale * kLog2E;
      top = fmaxf(top, x[k]);
    }
    const float by = weight_of(memory_.top[r], top);
    float total = memory_.total[r] * by;
    for (int k = 0; k < kKeys; ++k) {
      x[k] = x[k] == -INFINITY ? 0 : exp2_fast(x[k] - top);
      total += x[k];
    }
    memory_.top[r] = top, memory_.total[r] = total, memory_.factor[r] = by;
  }

  // A thread for a channel, or two.
  __device__ __forceinline__ void sum() {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int c = threadIdx.x + i * kThreads;
      if (c >= x_.record.latent_dim) continue;
      float v[kKeys];
#pragma unroll
      for (int k = 0; k < kKeys; ++k) v[k] = memory_.keys[k * stride_ + c];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float y = sums_[r][i] * memory_.factor[r];
#pragma unroll
        for (int k = 0; k < kKeys; ++k) {
          const float p = memory_.scores[r * kKeys + k];
          if (p != 0) y = fmaf(p, v[k], y);  // what a row does not see may be anything
        }
        sums_[r][i] = y;
      }
    }
  }

  // Sums of rotated latents become sums of latents.
  __device__ __forceinline__ void leave_codes() {
    exchange_sums(true);
    for (int r = warp_; r < rows_; r += kWarps) {
      float* y = memory_.queries + r * stride_;
      transform_generic(y, shape_, true, lane_);
      for (int c = lane_; c < x_.record.latent_dim; c += 32) {
        float v = y[c];
        if (x_.signs) v *= x_.signs[c];
        if (a_.channels.inverse) v *= a_.channels.inverse[c];
        y[c] = a_.channels.center ? fmaf(memory_.total[r], a_.channels.center[c], v) : v;
      }
    }
    __syncthreads();
    exchange_sums(false);
  }
  // The sums to the memory of queries, or back.
  __device__ __forceinline__ void exchange_sums(bool to_memory) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int c = threadIdx.x + i * kThreads;
        if (c >= x_.record.latent_dim) continue;
        float& in_memory = memory_.queries[r * stride_ + c];
        if (to_memory) {
          in_memory = sums_[r][i];
        } else {
          sums_[r][i] = in_memory;
        }
      }
    }
    __syncthreads();
  }

  __device__ __forceinline__ void write() const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= rows_) continue;
      const RowPlace row = place(r);
      const int64_t to = int64_t{row.token} * a_.q_heads + row.head;
      const float total = memory_.total[r], inverse = total == 0 ? 0 : 1 / total;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int c = threadIdx.x + i * kThreads;
        if (c < x_.record.latent_dim)
          store_float(a_.out, a_.dtype, to * x_.record.latent_dim + c, sums_[r][i] * inverse);
      }
      if (threadIdx.x == 0) a_.lse[to] = total == 0 ? -INFINITY : (memory_.top[r] + log2f(total)) * kLn2;
    }
  }

  const Latents& x_;
  const Attention& a_;
  const GenericShape& shape_;
  const int stride_;
  const Memory memory_;
  const int warp_, lane_, sequence_, length_, queries_, first_query_, first_row_;
  const Attention::Tail tail_;
  int rows_ = 0;
  float center_ = 0;  // thread r: the center's product with row r
  float sums_[kRows][kOwn];
};

__global__ void __launch_bounds__(kThreads)
    general_kernel(const __grid_constant__ Latents x, const __grid_constant__ GenericShape shape, unsigned row_blocks) {
  extern __shared__ float dynamic[];
  const Attention& a = x.a;
  clear_padding<uint16_t>(a, x.record.latent_dim * element_size(a.dtype) / 2,
                          int64_t{blockIdx.x} * kThreads + threadIdx.x, int64_t{gridDim.x} * kThreads);
  const int sequence = blockIdx.x / row_blocks, first_row = blockIdx.x % row_blocks * kRows;
  if (sequence < a.seqs) GeneralBlock(x, shape, dynamic, sequence, first_row).run();
}

}  // namespace

void attend_general(const Latents& call, cudaStream_t stream) {
  const Attention& a = call.a;
  GenericShape shape(format::split_dim(call.record.latent_dim));
  shape.transforms = call.signs != nullptr;
  const unsigned row_blocks = num_blocks(call.most_rows(), kRows);
  const unsigned blocks = num_blocks(int64_t{row_blocks} * std::max(a.seqs, 1), 1);
  general_kernel<<<blocks, kThreads, Memory::bytes(stride_of(call.channels())), stream>>>(call, shape, row_blocks);
  check_cuda(cudaGetLastError(), "mla_attention");
}

}  // namespace turboquant::cuda::mla
