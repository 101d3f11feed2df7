#include <algorithm>
#include <cmath>
#include <cstring>

#include "staging/cuda/row_rounding.h"
#include "staging/row_levels.h"

namespace cpr_ext {

namespace {

constexpr int kThreads = 256;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kUnit = 4;  // elements of a row that a lane has at once

struct RoundedCopies {
  RoundedArray arrays[kMostRoundedArrays];
  RoundedRows rows;
  float* errors;  // of a rounding
  int32_t num_arrays;
  int32_t log_lanes;  // lanes per row, at most a warp's
};
static_assert(sizeof(RoundedCopies) <= 4096, "the parameters of a launch");

// The row that a group of lanes has. Lanes beyond the last row take that one, and write nothing, as
// all lanes of a warp are needed to reduce.
struct RowLanes {
  int lane;
  int lanes;
  int64_t position;
  int64_t row_id;
  bool is_row;

  __device__ explicit RowLanes(const RoundedCopies& copies) {
    lanes = 1 << copies.log_lanes;
    const int thread = static_cast<int>(threadIdx.x);
    lane = thread & (lanes - 1);
    position = static_cast<int64_t>(blockIdx.x) * (kThreads >> copies.log_lanes) +
               (thread >> copies.log_lanes);
    is_row = position < copies.rows.count;
    if (!is_row) position = copies.rows.count - 1;
    row_id = copies.rows.row_ids == nullptr ? copies.rows.range_begin + position
                                            : copies.rows.row_ids[position];
  }

  __device__ float* row(const RoundedArray& array) const {
    return reinterpret_cast<float*>(array.table +
                                    (row_id - array.first_row_id) * array.row_stride_bytes);
  }

  template <class Op>
  __device__ float reduce(float value, Op op) const {
    for (int delta = lanes / 2; delta > 0; delta /= 2) {
      value = op(value, __shfl_sync(kAllLanes, value, static_cast<int>(threadIdx.x ^ delta) & 31));
    }
    return value;
  }

  __device__ bool all(bool value) const {
    const unsigned first = (threadIdx.x & 31u) / lanes * lanes;
    const unsigned mine = (kAllLanes >> (32 - lanes)) << first;
    return (__ballot_sync(kAllLanes, value) & mine) == mine;
  }
};

__device__ inline float smaller(float a, float b) { return b < a ? b : a; }
__device__ inline float larger(float a, float b) { return b > a ? b : a; }

// Elements of a row from `begin` on. Behind its end the first of them again, which changes no
// smallest, largest or error.
struct Unit {
  float values[kUnit];

  __device__ Unit(const RoundedArray& array, const float* row, int begin) {
    if (array.is_wide) {
      const uint4 bits = *reinterpret_cast<const uint4*>(row + begin);
      values[0] = float_of(bits.x);
      values[1] = float_of(bits.y);
      values[2] = float_of(bits.z);
      values[3] = float_of(bits.w);
      return;
    }
#pragma unroll
    for (int k = 0; k < kUnit; ++k) values[k] = row[begin + k < array.elements ? begin + k : begin];
  }
};

__device__ inline void store(float* row, const RoundedArray& array, int begin,
                             const float (&values)[kUnit]) {
  if (array.is_wide) {
    *reinterpret_cast<uint4*>(row + begin) = {bits_of(values[0]), bits_of(values[1]),
                                              bits_of(values[2]), bits_of(values[3])};
    return;
  }
#pragma unroll
  for (int k = 0; k < kUnit; ++k) {
    if (begin + k < array.elements) row[begin + k] = values[k];
  }
}

// Each form has: code(value), the bits of a value; value(code), what they mean; kBits of a code;
// and what follows the codes in a row.
struct Int8Code {
  static constexpr int kBits = 8;
  static constexpr float kMost = 255;
  RowScale scale;

  __device__ uint32_t code(float value) const {
    return static_cast<uint32_t>(to_level(value, scale, kMost));
  }
  __device__ float value(uint32_t code) const {
    return from_int8(static_cast<int>(code), scale.scale, scale.bias);
  }
};

struct Int4Code {
  static constexpr int kBits = 4;
  static constexpr float kMost = 15;
  RowScale scale;

