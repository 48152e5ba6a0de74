// nvcc: -fmad=true
#include "decode_kernels.cuh"

template <>
turboquant::cuda::DecodeKernel turboquant::cuda::find_decode<576>(int key_bits, bool key_uniform, int value_bits,
                                                                  bool value_uniform, int rows) {
  return find_decode_kernel<576>(key_bits, key_uniform, value_bits, value_uniform, rows);
}
