// Element types that cross from Python. The core moves bytes; it looks at the type only to check
// indices, to measure change and to find NaN.
#pragma once

#include <cstddef>

namespace cpr_ext {

enum class DType {
  kBool,
  kUInt8,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kUInt32,
  kUInt64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kOther,  // bytes of known size and no further meaning here
};

constexpr bool is_floating(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16 || dtype == DType::kFloat32 ||
         dtype == DType::kFloat64;
}

}  // namespace cpr_ext
