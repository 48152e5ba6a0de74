// pack, unpack: dense little-endian bit strings of codes, 1 to 8 bits (docs/format.md section 7).
#include "cpu/codec/codes.h"
#include "cpu/common/torch.h"
#include "cpu/kernels.h"

namespace turboquant::cpu {
namespace {

// codes: uint8 [..., d], contiguous -> uint8 [..., dense_row_bytes(d, bits)]
Tensor pack(const Tensor& codes, int64_t bits) {
  check_pack_bits(bits);
  const int64_t d = check_codes(codes), row_bytes = format::dense_row_bytes(d, bits), rows = codes.numel() / d;
  const uint8_t* in = data_of<uint8_t>(codes);
  check_codes_fit(codes, "codes", static_cast<int>(bits));

  Tensor packed = new_tensor(codes, leading_shape(codes, 1, {row_bytes}), ScalarType::Byte);
  uint8_t* out = data_of<uint8_t>(packed);
  parallel_for(rows, row_grain(d, 1), [&](int64_t begin, int64_t end) {
    kernels().pack(in + begin * d, out + begin * row_bytes, end - begin, d, static_cast<int>(bits));
  });
  return packed;
}

// packed: uint8 [..., dense_row_bytes(d, bits)], contiguous -> uint8 [..., d]
Tensor unpack(const Tensor& packed, int64_t bits, int64_t d) {
  check_pack_bits(bits);
  const int64_t row_bytes = check_packed_rows(packed, d, bits);

  Tensor codes = new_tensor(packed, leading_shape(packed, 1, {d}), ScalarType::Byte);
  const uint8_t* in = data_of<uint8_t>(packed);
  uint8_t* out = data_of<uint8_t>(codes);
  parallel_for(packed.numel() / row_bytes, row_grain(d, 1), [&](int64_t begin, int64_t end) {
    kernels().unpack(in + begin * row_bytes, out + begin * d, end - begin, d, static_cast<int>(bits));
  });
  return codes;
}

}  // namespace
}  // namespace turboquant::cpu

STABLE_TORCH_LIBRARY_IMPL(turboquant, CPU, m) {
  m.impl("pack", TORCH_BOX(&turboquant::cpu::pack));
  m.impl("unpack", TORCH_BOX(&turboquant::cpu::unpack));
}