  __device__ uint32_t code(float value) const {
    return static_cast<uint32_t>(to_level(value, scale, kMost));
  }
  __device__ float value(uint32_t code) const {
    return from_int4(static_cast<int>(code), scale.scale, scale.bias);
  }
};

struct Float16Code {
  static constexpr int kBits = 16;
  __device__ uint32_t code(float value) const { return to_float16(value); }
  __device__ float value(uint32_t code) const { return from_float16(static_cast<uint16_t>(code)); }
};

struct BFloat16Code {
  static constexpr int kBits = 16;
  __device__ uint32_t code(float value) const { return to_bfloat16(value); }
  __device__ float value(uint32_t code) const { return from_bfloat16(static_cast<uint16_t>(code)); }
};

// Codes of a unit lie one after the other, the first in the lowest bits: 2, 4 or 8 bytes.
template <int kBits>
__device__ void store_codes(std::byte* codes, const RoundedArray& array, int begin, uint64_t bits) {
  std::byte* const to = codes + begin * kBits / 8;
  if (array.is_wide) {
    if constexpr (kBits == 16) {
      *reinterpret_cast<uint2*>(to) = {static_cast<unsigned>(bits),
                                       static_cast<unsigned>(bits >> 32)};
    } else if constexpr (kBits == 8) {
      *reinterpret_cast<uint32_t*>(to) = static_cast<uint32_t>(bits);
    } else {
      *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(bits);
    }
    return;
  }
  const int left = array.elements - begin;
  const int bytes = ((left < kUnit ? left : kUnit) * kBits + 7) / 8;
  for (int i = 0; i < bytes; ++i) to[i] = static_cast<std::byte>(bits >> (8 * i) & 255);
}

template <int kBits>
__device__ uint64_t load_codes(const std::byte* codes, const RoundedArray& array, int begin) {
  const std::byte* const from = codes + begin * kBits / 8;
  if (array.is_wide) {
    if constexpr (kBits == 16) {
      const uint2 both = *reinterpret_cast<const uint2*>(from);
      return static_cast<uint64_t>(both.y) << 32 | both.x;
    } else if constexpr (kBits == 8) {
      return *reinterpret_cast<const uint32_t*>(from);
    } else {
      return *reinterpret_cast<const uint16_t*>(from);
    }
  }
  const int left = array.elements - begin;
  const int bytes = ((left < kUnit ? left : kUnit) * kBits + 7) / 8;
  uint64_t bits = 0;
  for (int i = 0; i < bytes; ++i) bits |= static_cast<uint64_t>(from[i]) << (8 * i);
  return bits;
}

// Of a group's row; right in each of its lanes.
struct RowVerdict {
  bool fits;
  float error;  // the largest, if it fits
};

// A lane's part of a row, of which the first unit stays in registers; the others are in the first-
// level cache when they are read again.
class LanesPart {
 public:
  __device__ LanesPart(const RowLanes& at, const RoundedArray& array)
      : at_(at), array_(array), row_(at.row(array)), first_(array, row_, first_begin()) {}

  // body(begin, unit) for each of its units
  template <class Body>
  __device__ void for_each(const Body& body) const {
    if (at_.lane * kUnit < array_.elements) body(at_.lane * kUnit, first_);
    for (int begin = (at_.lane + at_.lanes) * kUnit; begin < array_.elements;
         begin += at_.lanes * kUnit) {
      body(begin, Unit(array_, row_, begin));
    }
  }

  struct RowEnds {
    float smallest;
    float largest;
  };
  // Zeros have no sign.
  __device__ RowEnds ends() const {
    float smallest = first_.values[0], largest = smallest;
    for_each([&](int, const Unit& unit) {
#pragma unroll
      for (const float value : unit.values) {
        smallest = smaller(smallest, value);
        largest = larger(largest, value);
      }
    });
    return {at_.reduce(smallest, smaller) + 0.0f, at_.reduce(largest, larger) + 0.0f};
  }

  __device__ float magnitude() const {
    float largest = 0;
    for_each([&](int, const Unit& unit) {
#pragma unroll
      for (const float value : unit.values) largest = larger(largest, std::fabs(value));
    });
    return at_.reduce(largest, larger);
  }

  // Writes the codes of the row's elements.
  template <class Form>
  __device__ RowVerdict encode(const Form& form, float limit, std::byte* codes) const {
    bool fits = true;
    float largest = 0;
    for_each([&](int begin, const Unit& unit) {
      uint64_t bits = 0;
#pragma unroll
      for (int k = 0; k < kUnit; ++k) {
        const uint32_t code = form.code(unit.values[k]);
        const float error = std::fabs(unit.values[k] - form.value(code));
        fits = fits && error <= limit;
        largest = larger(largest, error);
        if (begin + k < array_.elements) bits |= static_cast<uint64_t>(code) << (k * Form::kBits);
      }
      if (at_.is_row) store_codes<Form::kBits>(codes, array_, begin, bits);
    });
    return {at_.all(fits), at_.reduce(largest, larger)};
  }

