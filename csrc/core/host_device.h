// What kernels call too, on every backend: its mark, which is nothing to a compiler that knows no
// CUDA, and the bits of a float.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define CPR_EXT_HOST_DEVICE __host__ __device__
#else
#define CPR_EXT_HOST_DEVICE
#endif

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
