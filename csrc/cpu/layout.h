// How integer dot products read rows of codes. The layout of a row is chosen here, once for page records and once for
// dense rows; queries are laid out to match (kernels/dot_products.h). All of it is always inlined, see kernels.h.
#pragma once

#include "format.h"

namespace turboquant::cpu {

// Where the codes of 16 bytes of a row (a "quarter" of a 64-byte vector) belong.
struct Layout {
  format::Width width;
  // Whether the row is one bit string whose codes cross bytes. 16 bytes of it hold whole sets of 16 codes; each set is
  // a field. Otherwise a byte holds one code, or several: its fields.
  bool string;
};

// Spread codes are nibbles by the time that they are looked up.
TURBOQUANT_HD constexpr Layout looked_up(Layout l) {
  return !l.string && format::is_spread(l.width) ? Layout{format::Width::k4, false} : l;
}

// Dense rows whose codes divide a byte are read byte by byte, the others as bit strings, and so are single bits.
TURBOQUANT_HD constexpr Layout dense_layout(format::Width w) {
  switch (w) {
    case format::Width::k1:
    case format::Width::k3:
    case format::Width::k5: return {w, true};
    case format::Width::k2:
    case format::Width::k4:
    case format::Width::k8: break;
  }
  return {w, false};
}

// Rows of keys and latents are read in place, with one exception: three-bit rows whose last group has 16 channels,
// three 16-bit words. Such rows become rows of nibbles in scratch memory.
TURBOQUANT_HD constexpr bool in_place(const format::CodeRow& row) {
  return !format::is_spread(row.width) || row.channels % 32 == 0;
}
TURBOQUANT_HD constexpr Layout row_layout(const format::CodeRow& row) {
  return in_place(row) ? Layout{row.width, false} : Layout{format::Width::k4, false};
}
TURBOQUANT_HD constexpr Layout key_layout(const format::Record& r) { return row_layout(r.key_row()); }

// Codes of a byte, or sets of 16 codes in 16 bytes.
TURBOQUANT_HD constexpr int quarter_fields(Layout l) {
  return 8 / (l.string ? format::num_bits(l.width) : format::field_bits(l.width));
}
TURBOQUANT_HD constexpr int quarter_channels(Layout l) { return 16 * quarter_fields(l); }
TURBOQUANT_HD constexpr int quarter_bytes(Layout l) {
  if (l.string) return quarter_channels(l) * format::num_bits(l.width) / 8;
  return format::is_spread(l.width) ? 12 : 16;  // the fourth word is in the upper bits of the other three
}
TURBOQUANT_HD constexpr int quarters_per_row(int d, Layout l) {
  return (d + quarter_channels(l) - 1) / quarter_channels(l);
}

}  // namespace turboquant::cpu
