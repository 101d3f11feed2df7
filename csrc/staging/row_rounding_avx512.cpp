#include "core/avx512.h"
#include "staging/row_blocks.h"
#include "staging/row_rounding_forms.h"

#if CPR_EXT_HAS_AVX512

#include <algorithm>
#include <cstring>

namespace cpr_ext {

namespace {

constexpr int64_t kLanes = 16;

#define CPR_EXT_INLINE CPR_EXT_AVX512 inline __attribute__((always_inline))

CPR_EXT_INLINE __mmask16 lanes_from(int64_t begin, int64_t elements) {
  const int64_t left = elements - begin;
  return left >= kLanes ? static_cast<__mmask16>(0xffff) : static_cast<__mmask16>((1u << left) - 1);
}

CPR_EXT_INLINE __m512 magnitude(__m512 values) {
  return _mm512_castsi512_ps(
      _mm512_and_si512(_mm512_castps_si512(values), _mm512_set1_epi32(0x7fffffff)));
}

// The largest |x - x'|, lane by lane. As numbers without a sign, so that NaN is above all others.
struct Errors {
  __m512 limit;
  __m512i largest;

  CPR_EXT_INLINE void add(__mmask16 lanes, __m512 values, __m512 rounded) {
    const __m512i error = _mm512_castps_si512(magnitude(_mm512_sub_ps(values, rounded)));
    largest = _mm512_mask_max_epu32(largest, lanes, largest, error);
  }
  CPR_EXT_INLINE bool are_broken() const {
    return _mm512_cmp_ps_mask(_mm512_castsi512_ps(largest), limit, _CMP_NLE_UQ) != 0;
  }
};

struct VectorEnds {
  float smallest;
  float largest;
};

// kDim: elements of a row if they are known, else 0.
template <int64_t kDim>
CPR_EXT_INLINE VectorEnds ends_of(const float* row, int64_t elements) {
  const int64_t dim = kDim > 0 ? kDim : elements;
  __m512 smallest = _mm512_set1_ps(row[0]);
  __m512 largest = smallest;
  for (int64_t i = 0; i < dim; i += kLanes) {
    const __mmask16 lanes = lanes_from(i, dim);
    const __m512 values = _mm512_maskz_loadu_ps(lanes, row + i);
    smallest = _mm512_mask_min_ps(smallest, lanes, smallest, values);
    largest = _mm512_mask_max_ps(largest, lanes, largest, values);
  }
  return {_mm512_reduce_min_ps(smallest) + 0.0f, _mm512_reduce_max_ps(largest) + 0.0f};
}

template <int64_t kDim>
CPR_EXT_INLINE float magnitude_of(const float* row, int64_t elements) {
  const int64_t dim = kDim > 0 ? kDim : elements;
  __m512 largest = _mm512_setzero_ps();
  for (int64_t i = 0; i < dim; i += kLanes) {
    const __m512 values = _mm512_maskz_loadu_ps(lanes_from(i, dim), row + i);
    largest = _mm512_max_ps(largest, magnitude(values));
  }
  return _mm512_reduce_max_ps(largest);
}

template <int64_t kDim>
CPR_EXT_INLINE Errors round_int8(const float* row, int64_t elements, VectorEnds ends, float epsilon,
                                 std::byte* out) {
  const int64_t dim = kDim > 0 ? kDim : elements;
  const float extent = ends.largest - ends.smallest;
  const float scale = extent / 255;
  const __m512 scales = _mm512_set1_ps(scale);
  const __m512 biases = _mm512_set1_ps(ends.smallest);
  const __m512 inverses = _mm512_set1_ps(255 / (extent + epsilon));
  Errors errors{_mm512_set1_ps(limit_of(RowPrecision::kInt8, extent)), _mm512_setzero_si512()};
  for (int64_t i = 0; i < dim; i += kLanes) {
    const __mmask16 lanes = lanes_from(i, dim);
    const __m512 values = _mm512_maskz_loadu_ps(lanes, row + i);
    const __m512i levels =
        _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_sub_ps(values, biases), inverses));
    errors.add(lanes, values, _mm512_fmadd_ps(_mm512_cvtepi32_ps(levels), scales, biases));
    _mm_mask_storeu_epi8(out + i, lanes, _mm512_cvtepi32_epi8(levels));
  }
  std::memcpy(out + dim, &scale, sizeof(float));
  std::memcpy(out + dim + sizeof(float), &ends.smallest, sizeof(float));
  return errors;
}

