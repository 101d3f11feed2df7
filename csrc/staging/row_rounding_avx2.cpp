#include "core/instruction_set.h"
#include "staging/row_blocks.h"
#include "staging/row_rounding_forms.h"

#if CPR_EXT_HAS_AVX2

#include <immintrin.h>

#include <algorithm>
#include <cstring>

namespace cpr_ext {

namespace avx2 {
namespace {

constexpr int64_t kLanes = 8;
constexpr int64_t kBytesAhead = 2048;  // are prefetched

#define CPR_EXT_INLINE CPR_EXT_AVX2 inline __attribute__((always_inline))

CPR_EXT_INLINE __m256 magnitude(__m256 values) {
  return _mm256_and_ps(values, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff)));
}

CPR_EXT_INLINE __m256i lanes_before(int64_t end) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(end)), lanes);
}

// Elements [i, i + 8) of a row; behind its end, `instead`.
CPR_EXT_INLINE __m256 load(const float* row, int64_t i, int64_t elements, __m256 instead) {
  if (i + kLanes <= elements) return _mm256_loadu_ps(row + i);
  const __m256i is_inside = lanes_before(elements - i);
  return _mm256_blendv_ps(instead, _mm256_maskload_ps(row + i, is_inside),
                          _mm256_castsi256_ps(is_inside));
}

// The first `count` of 16 bytes.
CPR_EXT_INLINE void store(std::byte* out, __m128i bytes, int64_t count) {
  if (count == 16) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), bytes);
  } else if (count == 8) {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out), bytes);
  } else {
    alignas(16) std::byte all[16];
    _mm_store_si128(reinterpret_cast<__m128i*>(all), bytes);
    std::memcpy(out, all, static_cast<size_t>(count));
  }
}

struct Smaller {
  CPR_EXT_INLINE static __m128 of(__m128 a, __m128 b) { return _mm_min_ps(a, b); }
};
struct Larger {
  CPR_EXT_INLINE static __m128 of(__m128 a, __m128 b) { return _mm_max_ps(a, b); }
};

template <class Pick>
CPR_EXT_INLINE float reduce(__m256 lanes) {
  __m128 four = Pick::of(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
  four = Pick::of(four, _mm_movehl_ps(four, four));
  four = Pick::of(four, _mm_shuffle_ps(four, four, 1));
  return _mm_cvtss_f32(four);
}

// The largest |x - x'|. As numbers without a sign, so that NaN is above all others.
class Errors {
 public:
  CPR_EXT_INLINE Errors() : largest_(_mm256_setzero_si256()) {}

  CPR_EXT_INLINE void add(__m256 values, __m256 rounded) {
    const __m256 error = magnitude(_mm256_sub_ps(values, rounded));
    largest_ = _mm256_max_epu32(largest_, _mm256_castps_si256(error));
  }
  // False if one is beyond the limit, or NaN.
  CPR_EXT_INLINE bool pass(float limit, float* largest_error) const {
    const __m256 all = _mm256_castsi256_ps(largest_);
    if (_mm256_movemask_ps(_mm256_cmp_ps(all, _mm256_set1_ps(limit), _CMP_NLE_UQ)) != 0) {
      return false;
    }
    *largest_error = std::max(*largest_error, reduce<Larger>(all));
    return true;
  }

 private:
  __m256i largest_;
};

// 16 numbers of 32 bits, each of 16 bits, in order.
CPR_EXT_INLINE __m256i pack(__m256i a, __m256i b) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8);
}

CPR_EXT_INLINE __m128i to_bytes(__m256i words) {
  return _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}

// Levels of 16 elements as numbers of 16 bits; the elements' errors are added.
template <RowPrecision kPrecision>
CPR_EXT_INLINE __m256i levels_of(const float* row, int64_t i, int64_t elements,
                                 const RowScale& scale, Errors* errors) {
  const __m256 bias = _mm256_set1_ps(scale.bias);
  const __m256i most = _mm256_set1_epi32(kPrecision == RowPrecision::kInt8 ? 255 : 15);
  __m256i levels[2];
  for (int half = 0; half < 2; ++half) {
    const __m256 values = load(row, i + half * kLanes, elements, bias);
    const __m256 steps = _mm256_mul_ps(_mm256_sub_ps(values, bias), _mm256_set1_ps(scale.inverse));
    const __m256i nearest = _mm256_cvtps_epi32(steps);
    levels[half] = _mm256_min_epi32(_mm256_max_epi32(nearest, _mm256_setzero_si256()), most);
    // In int4 the product is exact: with it one rounding is as two.
    errors->add(values, _mm256_fmadd_ps(_mm256_cvtepi32_ps(levels[half]),
                                        _mm256_set1_ps(scale.scale), bias));
  }
  return pack(levels[0], levels[1]);
}