  template <int kBits>
  __device__ void clear(std::byte* codes) const {
    for_each([&](int begin, const Unit&) { store_codes<kBits>(codes, array_, begin, 0); });
  }

 private:
  // A lane without elements has the row's first: where it takes part it changes nothing.
  __device__ int first_begin() const {
    return at_.lane * kUnit < array_.elements ? at_.lane * kUnit : 0;
  }

  const RowLanes& at_;
  const RoundedArray& array_;
  const float* const row_;
  const Unit first_;
};

// Bytes after bytes, as rows of int8 may lie anywhere.
__device__ inline void store_float(std::byte* to, float value) {
  std::memcpy(to, &value, sizeof(value));
}
__device__ inline void store_half(std::byte* to, uint16_t half) {
  std::memcpy(to, &half, sizeof(half));
}

__device__ RowVerdict round_int8(const RowLanes& at, const RoundedArray& array) {
  std::byte* const out = array.packed + at.position * (array.elements + 8);
  const LanesPart part(at, array);
  const LanesPart::RowEnds ends = part.ends();
  const float limit = limit_of(RowPrecision::kInt8, ends.largest - ends.smallest);
  Int8Code form{scale_int8(ends.smallest, ends.largest, kFbgemmEpsilon)};
  RowVerdict verdict = part.encode(form, limit, out);
  if (__any_sync(kAllLanes, !verdict.fits)) {  // all lanes are needed; rows that fit stay the same
    if (!verdict.fits) form.scale = scale_int8(ends.smallest, ends.largest, 0);
    verdict = part.encode(form, limit, out);
  }
  if (!at.is_row) return verdict;
  if (!verdict.fits) part.clear<8>(out);
  if (at.lane == 0) {
    store_float(out + array.elements, verdict.fits ? form.scale.scale : 0);
    store_float(out + array.elements + 4, verdict.fits ? form.scale.bias : 0);
  }
  return verdict;
}

__device__ RowVerdict round_int4(const RowLanes& at, const RoundedArray& array) {
  const int code_bytes = (array.elements + 1) / 2;
  std::byte* const out = array.packed + at.position * (code_bytes + 4);
  const LanesPart part(at, array);
  const LanesPart::RowEnds ends = part.ends();
  const Int4Code form{scale_int4(ends.smallest, ends.largest)};
  const float limit = limit_of(RowPrecision::kInt4, ends.largest - ends.smallest);
  const RowVerdict verdict = part.encode(form, limit, out);
  if (!at.is_row) return verdict;
  if (!verdict.fits) part.clear<4>(out);
  if (at.lane == 0) {
    store_half(out + code_bytes, verdict.fits ? to_float16(form.scale.scale) : 0);
    store_half(out + code_bytes + 2, verdict.fits ? to_float16(ends.smallest) : 0);
  }
  return verdict;
}

template <class Form>
__device__ RowVerdict round_halves(const RowLanes& at, const RoundedArray& array) {
  std::byte* const out = array.packed + at.position * array.elements * 2;
  const LanesPart part(at, array);
  const float limit = limit_of(array.precision, part.magnitude());
  const RowVerdict verdict = part.encode(Form(), limit, out);
  if (at.is_row && !verdict.fits) part.clear<16>(out);
  return verdict;
}

__device__ RowVerdict round_row(const RowLanes& at, const RoundedArray& array) {
  switch (array.precision) {
    case RowPrecision::kInt8:
      return round_int8(at, array);
    case RowPrecision::kInt4:
      return round_int4(at, array);
    case RowPrecision::kFloat16:
      return round_halves<Float16Code>(at, array);
    default:
      return round_halves<BFloat16Code>(at, array);
  }
}

// grid: blocks of rows. All rounded arrays of a table in one launch, row by row, as a row that
// breaks the bound in one of them is kept exactly in all. Such rows are few: they go straight to
// the slot, which is mapped.
__global__ void __launch_bounds__(kThreads)
    round_rows_kernel(const __grid_constant__ RoundedCopies copies) {
  const RowLanes at(copies);
  bool fits = true;
  float error = 0;
  for (int i = 0; i < copies.num_arrays; ++i) {
    const RowVerdict verdict = round_row(at, copies.arrays[i]);
    fits = fits && verdict.fits;
    if (verdict.fits) error = larger(error, verdict.error);
  }
  if (!at.is_row) return;
  if (at.lane == 0) copies.errors[at.position] = fits ? error : -error;
  if (fits) return;
  for (int i = 0; i < copies.num_arrays; ++i) {
    const RoundedArray& array = copies.arrays[i];
    const float* const row = at.row(array);
    float* const to = reinterpret_cast<float*>(array.exact) + at.position * array.elements;
    for (int k = at.lane; k < array.elements; k += at.lanes) to[k] = row[k];
  }
}

template <class Form>
__device__ void restore_codes(const RowLanes& at, const RoundedArray& array, const Form& form,
                              const std::byte* codes) {
  float* const row = at.row(array);
  for (int begin = at.lane * kUnit; begin < array.elements; begin += at.lanes * kUnit) {
    const uint64_t bits = load_codes<Form::kBits>(codes, array, begin);
    float values[kUnit];
#pragma unroll
    for (int k = 0; k < kUnit; ++k) {
      values[k] =
          form.value(static_cast<uint32_t>(bits >> (k * Form::kBits)) & ((1u << Form::kBits) - 1));
    }
    store(row, array, begin, values);
  }
}

__device__ inline float load_float(const std::byte* from) {
  float value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}
__device__ inline float load_half(const std::byte* from) {
  uint16_t half;
  std::memcpy(&half, from, sizeof(half));
  return from_float16(half);
}

__global__ void __launch_bounds__(kThreads)
    restore_rows_kernel(const __grid_constant__ RoundedCopies copies) {
  const RowLanes at(copies);
  if (!at.is_row) return;
  const RoundedArray& array = copies.arrays[blockIdx.y];
  const int elements = array.elements;
  const int code_bytes = (elements + 1) / 2;  // of int4
  const std::byte* from = array.packed;
  switch (array.precision) {
    case RowPrecision::kInt8:
      from += at.position * (elements + 8);
      return restore_codes(
          at, array, Int8Code{{load_float(from + elements), load_float(from + elements + 4), 0}},
          from);
    case RowPrecision::kInt4:
      from += at.position * (code_bytes + 4);
      return restore_codes(
          at, array, Int4Code{{load_half(from + code_bytes), load_half(from + code_bytes + 2), 0}},
          from);
    case RowPrecision::kFloat16:
      return restore_codes(at, array, Float16Code(), from + at.position * elements * 2);
    default:
      return restore_codes(at, array, BFloat16Code(), from + at.position * elements * 2);
  }
}

RoundedCopies copies_of(const RoundedRows& rows, const std::vector<RoundedArray>& arrays,
                        float* errors) {
  RoundedCopies copies{};
  copies.rows = rows;
  copies.errors = errors;
  copies.num_arrays = static_cast<int32_t>(arrays.size());
  std::copy(arrays.begin(), arrays.end(), copies.arrays);
  int32_t most = 0;
  for (const RoundedArray& array : arrays) most = std::max(most, array.elements);
  while (copies.log_lanes < 5 && (kUnit << copies.log_lanes) < most) ++copies.log_lanes;
  return copies;
}

int64_t blocks_of(const RoundedCopies& copies) {
  const int64_t per_block = kThreads >> copies.log_lanes;
  return (copies.rows.count + per_block - 1) / per_block;
}

}  // namespace

RoundedArray rounded_array(const StagedArray& array, std::byte* packed, std::byte* exact) {
  const RowArray& rows = array.rows;
  const auto elements = static_cast<int32_t>(rows.row_bytes / static_cast<int64_t>(sizeof(float)));
  const auto bits =
      reinterpret_cast<uintptr_t>(rows.data) | static_cast<uintptr_t>(rows.row_stride_bytes);
  const bool is_wide = elements % kUnit == 0 && bits % sizeof(uint4) == 0;
  return {rows.data,         packed,   exact,           rows.row_stride_bytes,
          rows.first_row_id, elements, array.precision, is_wide};
}

void launch_rounding(const RoundedRows& rows, const std::vector<RoundedArray>& arrays,
                     float* errors, cudaStream_t stream) {
  const RoundedCopies copies = copies_of(rows, arrays, errors);
  CPR_EXT_LAUNCH(round_rows_kernel, blocks_of(copies), kThreads, stream, copies);
}

void load_rounding() { load_kernel(round_rows_kernel); }

void launch_restoring(const RoundedRows& rows, const std::vector<RoundedArray>& arrays,
                      cudaStream_t stream) {
  const RoundedCopies copies = copies_of(rows, arrays, nullptr);
  CPR_EXT_LAUNCH(restore_rows_kernel, Grid(blocks_of(copies), copies.num_arrays), kThreads, stream,
                 copies);
}

}  // namespace cpr_ext