template <int64_t kDim>
CPR_EXT_INLINE Errors round_int4(const float* row, int64_t elements, VectorEnds ends,
                                 std::byte* out) {
  const int64_t dim = kDim > 0 ? kDim : elements;
  const __m256i bias_halves =
      _mm512_cvtps_ph(_mm512_set1_ps(ends.smallest), _MM_FROUND_TO_NEAREST_INT);
  const __m512 biases = _mm512_cvtph_ps(bias_halves);
  const __m512 extents = _mm512_sub_ps(_mm512_set1_ps(ends.largest), biases);
  const __m512 ones = _mm512_set1_ps(1);
  __m256i scale_halves =
      _mm512_cvtps_ph(_mm512_div_ps(extents, _mm512_set1_ps(15)), _MM_FROUND_TO_NEAREST_INT);
  __m512 scales = _mm512_cvtph_ps(scale_halves);
  // float16 has no number, other than 0, whose inverse is infinite.
  if ((_mm_extract_epi16(_mm256_castsi256_si128(scale_halves), 0) & 0x7fff) == 0) {
    scales = ones;
    scale_halves = _mm512_cvtps_ph(ones, _MM_FROUND_TO_NEAREST_INT);
  }
  const __m512 inverses = _mm512_div_ps(ones, scales);
  Errors errors{_mm512_set1_ps(limit_of(RowPrecision::kInt4, ends.largest - ends.smallest)),
                _mm512_setzero_si512()};
  for (int64_t i = 0; i < dim; i += kLanes) {
    const __mmask16 lanes = lanes_from(i, dim);
    const __m512 values = _mm512_maskz_loadu_ps(lanes, row + i);
    const __m512i steps =
        _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_sub_ps(values, biases), inverses));
    const __m512i levels = _mm512_maskz_min_epi32(
        lanes, _mm512_max_epi32(steps, _mm512_setzero_si512()), _mm512_set1_epi32(15));
    errors.add(lanes, values,
               _mm512_add_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(levels), scales), biases));
    // Two lanes of 32 bits, of which 4 count, become 8 bits.
    const __m512i pairs = _mm512_or_si512(levels, _mm512_srli_epi64(levels, 28));
    const int64_t bytes = (std::min(kLanes, dim - i) + 1) / 2;
    _mm_mask_storeu_epi8(out + i / 2, static_cast<__mmask16>((1u << bytes) - 1),
                         _mm512_cvtepi64_epi8(pairs));
  }
  const uint16_t halves[] = {
      static_cast<uint16_t>(_mm_extract_epi16(_mm256_castsi256_si128(scale_halves), 0)),
      static_cast<uint16_t>(_mm_extract_epi16(_mm256_castsi256_si128(bias_halves), 0))};
  std::memcpy(out + (dim + 1) / 2, halves, sizeof(halves));
  return errors;
}

template <int64_t kDim, bool kIsFloat16>
CPR_EXT_INLINE Errors round_halves(const float* row, int64_t elements, std::byte* out) {
  const int64_t dim = kDim > 0 ? kDim : elements;
  const auto precision = kIsFloat16 ? RowPrecision::kFloat16 : RowPrecision::kBFloat16;
  const float limit = limit_of(precision, magnitude_of<kDim>(row, dim));
  Errors errors{_mm512_set1_ps(limit), _mm512_setzero_si512()};
  for (int64_t i = 0; i < dim; i += kLanes) {
    const __mmask16 lanes = lanes_from(i, dim);
    const __m512 values = _mm512_maskz_loadu_ps(lanes, row + i);
    __m256i halves;
    __m512 rounded;
    if (kIsFloat16) {
      halves = _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT);
      rounded = _mm512_cvtph_ps(halves);
    } else {
      const __m512i bits = _mm512_castps_si512(values);
      const __m512i is_odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
      const __m512i sum =
          _mm512_add_epi32(bits, _mm512_add_epi32(is_odd, _mm512_set1_epi32(0x7fff)));
      const __m512i high = _mm512_srli_epi32(sum, 16);
      halves = _mm512_cvtepi32_epi16(high);
      rounded = _mm512_castsi512_ps(_mm512_slli_epi32(high, 16));
    }
    errors.add(lanes, values, rounded);
    _mm256_mask_storeu_epi16(out + i * 2, lanes, halves);
  }
  return errors;
}

