#include "staging/row_rounding.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/instruction_set.h"
#include "staging/row_blocks.h"
#include "staging/row_levels.h"

namespace cpr_ext {

namespace {

// body(i) for each element of a row, in loops whose lengths compilers know, so that they use
// vectors. Where the last one would be short it begins earlier: some elements get the same twice.
template <class Body>
CPR_EXT_KERNEL_BODY void for_elements(int64_t elements, const Body& body) {
  constexpr int64_t kLong = 64, kShort = 16;
  int64_t i = 0;
  for (; i + kLong <= elements; i += kLong) {
#pragma GCC unroll 1
    for (int64_t k = i; k < i + kLong; ++k) body(k);
  }
  for (; i + kShort <= elements; i += kShort) {
#pragma GCC unroll 1
    for (int64_t k = i; k < i + kShort; ++k) body(k);
  }
  if (i == elements) return;
  if (i > 0) {
#pragma GCC unroll 1
    for (int64_t k = elements - kShort; k < elements; ++k) body(k);
  } else {
    for (; i < elements; ++i) body(i);
  }
}

// The same where body() reduces.
template <class Body>
CPR_EXT_KERNEL_BODY void over_elements(int64_t elements, const Body& body) {
  constexpr int64_t kShort = 16;
  const int64_t whole = elements / kShort * kShort;
#pragma GCC unroll 1
  for (int64_t i = 0; i < whole; ++i) body(i);
  if (whole == elements) return;
  if (whole > 0) {
#pragma GCC unroll 1
    for (int64_t i = elements - kShort; i < elements; ++i) body(i);
  } else {
    for (int64_t i = 0; i < elements; ++i) body(i);
  }
}

CPR_EXT_KERNEL_BODY void round_int8(const float* __restrict row, int64_t elements,
                                    uint8_t* __restrict out) {
  int32_t smallest = order_of(row[0]), largest = smallest;
  over_elements(elements, [&](int64_t i) CPR_EXT_KERNEL_LAMBDA {
    const int32_t order = order_of(row[i]);
    smallest = std::min(smallest, order);
    largest = std::max(largest, order);
  });
  const Int8Scale scale = int8_scale(value_of(smallest), value_of(largest));
  if (__builtin_expect(scale.is_number, 1)) {
    for_elements(elements, [&](int64_t i) CPR_EXT_KERNEL_LAMBDA {
      out[i] = static_cast<uint8_t>(to_int8(row[i], scale));
    });
  } else {
    std::memset(out, 0, static_cast<size_t>(elements));
  }
  std::memcpy(out + elements, &scale.scale, sizeof(float));
  std::memcpy(out + elements + sizeof(float), &scale.bias, sizeof(float));
}

CPR_EXT_KERNEL_BODY void restore_int8(const uint8_t* __restrict stored, int64_t elements,
                                      float* __restrict row) {
  float scale, bias;
  std::memcpy(&scale, stored + elements, sizeof(scale));
  std::memcpy(&bias, stored + elements + sizeof(scale), sizeof(bias));
  for_elements(elements, [&](int64_t i)
                             CPR_EXT_KERNEL_LAMBDA { row[i] = from_int8(stored[i], scale, bias); });
}

CPR_EXT_KERNEL_BODY void round_float16(const float* __restrict row, int64_t elements,
                                       uint8_t* __restrict out) {
  int32_t largest = 0;
  over_elements(elements, [&](int64_t i) CPR_EXT_KERNEL_LAMBDA {
    largest = std::max(largest, static_cast<int32_t>(magnitude_bits(row[i])));
  });
  const Float16Scale scale = float16_scale(static_cast<uint32_t>(largest));
  if (__builtin_expect(scale.is_number, 1)) {
    auto* __restrict halves = reinterpret_cast<uint16_t*>(out);  // rows are multiples of two bytes
    for_elements(elements, [&](int64_t i) CPR_EXT_KERNEL_LAMBDA {
      halves[i] = static_cast<uint16_t>(to_float16(row[i] * scale.inverse));
    });
  } else {
    std::memset(out, 0, static_cast<size_t>(elements * 2));
  }
  std::memcpy(out + elements * 2, &scale.scale, sizeof(float));
}

CPR_EXT_KERNEL_BODY void restore_float16(const uint8_t* __restrict stored, int64_t elements,
                                         float* __restrict row) {
  float scale;
  std::memcpy(&scale, stored + elements * 2, sizeof(scale));
  const auto* __restrict halves = reinterpret_cast<const uint16_t*>(stored);
  for_elements(elements,
               [&](int64_t i) CPR_EXT_KERNEL_LAMBDA { row[i] = from_float16(halves[i]) * scale; });
}

// What there is to do with rows [begin, end); `stored` is the place of row 0.
struct RoundingTask {
  const RowsOf& rows;
  RowPrecision precision;
  int64_t begin;
  int64_t end;
};

// kDim: elements of a row if they are known, else 0.
template <int64_t kDim, class Body>
CPR_EXT_KERNEL_BODY void for_rows(const RoundingTask& block, const Body& body) {
  const RowsOf& rows = block.rows;
  const int64_t elements =
      kDim > 0 ? kDim : rows.array->row_bytes / static_cast<int64_t>(sizeof(float));
  const int64_t row_bytes = elements * static_cast<int64_t>(sizeof(float));
  const int64_t stored_bytes = stored_row_bytes(block.precision, elements);
  const int64_t ahead = rows_ahead(row_bytes, rows.row_ids == nullptr);
  for (int64_t i = block.begin; i < block.end; ++i) {
    if (i + ahead < block.end) prefetch_row(rows.row(i + ahead), row_bytes);
    body(reinterpret_cast<float*>(rows.row(i)), elements, i * stored_bytes);
  }
}

// The shortest rows, of which much is not vectors, have loops of their own.
template <class Body>
CPR_EXT_KERNEL_BODY void for_rows(const RoundingTask& block, const Body& body) {
  switch (block.rows.array->row_bytes / static_cast<int64_t>(sizeof(float))) {
    case 16:
      return for_rows<16>(block, body);
    case 32:
      return for_rows<32>(block, body);
    default:
      return for_rows<0>(block, body);
  }
}

CPR_EXT_KERNEL_BODY void round_body(const RoundingTask& block, std::byte* stored) {
  auto* out = reinterpret_cast<uint8_t*>(stored);
  if (block.precision == RowPrecision::kInt8) {
    for_rows(block, [&](const float* row, int64_t elements, int64_t at)
                        CPR_EXT_KERNEL_LAMBDA { round_int8(row, elements, out + at); });
  } else {
    for_rows(block, [&](const float* row, int64_t elements, int64_t at)
                        CPR_EXT_KERNEL_LAMBDA { round_float16(row, elements, out + at); });
  }
}

CPR_EXT_KERNEL_BODY void restore_body(const RoundingTask& block, const std::byte* stored) {
  const auto* from = reinterpret_cast<const uint8_t*>(stored);
  if (block.precision == RowPrecision::kInt8) {
    for_rows(block, [&](float* row, int64_t elements, int64_t at)
                        CPR_EXT_KERNEL_LAMBDA { restore_int8(from + at, elements, row); });
  } else {
    for_rows(block, [&](float* row, int64_t elements, int64_t at)
                        CPR_EXT_KERNEL_LAMBDA { restore_float16(from + at, elements, row); });
  }
}

// One text, compiled for each instruction set.
void round_portable(const RoundingTask& block, std::byte* out) { round_body(block, out); }
CPR_EXT_AVX2 void round_avx2(const RoundingTask& block, std::byte* out) { round_body(block, out); }
CPR_EXT_AVX512 void round_avx512(const RoundingTask& block, std::byte* out) {
  round_body(block, out);
}
void restore_portable(const RoundingTask& block, const std::byte* stored) {
  restore_body(block, stored);
}
CPR_EXT_AVX2 void restore_avx2(const RoundingTask& block, const std::byte* stored) {
  restore_body(block, stored);
}
CPR_EXT_AVX512 void restore_avx512(const RoundingTask& block, const std::byte* stored) {
  restore_body(block, stored);
}

template <class Form>
Form form_of(Form portable, Form avx2, Form avx512) {
  const InstructionSet set = instruction_set();
  return set == InstructionSet::kAvx512 ? avx512 : set == InstructionSet::kAvx2 ? avx2 : portable;
}

}  // namespace

void gather_rounded(const RowsOf& rows, RowPrecision precision, std::byte* out,
                    ThreadPool* threads) {
  const auto round = form_of(round_portable, round_avx2, round_avx512);
  for_blocks(rows.count, rows.array->row_bytes, threads,
             [&](int64_t begin, int64_t end) { round({rows, precision, begin, end}, out); });
}

void scatter_rounded(const std::byte* stored, RowPrecision precision, const RowsOf& rows,
                     ThreadPool* threads) {
  const auto restore = form_of(restore_portable, restore_avx2, restore_avx512);
  for_blocks(rows.count, rows.array->row_bytes, threads,
             [&](int64_t begin, int64_t end) { restore({rows, precision, begin, end}, stored); });
}

int64_t find_nan_row(const std::byte* stored, RowPrecision precision, int64_t elements,
                     int64_t count) {
  const int64_t scale_at = precision == RowPrecision::kInt8 ? elements : elements * 2;
  const int64_t row_bytes = stored_row_bytes(precision, elements);
  for (int64_t i = 0; i < count; ++i) {
    float scale;
    std::memcpy(&scale, stored + i * row_bytes + scale_at, sizeof(scale));
    if (std::isnan(scale)) return i;
  }
  return -1;
}

}  // namespace cpr_ext
