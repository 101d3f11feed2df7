#include "staging/find_nan.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "core/instruction_set.h"

namespace cpr_ext {

namespace {

// Bits, not values: NaN is a magnitude above infinity's, whatever the compiler's float options.
// Signed, since a magnitude has no sign bit and every x86-64 compares signed integers in vectors.
template <typename Bits, Bits kInfinity>
CPR_EXT_KERNEL_BODY int64_t find_nan_body(const std::byte* data, int64_t count) {
  constexpr Bits kMagnitude = std::numeric_limits<Bits>::max();
  constexpr int64_t kBlock = 4096 / sizeof(Bits);
  const auto is_nan = [data](int64_t i) {
    Bits bits;
    std::memcpy(&bits, data + i * sizeof(Bits), sizeof(Bits));
    return static_cast<Bits>(bits & kMagnitude) > kInfinity;
  };
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = std::min(count, begin + kBlock);
    // Branch-free over a block, so that it vectorises; a hit is located by a second look.
    Bits found = 0;
    for (int64_t i = begin; i < end; ++i) found |= is_nan(i) ? Bits{-1} : Bits{0};
    if (found == 0) continue;
    for (int64_t i = begin; i < end; ++i) {
      if (is_nan(i)) return i;
    }
  }
  return -1;
}

template <typename Bits, Bits kInfinity>
CPR_EXT_AVX512 int64_t find_nan_avx512(const std::byte* data, int64_t count) {
  return find_nan_body<Bits, kInfinity>(data, count);
}

template <typename Bits, Bits kInfinity>
int64_t find_nan_bits(const std::byte* data, int64_t count) {
  return instruction_set() == InstructionSet::kAvx512
             ? find_nan_avx512<Bits, kInfinity>(data, count)
             : find_nan_body<Bits, kInfinity>(data, count);
}

}  // namespace

int64_t find_nan(DType dtype, const std::byte* data, int64_t num_elements) {
  switch (dtype) {
    case DType::kFloat16:
      return find_nan_bits<int16_t, 0x7C00>(data, num_elements);
    case DType::kBFloat16:
      return find_nan_bits<int16_t, 0x7F80>(data, num_elements);
    case DType::kFloat32:
      return find_nan_bits<int32_t, 0x7F800000>(data, num_elements);
    case DType::kFloat64:
      return find_nan_bits<int64_t, 0x7FF0000000000000ll>(data, num_elements);
    default:
      return -1;
  }
}

}  // namespace cpr_ext