template <RowPrecision kPrecision, int64_t kDim>
CPR_EXT_AVX512 float round_rows(const RowsOf& rows, int64_t begin, int64_t end, std::byte* out,
                                uint8_t* broken) {
  const int64_t dim = kDim > 0 ? kDim : rows.array->row_bytes / static_cast<int64_t>(sizeof(float));
  const int64_t row_bytes = dim * static_cast<int64_t>(sizeof(float));
  const int64_t stored_bytes = stored_row_bytes(kPrecision, dim);
  const int64_t ahead = std::clamp<int64_t>(kPrefetchBytes / row_bytes, 2, 16);
  __m512 largest = _mm512_setzero_ps();
  for (int64_t i = begin; i < end; ++i) {
    if (i + ahead < end) {
      const std::byte* next = rows.row(i + ahead);
      for (int64_t at = 0; at < row_bytes; at += kCacheLine) __builtin_prefetch(next + at, 0);
    }
    const auto* row = reinterpret_cast<const float*>(rows.row(i));
    std::byte* to = out + i * stored_bytes;
    Errors errors;
    if constexpr (kPrecision == RowPrecision::kInt8) {
      const VectorEnds ends = ends_of<kDim>(row, dim);
      errors = round_int8<kDim>(row, dim, ends, kFbgemmEpsilon, to);
      if (__builtin_expect(errors.are_broken(), 0)) {
        errors = round_int8<kDim>(row, dim, ends, 0, to);
      }
    } else if constexpr (kPrecision == RowPrecision::kInt4) {
      errors = round_int4<kDim>(row, dim, ends_of<kDim>(row, dim), to);
    } else {
      errors = round_halves<kDim, kPrecision == RowPrecision::kFloat16>(row, dim, to);
    }
    if (__builtin_expect(errors.are_broken(), 0)) {
      std::memset(to, 0, stored_bytes);
      broken[i] = 1;
    } else {
      largest = _mm512_max_ps(largest, _mm512_castsi512_ps(errors.largest));
    }
  }
  return _mm512_reduce_max_ps(largest);
}

CPR_EXT_INLINE __m512 levels_of(const std::byte* stored, int64_t i, __mmask16 lanes, bool is_int4) {
  if (!is_int4) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(lanes, stored + i)));
  }
  const int bytes = (__builtin_popcount(lanes) + 1) / 2;
  const __m128i packed =
      _mm_maskz_loadu_epi8(static_cast<__mmask16>((1u << bytes) - 1), stored + i / 2);
  const __m512i pairs = _mm512_cvtepu8_epi64(packed);
  const __m512i levels =
      _mm512_and_si512(_mm512_or_si512(pairs, _mm512_slli_epi64(pairs, 28)), _mm512_set1_epi32(15));
  return _mm512_cvtepi32_ps(levels);
}

