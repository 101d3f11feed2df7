#include <cstring>

#include "staging/cuda/row_rounding.h"
#include "staging/row_levels.h"

namespace cpr_ext {

namespace {

constexpr int kThreads = 256;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kUnit = 4;  // elements of a row that a lane has at once

struct RoundedCopy {
  RoundedRows rows;
  int32_t elements;   // of a row
  bool is_wide;       // four elements of a row can be read and written at once
  int32_t log_lanes;  // lanes per row, at most a warp's
};

// The row that a group of lanes has. Lanes beyond the last row take that one, and write nothing, as
// all lanes of a warp are needed to reduce.
struct RowLanes {
  int lane;
  int lanes;
  int64_t position;
  bool is_row;
  float* row;

  __device__ explicit RowLanes(const RoundedCopy& copy) {
    lanes = 1 << copy.log_lanes;
    const int thread = static_cast<int>(threadIdx.x);
    lane = thread & (lanes - 1);
    position = static_cast<int64_t>(blockIdx.x) * (kThreads >> copy.log_lanes) +
               (thread >> copy.log_lanes);
    const RoundedRows& rows = copy.rows;
    is_row = position < rows.count;
    if (!is_row) position = rows.count - 1;
    const int64_t row_id =
        rows.row_ids == nullptr ? rows.range_begin + position : rows.row_ids[position];
    row = reinterpret_cast<float*>(rows.table.data + (row_id - rows.table.first_row_id) *
                                                         rows.table.row_stride_bytes);
  }

  __device__ int32_t largest(int32_t value) const {
    for (int delta = lanes / 2; delta > 0; delta /= 2) {
      const int32_t other =
          __shfl_sync(kAllLanes, value, static_cast<int>(threadIdx.x ^ delta) & 31);
      value = other > value ? other : value;
    }
    return value;
  }
};

// Elements of a row from `begin` on. Behind its end the first of them again, which changes no
// smallest or largest.
struct Unit {
  float values[kUnit];

  __device__ Unit(const RoundedCopy& copy, const float* row, int begin) {
    if (copy.is_wide) {
      const uint4 bits = *reinterpret_cast<const uint4*>(row + begin);
      values[0] = float_of(bits.x);
      values[1] = float_of(bits.y);
      values[2] = float_of(bits.z);
      values[3] = float_of(bits.w);
      return;
    }
#pragma unroll
    for (int k = 0; k < kUnit; ++k) values[k] = row[begin + k < copy.elements ? begin + k : begin];
  }
};

__device__ inline void store(float* row, const RoundedCopy& copy, int begin,
                             const float (&values)[kUnit]) {
  if (copy.is_wide) {
    *reinterpret_cast<uint4*>(row + begin) = {bits_of(values[0]), bits_of(values[1]),
                                              bits_of(values[2]), bits_of(values[3])};
    return;
  }
#pragma unroll
  for (int k = 0; k < kUnit; ++k) {
    if (begin + k < copy.elements) row[begin + k] = values[k];
  }
}

// Codes of a unit lie one after the other, the first in the lowest bits: 4 or 8 bytes. Packed rows
// of a multiple of four elements begin at a multiple of 4 bytes.
template <int kBytes>
__device__ void store_codes(std::byte* codes, const RoundedCopy& copy, int begin, uint64_t bits) {
  std::byte* const to = codes + begin * kBytes;
  if (copy.is_wide) {
    reinterpret_cast<uint32_t*>(to)[0] = static_cast<uint32_t>(bits);
    if constexpr (kBytes == 2) {
      reinterpret_cast<uint32_t*>(to)[1] = static_cast<uint32_t>(bits >> 32);
    }
    return;
  }
  const int left = copy.elements - begin;
  const int bytes = (left < kUnit ? left : kUnit) * kBytes;
  for (int i = 0; i < bytes; ++i) to[i] = static_cast<std::byte>(bits >> (8 * i) & 255);
}

template <int kBytes>
__device__ uint64_t load_codes(const std::byte* codes, const RoundedCopy& copy, int begin) {
  const std::byte* const from = codes + begin * kBytes;
  uint64_t bits = 0;
  if (copy.is_wide) {
    bits = reinterpret_cast<const uint32_t*>(from)[0];
    if constexpr (kBytes == 2) {
      bits |= static_cast<uint64_t>(reinterpret_cast<const uint32_t*>(from)[1]) << 32;
    }
    return bits;
  }
  const int left = copy.elements - begin;
  const int bytes = (left < kUnit ? left : kUnit) * kBytes;
  for (int i = 0; i < bytes; ++i) bits |= static_cast<uint64_t>(from[i]) << (8 * i);
  return bits;
}

// Each precision has: scale_of(), which all lanes of a warp compute for their rows; code(value),
// the bits of a value, and value(code), what they mean; kBytes of a code; and write(), what follows
// the codes of a row.
struct Int8Code {
  static constexpr int kBytes = 1;
  Int8Scale scale;

