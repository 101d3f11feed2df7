#include "tracking/row_change.h"

#include <cmath>
#include <cstring>
#include <limits>

namespace cpr_ext {

namespace {

float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Each format: its stored type, the type to compute in, and the way from one to the other.
struct Float64 {
  using Stored = double;
  using Value = double;
  static double load(double stored) { return stored; }
};

struct Float32 {
  using Stored = float;
  using Value = float;
  static float load(float stored) { return stored; }
};

struct BFloat16 {
  using Stored = uint16_t;
  using Value = float;
  static float load(uint16_t stored) { return float_of_bits(uint32_t{stored} << 16); }
};

struct Float16 {
  using Stored = uint16_t;
  using Value = float;
  // Exponent and mantissa move into place; multiplying by 2^112 corrects the exponent's bias, for
  // subnormals too. Infinity and NaN keep an exponent of all ones.
  static float load(uint16_t stored) {
    const uint32_t magnitude = uint32_t{stored & 0x7fffu} << 13;
    const uint32_t sign = uint32_t{stored & 0x8000u} << 16;
    const float scaled = float_of_bits(magnitude) * float_of_bits(0x77800000u);
    uint32_t bits;
    std::memcpy(&bits, &scaled, sizeof(bits));
    if (magnitude >= 0x7c00u << 13) bits |= 0x7f800000u;
    return float_of_bits(bits | sign);
  }
};

// As the fast sum, element by element, with the meaning of NaN and infinity that the header states.
template <class Format>
typename Format::Value careful_sum(const typename Format::Stored* now,
                                   const typename Format::Stored* before, int64_t size) {
  using Value = typename Format::Value;
  Value sum = 0;
  for (int64_t i = 0; i < size; ++i) {
    const Value value = Format::load(now[i]);
    const Value old = Format::load(before[i]);
    if (std::isnan(value)) return value;
    if (value == old) continue;
    const Value step = std::isnan(old) ? std::numeric_limits<Value>::infinity() : value - old;
    sum += step * step;
  }
  return sum;
}

template <class Format>
float norm(const void* now_data, const void* before_data, int64_t size) {
  using Value = typename Format::Value;
  const auto* now = static_cast<const typename Format::Stored*>(now_data);
  const auto* before = static_cast<const typename Format::Stored*>(before_data);
  constexpr int kLanes = 8;  // independent sums, so that a vector unit can hold them
  Value lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const Value step = Format::load(now[i + lane]) - Format::load(before[i + lane]);
      lanes[lane] += step * step;
    }
  }
  for (int lane = 0; i < size; ++i, ++lane) {
    const Value step = Format::load(now[i]) - Format::load(before[i]);
    lanes[lane] += step * step;
  }
  Value sum = ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) +
              ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
  if (std::isnan(sum)) sum = careful_sum<Format>(now, before, size);
  return static_cast<float>(std::sqrt(sum));
}

}  // namespace

float row_change(DType dtype, const void* now, const void* before, int64_t embedding_dim) {
  switch (dtype) {
    case DType::kFloat64:
      return norm<Float64>(now, before, embedding_dim);
    case DType::kBFloat16:
      return norm<BFloat16>(now, before, embedding_dim);
    case DType::kFloat16:
      return norm<Float16>(now, before, embedding_dim);
    default:
      return norm<Float32>(now, before, embedding_dim);
  }
}

}  // namespace cpr_ext