template <RowPrecision kPrecision>
CPR_EXT_AVX512 void restore_rows(const std::byte* stored, int64_t begin, int64_t end,
                                 const RowsOf& rows) {
  const int64_t dim = rows.array->row_bytes / static_cast<int64_t>(sizeof(float));
  const int64_t row_bytes = rows.array->row_bytes;
  const int64_t stored_bytes = stored_row_bytes(kPrecision, dim);
  const int64_t ahead = std::clamp<int64_t>(kPrefetchBytes / row_bytes, 2, 16);
  constexpr bool kIsInt4 = kPrecision == RowPrecision::kInt4;
  for (int64_t i = begin; i < end; ++i) {
    if (i + ahead < end) {
      const std::byte* next = rows.row(i + ahead);
      for (int64_t at = 0; at < row_bytes; at += kCacheLine) __builtin_prefetch(next + at, 1);
    }
    const std::byte* from = stored + i * stored_bytes;
    auto* row = reinterpret_cast<float*>(rows.row(i));
    __m512 scales = _mm512_setzero_ps(), biases = scales;
    if constexpr (kPrecision == RowPrecision::kInt8) {
      float ends[2];
      std::memcpy(ends, from + dim, sizeof(ends));
      scales = _mm512_set1_ps(ends[0]), biases = _mm512_set1_ps(ends[1]);
    } else if constexpr (kIsInt4) {
      int16_t halves[2];
      std::memcpy(halves, from + (dim + 1) / 2, sizeof(halves));
      scales = _mm512_cvtph_ps(_mm256_set1_epi16(halves[0]));
      biases = _mm512_cvtph_ps(_mm256_set1_epi16(halves[1]));
    }
    for (int64_t k = 0; k < dim; k += kLanes) {
      const __mmask16 lanes = lanes_from(k, dim);
      __m512 values;
      if constexpr (kPrecision == RowPrecision::kFloat16) {
        values = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes, from + 2 * k));
      } else if constexpr (kPrecision == RowPrecision::kBFloat16) {
        const __m256i halves = _mm256_maskz_loadu_epi16(lanes, from + 2 * k);
        values = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
      } else {
        // Of int4 the product is exact, so that it does not matter when the sum is rounded.
        values = _mm512_fmadd_ps(levels_of(from, k, lanes, kIsInt4), scales, biases);
      }
      _mm512_mask_storeu_ps(row + k, lanes, values);
    }
  }
}

template <RowPrecision kPrecision>
float round_dim(const RowsOf& rows, int64_t begin, int64_t end, std::byte* out, uint8_t* broken) {
  switch (rows.array->row_bytes / static_cast<int64_t>(sizeof(float))) {
    case 16:
      return round_rows<kPrecision, 16>(rows, begin, end, out, broken);
    case 32:
      return round_rows<kPrecision, 32>(rows, begin, end, out, broken);
    case 64:
      return round_rows<kPrecision, 64>(rows, begin, end, out, broken);
    case 128:
      return round_rows<kPrecision, 128>(rows, begin, end, out, broken);
    default:
      return round_rows<kPrecision, 0>(rows, begin, end, out, broken);
  }
}

}  // namespace

float round_block_avx512(const RowsOf& rows, RowPrecision precision, int64_t begin, int64_t end,
                         std::byte* out, uint8_t* broken) {
  switch (precision) {
    case RowPrecision::kFloat16:
      return round_dim<RowPrecision::kFloat16>(rows, begin, end, out, broken);
    case RowPrecision::kBFloat16:
      return round_dim<RowPrecision::kBFloat16>(rows, begin, end, out, broken);
    case RowPrecision::kInt8:
      return round_dim<RowPrecision::kInt8>(rows, begin, end, out, broken);
    default:
      return round_dim<RowPrecision::kInt4>(rows, begin, end, out, broken);
  }
}

void restore_block_avx512(const std::byte* stored, RowPrecision precision, int64_t begin,
                          int64_t end, const RowsOf& rows) {
  switch (precision) {
    case RowPrecision::kFloat16:
      return restore_rows<RowPrecision::kFloat16>(stored, begin, end, rows);
    case RowPrecision::kBFloat16:
      return restore_rows<RowPrecision::kBFloat16>(stored, begin, end, rows);
    case RowPrecision::kInt8:
      return restore_rows<RowPrecision::kInt8>(stored, begin, end, rows);
    default:
      return restore_rows<RowPrecision::kInt4>(stored, begin, end, rows);
  }
}

}  // namespace cpr_ext

#endif
