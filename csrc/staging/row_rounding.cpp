#include "staging/row_rounding.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstring>
#include <mutex>

#include "core/instruction_set.h"
#include "staging/half_floats.h"
#include "staging/row_blocks.h"
#include "staging/row_rounding_forms.h"

namespace cpr_ext {

namespace {

struct Ends {
  float smallest;
  float largest;
  float magnitude;
};

// Of a row with NaN: anything. Zeros have no sign.
Ends ends_of(const float* row, int64_t elements) {
  Ends ends{row[0], row[0], 0};
  for (int64_t i = 0; i < elements; ++i) {
    ends.smallest = std::min(ends.smallest, row[i]);
    ends.largest = std::max(ends.largest, row[i]);
    ends.magnitude = std::max(ends.magnitude, std::fabs(row[i]));
  }
  ends.smallest += 0.0f;
  ends.largest += 0.0f;
  return ends;
}

// The largest error, if all errors are within the limit; also no NaN is within it.
class ErrorCheck {
 public:
  explicit ErrorCheck(float limit) : limit_(limit) {}
  void add(float value, float rounded) {
    const float error = std::fabs(value - rounded);
    fits_ &= error <= limit_;
    if (error > largest_) largest_ = error;
  }
  bool pass(float* largest_error) const {
    if (fits_) *largest_error = std::max(*largest_error, largest_);
    return fits_;
  }