  template <class Units>
  __device__ static Int8Code scale_of(const RowLanes& at, const Units& units) {
    int32_t largest = INT32_MIN, smallest_inverted = INT32_MIN;
    units.for_each([&](int, const Unit& unit) {
#pragma unroll
      for (const float value : unit.values) {
        const int32_t order = order_of(value);
        largest = order > largest ? order : largest;
        smallest_inverted = ~order > smallest_inverted ? ~order : smallest_inverted;
      }
    });
    return {int8_scale(value_of(~at.largest(smallest_inverted)), value_of(at.largest(largest)))};
  }
  __device__ static Int8Code read(const std::byte* end) {
    Int8Code code{};
    std::memcpy(&code.scale.scale, end, sizeof(float));
    std::memcpy(&code.scale.bias, end + sizeof(float), sizeof(float));
    return code;
  }
  __device__ void write(std::byte* end) const {
    std::memcpy(end, &scale.scale, sizeof(float));
    std::memcpy(end + sizeof(float), &scale.bias, sizeof(float));
  }
  __device__ uint32_t code(float value) const { return to_int8(value, scale); }
  __device__ float value(uint32_t code) const { return from_int8(code, scale.scale, scale.bias); }
};

struct Float16Code {
  static constexpr int kBytes = 2;
  Float16Scale scale;

  template <class Units>
  __device__ static Float16Code scale_of(const RowLanes& at, const Units& units) {
    int32_t largest = 0;
    units.for_each([&](int, const Unit& unit) {
#pragma unroll
      for (const float value : unit.values) {
        const auto magnitude = static_cast<int32_t>(magnitude_bits(value));
        largest = magnitude > largest ? magnitude : largest;
      }
    });
    return {float16_scale(static_cast<uint32_t>(at.largest(largest)))};
  }
  __device__ static Float16Code read(const std::byte* end) {
    Float16Code code{};
    std::memcpy(&code.scale.scale, end, sizeof(float));
    return code;
  }
  __device__ void write(std::byte* end) const { std::memcpy(end, &scale.scale, sizeof(float)); }
  __device__ uint32_t code(float value) const { return to_float16(value * scale.inverse); }
  __device__ float value(uint32_t code) const { return from_float16(code) * scale.scale; }
};

// A lane's part of a row, of which the first unit stays in registers; the others are in the first-
// level cache when they are read again.
class LanesPart {
 public:
  __device__ LanesPart(const RowLanes& at, const RoundedCopy& copy)
      : at_(at), copy_(copy), first_(copy, at.row, first_begin()) {}

  // body(begin, unit) for each of its units
  template <class Body>
  __device__ void for_each(const Body& body) const {
    if (at_.lane * kUnit < copy_.elements) body(at_.lane * kUnit, first_);
    for (int begin = (at_.lane + at_.lanes) * kUnit; begin < copy_.elements;
         begin += at_.lanes * kUnit) {
      body(begin, Unit(copy_, at_.row, begin));
    }
  }

