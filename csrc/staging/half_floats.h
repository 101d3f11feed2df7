// float16 and bfloat16 from float32 and back, rounded to nearest, ties to even. For CPUs without
// instructions for it, and for devices, which get the same bits so.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/host_device.h"

namespace cpr_ext {

CPR_EXT_HOST_DEVICE inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

CPR_EXT_HOST_DEVICE inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Of a NaN: some NaN.
CPR_EXT_HOST_DEVICE inline uint16_t to_float16(float value) {
  const uint32_t bits = bits_of(value);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7e00;
  if (magnitude >= 0x477ff000) return sign | 0x7c00;  // rounds to infinity
  if (magnitude < 0x38800000) {                       // subnormal: float32 adds and rounds it
    const float sum = float_of(magnitude) + 0.5f;     // whose last place is that of subnormals
    return sign | static_cast<uint16_t>(bits_of(sum) - bits_of(0.5f));
  }
  const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
  return sign | static_cast<uint16_t>((rounded - 0x38000000) >> 13);
}

CPR_EXT_HOST_DEVICE inline float from_float16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t magnitude = half & 0x7fff;
  if (magnitude >= 0x7c00) return float_of(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  if (magnitude < 0x400) {
    return float_of(sign | bits_of(static_cast<float>(magnitude) * 0x1p-24f));
  }
  return float_of(sign | ((magnitude << 13) + 0x38000000));
}

// Of a NaN: anything.
CPR_EXT_HOST_DEVICE inline uint16_t to_bfloat16(float value) {
  const uint32_t bits = bits_of(value);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

CPR_EXT_HOST_DEVICE inline float from_bfloat16(uint16_t half) {
  return float_of(static_cast<uint32_t>(half) << 16);
}

}  // namespace cpr_ext
