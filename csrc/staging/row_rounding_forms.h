// The forms of row_rounding.h for one run of rows: portable, which is the specification, for AVX2
// and for AVX-512.
#pragma once

#include <cstddef>
#include <cstdint>

#include "staging/row_levels.h"
#include "staging/row_rounding.h"

namespace cpr_ext {

// Rounds rows [begin, end) of `rows` into `out`, the place of row 0; see gather_rounded().
using RoundBlock = float (*)(const RowsOf& rows, RowPrecision precision, int64_t begin, int64_t end,
                             std::byte* out, uint8_t* broken);
// Its reverse.
using RestoreBlock = void (*)(const std::byte* stored, RowPrecision precision, int64_t begin,
                              int64_t end, const RowsOf& rows);

float round_block_portable(const RowsOf& rows, RowPrecision precision, int64_t begin, int64_t end,
                           std::byte* out, uint8_t* broken);
void restore_block_portable(const std::byte* stored, RowPrecision precision, int64_t begin,
                            int64_t end, const RowsOf& rows);
// Only where the CPU has AVX2, FMA and F16C.
float round_block_avx2(const RowsOf& rows, RowPrecision precision, int64_t begin, int64_t end,
                       std::byte* out, uint8_t* broken);
void restore_block_avx2(const std::byte* stored, RowPrecision precision, int64_t begin, int64_t end,
                        const RowsOf& rows);
// Only where the CPU has AVX-512.
float round_block_avx512(const RowsOf& rows, RowPrecision precision, int64_t begin, int64_t end,
                         std::byte* out, uint8_t* broken);
void restore_block_avx512(const std::byte* stored, RowPrecision precision, int64_t begin,
                          int64_t end, const RowsOf& rows);

}  // namespace cpr_ext
