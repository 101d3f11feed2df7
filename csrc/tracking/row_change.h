// How far a row has moved: the L2 norm of the difference of two rows, of any floating format, on
// every backend.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/dtype.h"
#include "core/host_device.h"

namespace cpr_ext {

// Each format: its stored type, the type to compute in, and the way from one to the other.
struct Float64 {
  using Stored = double;
  using Value = double;
  CPR_EXT_HOST_DEVICE static double load(double stored) { return stored; }
};

struct Float32 {
  using Stored = float;
  using Value = float;
  CPR_EXT_HOST_DEVICE static float load(float stored) { return stored; }
};

struct BFloat16 {
  using Stored = uint16_t;
  using Value = float;
  CPR_EXT_HOST_DEVICE static float load(uint16_t stored) {
    return float_of(uint32_t{stored} << 16);
  }
};

struct Float16 {
  using Stored = uint16_t;
  using Value = float;
  // Exponent and mantissa move into place; multiplying by 2^112 corrects the exponent's bias, for
  // subnormals too. Infinity and NaN keep an exponent of all ones.
  CPR_EXT_HOST_DEVICE static float load(uint16_t stored) {
    const uint32_t magnitude = uint32_t{stored & 0x7fffu} << 13;
    const uint32_t sign = uint32_t{stored & 0x8000u} << 16;
    uint32_t bits = bits_of(float_of(magnitude) * float_of(0x77800000u));
    if (magnitude >= 0x7c00u << 13) bits |= 0x7f800000u;
    return float_of(bits | sign);
  }
};

// Calls body(a format) for the floating `dtype`.
template <class Body>
auto visit_format(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::kFloat64:
      return body(Float64{});
    case DType::kBFloat16:
      return body(BFloat16{});
    case DType::kFloat16:
      return body(Float16{});
    default:
      return body(Float32{});
  }
}

// sum + step * step, rounded twice everywhere: a device would do both at once.
CPR_EXT_HOST_DEVICE inline float add_square(float sum, float step) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(sum, __fmul_rn(step, step));
#else
  return sum + step * step;
#endif
}

CPR_EXT_HOST_DEVICE inline double add_square(double sum, double step) {
#ifdef __CUDA_ARCH__
  return __dadd_rn(sum, __dmul_rn(step, step));
#else
  return sum + step * step;
#endif
}

CPR_EXT_HOST_DEVICE inline float square_root(float value) {
#ifdef __CUDA_ARCH__
  return __fsqrt_rn(value);
#else
  return std::sqrt(value);
#endif
}

CPR_EXT_HOST_DEVICE inline double square_root(double value) {
#ifdef __CUDA_ARCH__
  return __dsqrt_rn(value);
#else
  return std::sqrt(value);
#endif
}

// The sum of squares of a row's steps element by element, where the fast sum comes out as NaN: what
// NaN and infinity mean is told below.
template <class Format>
CPR_EXT_HOST_DEVICE typename Format::Value careful_sum(const typename Format::Stored* now,
                                                       const typename Format::Stored* before,
                                                       int64_t size) {
  using Value = typename Format::Value;
  const Value infinity = float_of(0x7f800000u);
  Value sum = 0;
  for (int64_t i = 0; i < size; ++i) {
    const Value value = Format::load(now[i]);
    const Value old = Format::load(before[i]);
    if (value != value) return value;  // NaN
    if (value == old) continue;
    sum = add_square(sum, old != old ? infinity : value - old);
  }
  return sum;
}

// `now` and `before`: (embedding_dim) elements of a floating `dtype`, aligned to it. Summed in
// float32 (float64 for float64), in an order that depends on nothing but embedding_dim.
// Changes below about 1e-19 come out as none and above 1e19 as infinite, save for float64.
// NaN exactly if `now` holds NaN. Equal infinities count as unchanged; an infinity or NaN that was
// there before and is gone as an infinite change.
float row_change(DType dtype, const void* now, const void* before, int64_t embedding_dim);

}  // namespace cpr_ext
