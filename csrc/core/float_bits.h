// The bits of a float, on every backend.
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

}  // namespace cpr_ext