 private:
  const float limit_;
  bool fits_ = true;
  float largest_ = 0;
};

bool round_int8(const float* row, int64_t elements, const Ends& ends, float epsilon, std::byte* out,
                float* largest_error) {
  const RowScale scale = scale_int8(ends.smallest, ends.largest, epsilon);
  ErrorCheck errors(limit_of(RowPrecision::kInt8, ends.largest - ends.smallest));
  for (int64_t i = 0; i < elements; ++i) {
    const int level = to_level(row[i], scale, 255);
    errors.add(row[i], from_int8(level, scale.scale, scale.bias));
    out[i] = static_cast<std::byte>(level);
  }
  std::memcpy(out + elements, &scale.scale, sizeof(float));
  std::memcpy(out + elements + sizeof(float), &scale.bias, sizeof(float));
  return errors.pass(largest_error);
}

bool round_int4(const float* row, int64_t elements, const Ends& ends, std::byte* out,
                float* largest_error) {
  const RowScale scale = scale_int4(ends.smallest, ends.largest);
  ErrorCheck errors(limit_of(RowPrecision::kInt4, ends.largest - ends.smallest));
  const int64_t level_bytes = (elements + 1) / 2;
  std::memset(out, 0, level_bytes);
  for (int64_t i = 0; i < elements; ++i) {
    const int level = to_level(row[i], scale, 15);
    errors.add(row[i], from_int4(level, scale.scale, scale.bias));
    out[i / 2] |= static_cast<std::byte>(level << (i % 2 * 4));
  }
  const uint16_t halves[] = {to_float16(scale.scale), to_float16(ends.smallest)};
  std::memcpy(out + level_bytes, halves, sizeof(halves));
  return errors.pass(largest_error);
}

template <uint16_t (*kTo)(float), float (*kFrom)(uint16_t)>
bool round_halves(const float* row, int64_t elements, float limit, std::byte* out,
                  float* largest_error) {
  ErrorCheck errors(limit);
  for (int64_t i = 0; i < elements; ++i) {
    const uint16_t half = kTo(row[i]);
    errors.add(row[i], kFrom(half));
    std::memcpy(out + i * sizeof(half), &half, sizeof(half));
  }
  return errors.pass(largest_error);
}

bool round_portable(const float* row, int64_t elements, RowPrecision precision, std::byte* out,
                    float* largest_error) {
  const Ends ends = ends_of(row, elements);
  switch (precision) {
    case RowPrecision::kInt8:
      return round_int8(row, elements, ends, kFbgemmEpsilon, out, largest_error) ||
             round_int8(row, elements, ends, 0, out, largest_error);
    case RowPrecision::kInt4:
      return round_int4(row, elements, ends, out, largest_error);
    case RowPrecision::kFloat16:
      return round_halves<to_float16, from_float16>(
          row, elements, limit_of(precision, ends.magnitude), out, largest_error);
    case RowPrecision::kBFloat16:
      return round_halves<to_bfloat16, from_bfloat16>(
          row, elements, limit_of(precision, ends.magnitude), out, largest_error);
    case RowPrecision::kExact:
      break;
  }
  assert(false && "an exact row is not rounded");
  return false;
}

template <float (*kFrom)(uint16_t)>
void restore_halves(const std::byte* stored, int64_t elements, float* row) {
  for (int64_t i = 0; i < elements; ++i) {
    uint16_t half;
    std::memcpy(&half, stored + i * sizeof(half), sizeof(half));
    row[i] = kFrom(half);
  }
}

void restore_row(const std::byte* stored, RowPrecision precision, int64_t elements, float* row) {
  const auto* levels = reinterpret_cast<const uint8_t*>(stored);
  float ends[2];
  uint16_t halves[2];
  switch (precision) {
    case RowPrecision::kInt8:
      std::memcpy(ends, stored + elements, sizeof(ends));
      for (int64_t i = 0; i < elements; ++i) row[i] = from_int8(levels[i], ends[0], ends[1]);
      return;
    case RowPrecision::kInt4:
      std::memcpy(halves, stored + (elements + 1) / 2, sizeof(halves));
      for (int i = 0; i < 2; ++i) ends[i] = from_float16(halves[i]);
      for (int64_t i = 0; i < elements; ++i) {
        const int level = levels[i / 2] >> (i % 2 * 4) & 15;
        row[i] = from_int4(level, ends[0], ends[1]);
      }
      return;
    case RowPrecision::kFloat16:
      return restore_halves<from_float16>(stored, elements, row);
    case RowPrecision::kBFloat16:
      return restore_halves<from_bfloat16>(stored, elements, row);
    case RowPrecision::kExact:
      std::memcpy(row, stored, elements * sizeof(float));
      return;
  }
}

struct Forms {
  RoundBlock round;
  RestoreBlock restore;
};

Forms forms() {
#if CPR_EXT_HAS_AVX512
  switch (instruction_set()) {
    case InstructionSet::kAvx2:
      return {round_block_avx2, restore_block_avx2};
    case InstructionSet::kAvx512:
      return {round_block_avx512, restore_block_avx512};
    case InstructionSet::kPortable:
      break;
  }
#endif
  return {round_block_portable, restore_block_portable};
}

}  // namespace

float round_block_portable(const RowsOf& rows, RowPrecision precision, int64_t begin, int64_t end,
                           std::byte* out, uint8_t* broken) {
  const int64_t elements = rows.array->row_bytes / static_cast<int64_t>(sizeof(float));
  const int64_t stored_bytes = stored_row_bytes(precision, elements);
  float largest_error = 0;
  for (int64_t i = begin; i < end; ++i) {
    std::byte* to = out + i * stored_bytes;
    const auto* row = reinterpret_cast<const float*>(rows.row(i));
    if (round_portable(row, elements, precision, to, &largest_error)) continue;
    std::memset(to, 0, stored_bytes);
    broken[i] = 1;
  }
  return largest_error;
}

void restore_block_portable(const std::byte* stored, RowPrecision precision, int64_t begin,
                            int64_t end, const RowsOf& rows) {
  const int64_t elements = rows.array->row_bytes / static_cast<int64_t>(sizeof(float));
  const int64_t stored_bytes = stored_row_bytes(precision, elements);
  for (int64_t i = begin; i < end; ++i) {
    restore_row(stored + i * stored_bytes, precision, elements,
                reinterpret_cast<float*>(rows.row(i)));
  }
}

float gather_rounded(const RowsOf& rows, RowPrecision precision, std::byte* out, uint8_t* broken,
                     ThreadPool* threads) {
  const RoundBlock round = forms().round;
  std::mutex mutex;
  float largest_error = 0;
  for_blocks(rows.count, rows.array->row_bytes, threads, [&](int64_t begin, int64_t end) {
    const float error = round(rows, precision, begin, end, out, broken);
    std::lock_guard<std::mutex> lock(mutex);
    largest_error = std::max(largest_error, error);
  });
  return largest_error;
}

bool round_row(const float* row, int64_t elements, RowPrecision precision, std::byte* out,
               float* largest_error) {
  if (round_portable(row, elements, precision, out, largest_error)) return true;
  std::memset(out, 0, stored_row_bytes(precision, elements));
  return false;
}

void scatter_rounded(const std::byte* stored, RowPrecision precision, const RowsOf& rows,
                     ThreadPool* threads) {
  const RestoreBlock restore = forms().restore;
  for_blocks(rows.count, rows.array->row_bytes, threads,
             [&](int64_t begin, int64_t end) { restore(stored, precision, begin, end, rows); });
}

}  // namespace cpr_ext