 private:
  // A lane without elements has the row's first: where it takes part it changes nothing.
  __device__ int first_begin() const {
    return at_.lane * kUnit < copy_.elements ? at_.lane * kUnit : 0;
  }

  const RowLanes& at_;
  const RoundedCopy& copy_;
  const Unit first_;
};

template <class Code>
__device__ void round_row(const RoundedCopy& copy) {
  const RowLanes at(copy);
  const LanesPart part(at, copy);
  const Code code = Code::scale_of(at, part);
  if (!at.is_row) return;
  std::byte* const out =
      copy.rows.packed + at.position * stored_row_bytes(copy.rows.precision, copy.elements);
  part.for_each([&](int begin, const Unit& unit) {
    uint64_t bits = 0;
#pragma unroll
    for (int k = 0; k < kUnit; ++k) {
      if (!code.scale.is_number || begin + k >= copy.elements) continue;
      bits |= static_cast<uint64_t>(code.code(unit.values[k])) << (k * Code::kBytes * 8);
    }
    store_codes<Code::kBytes>(out, copy, begin, bits);
  });
  if (at.lane == 0) code.write(out + copy.elements * Code::kBytes);
}

template <class Code>
__device__ void restore_row(const RoundedCopy& copy) {
  const RowLanes at(copy);
  if (!at.is_row) return;
  const std::byte* const from =
      copy.rows.packed + at.position * stored_row_bytes(copy.rows.precision, copy.elements);
  const Code code = Code::read(from + copy.elements * Code::kBytes);
  for (int begin = at.lane * kUnit; begin < copy.elements; begin += at.lanes * kUnit) {
    const uint64_t bits = load_codes<Code::kBytes>(from, copy, begin);
    float values[kUnit];
#pragma unroll
    for (int k = 0; k < kUnit; ++k) {
      values[k] = code.value(static_cast<uint32_t>(bits >> (k * Code::kBytes * 8)) &
                             ((1u << (Code::kBytes * 8)) - 1));
    }
    store(at.row, copy, begin, values);
  }
}

__global__ void __launch_bounds__(kThreads)
    round_rows_kernel(const __grid_constant__ RoundedCopy copy) {
  if (copy.rows.precision == RowPrecision::kInt8) {
    round_row<Int8Code>(copy);
  } else {
    round_row<Float16Code>(copy);
  }
}

__global__ void __launch_bounds__(kThreads)
    restore_rows_kernel(const __grid_constant__ RoundedCopy copy) {
  if (copy.rows.precision == RowPrecision::kInt8) {
    restore_row<Int8Code>(copy);
  } else {
    restore_row<Float16Code>(copy);
  }
}

RoundedCopy copy_of(const RoundedRows& rows) {
  const RowArray& table = rows.table;
  const auto elements = static_cast<int32_t>(table.row_bytes / static_cast<int64_t>(sizeof(float)));
  const auto bits =
      reinterpret_cast<uintptr_t>(table.data) | static_cast<uintptr_t>(table.row_stride_bytes);
  RoundedCopy copy{rows, elements, elements % kUnit == 0 && bits % sizeof(uint4) == 0, 0};
  while (copy.log_lanes < 5 && (kUnit << copy.log_lanes) < elements) ++copy.log_lanes;
  return copy;
}

int64_t blocks_of(const RoundedCopy& copy) {
  const int64_t per_block = kThreads >> copy.log_lanes;
  return (copy.rows.count + per_block - 1) / per_block;
}

}  // namespace

void launch_rounding(const RoundedRows& rows, cudaStream_t stream) {
  const RoundedCopy copy = copy_of(rows);
  CPR_EXT_LAUNCH(round_rows_kernel, blocks_of(copy), kThreads, stream, copy);
}

void load_rounding() { load_kernel(round_rows_kernel); }

void launch_restoring(const RoundedRows& rows, cudaStream_t stream) {
  const RoundedCopy copy = copy_of(rows);
  CPR_EXT_LAUNCH(restore_rows_kernel, blocks_of(copy), kThreads, stream, copy);
}

}  // namespace cpr_ext
