#include "staging/find_nan.h"

#include <algorithm>
#include <cstring>

namespace cpr_ext {

namespace {

// Bits, not values: NaN is a magnitude above infinity's, whatever the compiler's float options.
template <typename Bits, Bits kInfinity>
int64_t find_nan_bits(const std::byte* data, int64_t count) {
  constexpr Bits kMagnitude = static_cast<Bits>(~Bits{0}) >> 1;
  constexpr int64_t kBlock = 4096 / sizeof(Bits);
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = std::min(count, begin + kBlock);
    // Branch-free over a block, so that it vectorises; a hit is located by a second look.
    Bits largest = 0;
    for (int64_t i = begin; i < end; ++i) {
      Bits bits;
      std::memcpy(&bits, data + i * sizeof(Bits), sizeof(Bits));
      largest = std::max<Bits>(largest, bits & kMagnitude);
    }
    if (largest <= kInfinity) continue;
    for (int64_t i = begin; i < end; ++i) {
      Bits bits;
      std::memcpy(&bits, data + i * sizeof(Bits), sizeof(Bits));
      if ((bits & kMagnitude) > kInfinity) return i;
    }
  }
  return -1;
}

}  // namespace

int64_t find_nan(DType dtype, const std::byte* data, int64_t num_elements) {
  switch (dtype) {
    case DType::kFloat16:
      return find_nan_bits<uint16_t, 0x7C00>(data, num_elements);
    case DType::kBFloat16:
      return find_nan_bits<uint16_t, 0x7F80>(data, num_elements);
    case DType::kFloat32:
      return find_nan_bits<uint32_t, 0x7F800000u>(data, num_elements);
    case DType::kFloat64:
      return find_nan_bits<uint64_t, 0x7FF0000000000000ull>(data, num_elements);
    default:
      return -1;
  }
}

}  // namespace cpr_ext
