// nvcc: -fmad=true
#include "cuda/attention/split_kv_instances.cuh"

template <>
turboquant::cuda::DecodeKernel turboquant::cuda::find_split_kv<96>(int key_bits, bool key_uniform, int value_bits,
                                                                   bool value_uniform, int rows) {
  return find_split_kv_kernel<96>(key_bits, key_uniform, value_bits, value_uniform, rows);
}