template <RowPrecision kPrecision>
CPR_EXT_INLINE bool round_levels(const float* row, int64_t elements, const RowScale& scale,
                                 float limit, std::byte* out, float* largest_error) {
  Errors errors;
  for (int64_t i = 0; i < elements; i += 2 * kLanes) {
    const int64_t count = std::min(2 * kLanes, elements - i);
    const __m256i levels = levels_of<kPrecision>(row, i, elements, scale, &errors);
    if constexpr (kPrecision == RowPrecision::kInt8) {
      store(out + i, to_bytes(levels), count);
    } else {
      const __m256i pairs = _mm256_madd_epi16(levels, _mm256_set1_epi32(0x00100001));
      const __m128i eight = to_bytes(pack(pairs, pairs));
      store(out + i / 2, eight, (count + 1) / 2);
    }
  }
  return errors.pass(limit, largest_error);
}

CPR_EXT_INLINE bool round_scaled(const float* row, int64_t elements, RowPrecision precision,
                                 std::byte* out, float* largest_error) {
  const __m256 first = _mm256_set1_ps(row[0]);
  __m256 lowest = first, highest = first;
  for (int64_t i = 0; i < elements; i += kLanes) {
    const __m256 values = load(row, i, elements, first);
    lowest = _mm256_min_ps(values, lowest);
    highest = _mm256_max_ps(values, highest);
  }
  const float smallest = reduce<Smaller>(lowest) + 0.0f;  // zeros have no sign
  const float largest = reduce<Larger>(highest) + 0.0f;
  const float extent = largest - smallest;
  if (!(extent == 0 || (extent >= kSmallestExtent && extent <= kLargestExtent))) {
    return round_row(row, elements, precision, out, largest_error);
  }
  const float limit = limit_of(precision, extent);
  if (precision == RowPrecision::kInt8) {
    for (const float epsilon : {kFbgemmEpsilon, 0.0f}) {
      const RowScale scale = scale_int8(smallest, largest, epsilon);
      std::memcpy(out + elements, &scale.scale, sizeof(float));
      std::memcpy(out + elements + sizeof(float), &scale.bias, sizeof(float));
      if (round_levels<RowPrecision::kInt8>(row, elements, scale, limit, out, largest_error)) {
        return true;
      }
    }
    return false;
  }
  const RowScale scale = scale_int4(smallest, largest);
  const uint16_t halves[] = {to_float16(scale.scale), to_float16(smallest)};
  std::memcpy(out + (elements + 1) / 2, halves, sizeof(halves));
  return round_levels<RowPrecision::kInt4>(row, elements, scale, limit, out, largest_error);
}

// float16 or bfloat16 in the low half of each number.
template <RowPrecision kPrecision>
CPR_EXT_INLINE __m256i halves_of(__m256 values) {
  if constexpr (kPrecision == RowPrecision::kFloat16) {
    return _mm256_cvtepu16_epi32(
        _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  } else {
    const __m256i bits = _mm256_castps_si256(values);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(_mm256_set1_epi32(0x7fff), odd);
    return _mm256_srli_epi32(_mm256_add_epi32(bits, up), 16);
  }
}

// Its reverse.
template <RowPrecision kPrecision>
CPR_EXT_INLINE __m256 from_halves(__m256i halves) {
  if constexpr (kPrecision == RowPrecision::kFloat16) {
    const __m256i packed = pack(halves, halves);
    return _mm256_cvtph_ps(_mm256_castsi256_si128(packed));
  } else {
    return _mm256_castsi256_ps(_mm256_slli_epi32(halves, 16));
  }
}

template <RowPrecision kPrecision>
CPR_EXT_INLINE bool round_halves(const float* row, int64_t elements, std::byte* out,
                                 float* largest_error) {
  const __m256 zeros = _mm256_setzero_ps();
  __m256 highest = zeros;
  Errors errors;
  for (int64_t i = 0; i < elements; i += kLanes) {
    const __m256 values = load(row, i, elements, zeros);
    highest = _mm256_max_ps(magnitude(values), highest);  // keeps what it has beside NaN
    const __m256i halves = halves_of<kPrecision>(values);
    errors.add(values, from_halves<kPrecision>(halves));
    store(out + i * 2, _mm256_castsi256_si128(pack(halves, halves)),
          2 * std::min(kLanes, elements - i));
  }
  return errors.pass(limit_of(kPrecision, reduce<Larger>(highest)), largest_error);
}

CPR_EXT_INLINE bool round_of(const float* row, int64_t elements, RowPrecision precision,
                             std::byte* out, float* largest_error) {
  switch (precision) {
    case RowPrecision::kFloat16:
      return round_halves<RowPrecision::kFloat16>(row, elements, out, largest_error);
    case RowPrecision::kBFloat16:
      return round_halves<RowPrecision::kBFloat16>(row, elements, out, largest_error);
    default:
      return round_scaled(row, elements, precision, out, largest_error);
  }
}

template <RowPrecision kPrecision>
constexpr int64_t kBits = kPrecision == RowPrecision::kInt8   ? 8
                          : kPrecision == RowPrecision::kInt4 ? 4
                                                              : 16;

// Eight elements from i on, restored; what is behind the end is anything.
template <RowPrecision kPrecision>
CPR_EXT_INLINE __m256 restored(const std::byte* stored, int64_t i, int64_t elements, __m256 scale,
                               __m256 bias) {
  const std::byte* from = stored + i * kBits<kPrecision> / 8;
  alignas(16) std::byte all[16] = {};
  if (i + kLanes > elements) {
    std::memcpy(all, from, static_cast<size_t>(((elements - i) * kBits<kPrecision> + 7) / 8));
    from = all;
  }
  if constexpr (kPrecision == RowPrecision::kInt8) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)), scale, bias);
  } else if constexpr (kPrecision == RowPrecision::kInt4) {
    int32_t word;
    std::memcpy(&word, from, sizeof(word));
    const __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    const __m256i levels =
        _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(word), shifts), _mm256_set1_epi32(15));
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(levels), scale, bias);
  } else {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return from_halves<kPrecision>(_mm256_cvtepu16_epi32(halves));
  }
}

