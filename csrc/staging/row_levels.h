// The arithmetic of a rounded row, value by value: one text for CPUs and for devices, so that both
// give the same bits. Nothing in it may be contracted to a fused multiply-add.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace cpr_ext {

constexpr float kLargestFloat = 0x1.fffffep+127f;
// Rows whose values are closer together than this are stored as one value: a scale would be too
// small to be computed with.
constexpr float kSmallestRange = 0x1p-100f;

CPR_EXT_HOST_DEVICE inline uint32_t magnitude_bits(float value) {
  return bits_of(value) & 0x7fffffff;
}

// Ascends with the value. NaN is beyond both infinities, and compilers find the least of integers
// by vectors.
CPR_EXT_HOST_DEVICE inline int32_t order_of(float value) {
  const auto bits = static_cast<int32_t>(bits_of(value));
  return bits ^ (bits >> 31 & 0x7fffffff);
}

// Zeros have no sign.
CPR_EXT_HOST_DEVICE inline float value_of(int32_t order) {
  return float_of(static_cast<uint32_t>(order ^ (order >> 31 & 0x7fffffff))) + 0.0f;
}

// What follows the elements of a row, and what its values are multiplied with.
// Of a row without a range, which has an infinity or NaN, is_number is false: all of it becomes
// NaN.
struct Int8Scale {
  float scale;
  float bias;
  float inverse;
  bool is_number;
};

CPR_EXT_HOST_DEVICE inline Int8Scale int8_scale(float smallest, float largest) {
  const float range = largest - smallest;
  if (!(range <= kLargestFloat)) return {float_of(0x7fc00000), float_of(0x7fc00000), 0, false};
  if (range < kSmallestRange) return {0, smallest, 0, true};
  return {range / 255, smallest, 255 / range, true};
}

// To the nearest level, ties to even: float32 has no bits after the point beyond 2^23.
CPR_EXT_HOST_DEVICE inline uint32_t to_int8(float value, const Int8Scale& scale) {
  return bits_of((value - scale.bias) * scale.inverse + 0x1.8p23f) & 255;
}

CPR_EXT_HOST_DEVICE inline float from_int8(uint32_t level, float scale, float bias) {
  return static_cast<float>(static_cast<int32_t>(level)) * scale + bias;
}

struct Float16Scale {
  float scale;
  float inverse;
  bool is_number;
};

// A power of two, so that the largest magnitude lies in [2^14, 2^15): float16 then has the most
// bits for all others.
CPR_EXT_HOST_DEVICE inline Float16Scale float16_scale(uint32_t largest_magnitude_bits) {
  if (largest_magnitude_bits >= 0x7f800000) return {float_of(0x7fc00000), 0, false};
  const uint32_t exponent = largest_magnitude_bits >> 23;
  const uint32_t used = exponent < 27 ? 27 : exponent;  // below 2^-100 the inverse is no number
  return {float_of((used - 14) << 23), float_of((268 - used) << 23), true};
}

// To nearest, ties to even. REQUIRES: |value| < 2^16 - 16
// Added to a power of two, a value is rounded where its float16 has its last place; below 2^-14
// that is the same for all.
CPR_EXT_HOST_DEVICE inline uint32_t to_float16(float value) {
  constexpr int32_t kLeast = (127 - 14) << 23;
  const uint32_t sign = bits_of(value) >> 16 & 0x8000;
  const auto magnitude = static_cast<int32_t>(magnitude_bits(value));
  const int32_t own = magnitude & 0x7f800000;
  const int32_t exponent = own > kLeast ? own : kLeast;
  const auto power = static_cast<uint32_t>(exponent + (13 << 23));
  const uint32_t places = bits_of(float_of(static_cast<uint32_t>(magnitude)) + float_of(power));
  return sign | (places - power + static_cast<uint32_t>((exponent - kLeast) >> 13));
}

// REQUIRES: a number
CPR_EXT_HOST_DEVICE inline float from_float16(uint32_t half) {
  constexpr int32_t kLeast = 1 << 10;
  const uint32_t sign = (half & 0x8000) << 16;
  const auto magnitude = static_cast<int32_t>(half & 0x7fff);
  const int32_t own = magnitude & 0x7c00;
  const int32_t exponent = own > kLeast ? own : kLeast;
  const float place = float_of(static_cast<uint32_t>((exponent << 13) + ((127 - 25) << 23)));
  return float_of(sign | bits_of(static_cast<float>(magnitude - exponent + kLeast) * place));
}

}  // namespace cpr_ext
