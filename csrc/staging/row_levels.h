// The arithmetic of a rounded row, value by value: one text for the CPU's portable form, which is
// the specification, and for devices. Nothing in it may be contracted to a fused multiply-add but
// what says so: the product of int4 is exact.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/host_device.h"
#include "staging/half_floats.h"
#include "staging/row_precision.h"

namespace cpr_ext {

constexpr float kFbgemmEpsilon = 1e-8f;  // FBGEMM adds it to the range of a row in int8
// Below this range no row is rounded: limits would be too small to be computed.
constexpr float kSmallestExtent = 0x1p-100f;
constexpr float kLargestExtent = 0x1.fffffep+127f;

// The bound of a row, half a step. The factor is a little less than that, for what rounds on the
// way.
CPR_EXT_HOST_DEVICE constexpr float limit_factor(RowPrecision precision) {
  switch (precision) {
    case RowPrecision::kInt8:
      return static_cast<float>((1 - 0x1p-20) / (2 * 255));
    case RowPrecision::kInt4:
      return static_cast<float>((1 - 0x1p-20) / (2 * 15));
    case RowPrecision::kFloat16:
      return 0x1p-11f;
    default:
      return 0x1p-8f;
  }
}

// Infinity is no limit: nothing is within it.
CPR_EXT_HOST_DEVICE inline float limit_of(RowPrecision precision, float extent) {
  if (!(extent <= kLargestExtent)) return -1;
  return extent < kSmallestExtent ? 0 : extent * limit_factor(precision);
}

// Of int8 and int4: value = level * scale + bias.
struct RowScale {
  float scale;
  float bias;
  float inverse;
};

CPR_EXT_HOST_DEVICE inline RowScale scale_int8(float smallest, float largest, float epsilon) {
  const float extent = largest - smallest;
  return {extent / 255, smallest, 255 / (extent + epsilon)};
}

// As FBGEMM, which rounds bias and scale to float16 and takes 1 for a scale that is of no use:
// float16 has no number, other than 0, whose inverse is infinite.
CPR_EXT_HOST_DEVICE inline RowScale scale_int4(float smallest, float largest) {
  const float bias = from_float16(to_float16(smallest));
  const float extent = largest - bias;
  float scale = extent == 0 ? 1 : from_float16(to_float16(extent / 15));
  if (scale == 0) scale = 1;
  return {scale, bias, 1 / scale};
}

// To the nearest level, ties to even; NaN to 0.
CPR_EXT_HOST_DEVICE inline int to_level(float value, const RowScale& scale, float most) {
  const float level = std::nearbyint((value - scale.bias) * scale.inverse);
  if (!(level > 0)) return 0;
  return static_cast<int>(level < most ? level : most);
}

CPR_EXT_HOST_DEVICE inline float from_int8(int level, float scale, float bias) {
  return std::fma(static_cast<float>(level), scale, bias);
}

CPR_EXT_HOST_DEVICE inline float from_int4(int level, float scale, float bias) {
  return static_cast<float>(level) * scale + bias;
}

}  // namespace cpr_ext