template <RowPrecision kPrecision>
CPR_EXT_INLINE void restore_row(const std::byte* stored, int64_t elements, float* row) {
  float scale = 0, bias = 0;
  if constexpr (kPrecision == RowPrecision::kInt8) {
    std::memcpy(&scale, stored + elements, sizeof(scale));
    std::memcpy(&bias, stored + elements + sizeof(scale), sizeof(bias));
  } else if constexpr (kPrecision == RowPrecision::kInt4) {
    uint16_t halves[2];
    std::memcpy(halves, stored + (elements + 1) / 2, sizeof(halves));
    scale = from_float16(halves[0]);
    bias = from_float16(halves[1]);
  }
  const __m256 scales = _mm256_set1_ps(scale), biases = _mm256_set1_ps(bias);
  for (int64_t i = 0; i < elements; i += kLanes) {
    const __m256 values = restored<kPrecision>(stored, i, elements, scales, biases);
    if (i + kLanes <= elements) {
      _mm256_storeu_ps(row + i, values);
    } else {
      _mm256_maskstore_ps(row + i, lanes_before(elements - i), values);
    }
  }
}

template <RowPrecision kPrecision>
CPR_EXT_AVX2 void restore_rows(const std::byte* stored, int64_t begin, int64_t end,
                               const RowsOf& rows) {
  const int64_t elements = rows.array->row_bytes / static_cast<int64_t>(sizeof(float));
  const int64_t stored_bytes = stored_row_bytes(kPrecision, elements);
  for (int64_t i = begin; i < end; ++i) {
    auto* row = reinterpret_cast<float*>(rows.row(i));
    restore_row<kPrecision>(stored + i * stored_bytes, elements, row);
  }
}

}  // namespace
}  // namespace avx2

CPR_EXT_AVX2 float round_block_avx2(const RowsOf& rows, RowPrecision precision, int64_t begin,
                                    int64_t end, std::byte* out, uint8_t* broken) {
  const int64_t row_bytes = rows.array->row_bytes;
  const int64_t elements = row_bytes / static_cast<int64_t>(sizeof(float));
  const int64_t stored_bytes = stored_row_bytes(precision, elements);
  const int64_t ahead = std::clamp<int64_t>(avx2::kBytesAhead / row_bytes, 1, 16);
  float largest_error = 0;
  for (int64_t i = begin; i < end; ++i) {
    const std::byte* next = rows.row(std::min(i + ahead, end - 1));
    for (int64_t at = 0; at < row_bytes; at += kCacheLine) __builtin_prefetch(next + at, 0);
    std::byte* to = out + i * stored_bytes;
    const auto* row = reinterpret_cast<const float*>(rows.row(i));
    if (avx2::round_of(row, elements, precision, to, &largest_error)) continue;
    std::memset(to, 0, static_cast<size_t>(stored_bytes));
    broken[i] = 1;
  }
  return largest_error;
}

void restore_block_avx2(const std::byte* stored, RowPrecision precision, int64_t begin, int64_t end,
                        const RowsOf& rows) {
  switch (precision) {
    case RowPrecision::kInt8:
      return avx2::restore_rows<RowPrecision::kInt8>(stored, begin, end, rows);
    case RowPrecision::kInt4:
      return avx2::restore_rows<RowPrecision::kInt4>(stored, begin, end, rows);
    case RowPrecision::kFloat16:
      return avx2::restore_rows<RowPrecision::kFloat16>(stored, begin, end, rows);
    case RowPrecision::kBFloat16:
      return avx2::restore_rows<RowPrecision::kBFloat16>(stored, begin, end, rows);
    case RowPrecision::kExact:
      return restore_block_portable(stored, precision, begin, end, rows);
  }
}

}  // namespace cpr_ext

#undef CPR_EXT_INLINE
#endif
