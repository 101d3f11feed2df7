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
// Rows are rounded in groups: what each row needs once is then computed for all of them at once.
constexpr int64_t kGroupRows = kLanes;

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
  if (count >= 16) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), bytes);
  } else if (count == 8) {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out), bytes);
  } else {
    alignas(16) std::byte all[16];
    _mm_store_si128(reinterpret_cast<__m128i*>(all), bytes);
    std::memcpy(out, all, static_cast<size_t>(count));
  }
}

struct SmallerOf8 {
  CPR_EXT_INLINE static __m128 of(__m128 a, __m128 b) { return _mm_min_ps(a, b); }
};
struct LargerOf8 {
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
class ErrorsOf8 {
 public:
  CPR_EXT_INLINE ErrorsOf8() : largest_(_mm256_setzero_si256()) {}

  CPR_EXT_INLINE void add(__m256 values, __m256 rounded) {
    const __m256 error = magnitude(_mm256_sub_ps(values, rounded));
    largest_ = _mm256_max_epu32(largest_, _mm256_castps_si256(error));
  }
  // False if one is beyond the limit, or NaN; else all are added to those of other rows.
  CPR_EXT_INLINE bool pass(float limit, ErrorsOf8* of_rows) const {
    const __m256 beyond =
        _mm256_cmp_ps(_mm256_castsi256_ps(largest_), _mm256_set1_ps(limit), _CMP_NLE_UQ);
    if (_mm256_movemask_ps(beyond) != 0) return false;
    of_rows->largest_ = _mm256_max_epu32(of_rows->largest_, largest_);
    return true;
  }
  CPR_EXT_INLINE float largest() const { return reduce<LargerOf8>(_mm256_castsi256_ps(largest_)); }

 private:
  __m256i largest_;
};

// What each row of a group needs.
struct ScalesOf8 {
  alignas(32) float smallest[kGroupRows];
  alignas(32) float largest[kGroupRows];
  alignas(32) float extent[kGroupRows];
  alignas(32) float bias[kGroupRows];
  alignas(32) float scale[kGroupRows];
  alignas(32) float inverse[kGroupRows];
  alignas(32) float limit[kGroupRows];
  alignas(32) float sure[kGroupRows];       // int8, see row_rounding_avx512.cpp
  alignas(32) uint16_t halves[kGroupRows];  // int4: scales as they are kept
  alignas(32) uint16_t biases[kGroupRows];
};

CPR_EXT_INLINE __m256 limits_of(RowPrecision precision, __m256 extents) {
  const __m256 is_large = _mm256_cmp_ps(extents, _mm256_set1_ps(kSmallestExtent), _CMP_NLT_UQ);
  const __m256 is_finite = _mm256_cmp_ps(extents, _mm256_set1_ps(kLargestExtent), _CMP_LE_OQ);
  const __m256 limits = _mm256_mul_ps(extents, _mm256_set1_ps(limit_factor(precision)));
  return _mm256_blendv_ps(_mm256_set1_ps(-1), _mm256_and_ps(limits, is_large), is_finite);
}

CPR_EXT_INLINE void scale_int8(float largest_error, ScalesOf8* scales) {
  const __m256 smallest = _mm256_load_ps(scales->smallest);
  const __m256 extents = _mm256_load_ps(scales->extent);
  const __m256 levels = _mm256_set1_ps(255);
  const __m256 widened = _mm256_add_ps(extents, _mm256_set1_ps(kFbgemmEpsilon));
  const __m256 inverses = _mm256_div_ps(levels, widened);
  _mm256_store_ps(scales->bias, smallest);
  _mm256_store_ps(scales->scale, _mm256_div_ps(extents, levels));
  _mm256_store_ps(scales->inverse, inverses);
  const __m256 magnitudes =
      _mm256_max_ps(magnitude(smallest), magnitude(_mm256_load_ps(scales->largest)));
  const __m256 lost = _mm256_fmadd_ps(_mm256_set1_ps(1.1f * 0x1p-24f),
                                      _mm256_fmadd_ps(_mm256_set1_ps(6), extents, magnitudes),
                                      _mm256_set1_ps(1.1f * kFbgemmEpsilon));
  const __m256 factor = _mm256_set1_ps(limit_factor(RowPrecision::kInt8));
  const __m256 allowed =
      _mm256_min_ps(_mm256_mul_ps(factor, extents), _mm256_set1_ps(largest_error));
  const __m256 sure = _mm256_mul_ps(_mm256_sub_ps(allowed, lost), inverses);
  const __m256 is_usual =
      _mm256_and_ps(_mm256_cmp_ps(extents, _mm256_set1_ps(kLargestExtent / 1024), _CMP_LE_OQ),
                    _mm256_cmp_ps(extents, _mm256_set1_ps(kSmallestExtent), _CMP_GE_OQ));
  _mm256_store_ps(scales->sure, _mm256_blendv_ps(_mm256_set1_ps(-1), sure, is_usual));
}

CPR_EXT_INLINE void scale_int4(ScalesOf8* scales) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  const __m256 ones = _mm256_set1_ps(1);
  const __m128i biases = _mm256_cvtps_ph(_mm256_load_ps(scales->smallest), kNearest);
  const __m256 bias = _mm256_cvtph_ps(biases);
  const __m256 extents = _mm256_sub_ps(_mm256_load_ps(scales->largest), bias);
  __m128i halves = _mm256_cvtps_ph(_mm256_div_ps(extents, _mm256_set1_ps(15)), kNearest);
  // float16 has no number, other than 0, whose inverse is infinite.
  const __m128i magnitudes = _mm_and_si128(halves, _mm_set1_epi16(0x7fff));
  const __m128i is_zero = _mm_cmpeq_epi16(magnitudes, _mm_setzero_si128());
  halves = _mm_blendv_epi8(halves, _mm256_cvtps_ph(ones, kNearest), is_zero);
  const __m256 scale = _mm256_cvtph_ps(halves);
  _mm256_store_ps(scales->bias, bias);
  _mm256_store_ps(scales->scale, scale);
  _mm256_store_ps(scales->inverse, _mm256_div_ps(ones, scale));
  _mm_store_si128(reinterpret_cast<__m128i*>(scales->halves), halves);
  _mm_store_si128(reinterpret_cast<__m128i*>(scales->biases), biases);
}

// kDim: elements of a row if they are known, else 0.
template <RowPrecision kPrecision, int64_t kDim>
CPR_EXT_INLINE void scale_group(const float* const* rows, int64_t count, int64_t elements,
                                float largest_error, ScalesOf8* scales) {
  const int64_t dim = kDim > 0 ? kDim : elements;
  for (int64_t r = 0; r < count; ++r) {
    const __m256 first = kDim >= kLanes ? _mm256_loadu_ps(rows[r]) : _mm256_set1_ps(rows[r][0]);
    __m256 lowest = first, highest = first;
    for (int64_t i = kDim >= kLanes ? kLanes : 0; i < dim; i += kLanes) {
      const __m256 values = load(rows[r], i, dim, first);
      lowest = _mm256_min_ps(values, lowest);
      highest = _mm256_max_ps(values, highest);
    }
    scales->smallest[r] = reduce<SmallerOf8>(lowest);
    scales->largest[r] = reduce<LargerOf8>(highest);
  }
  const __m256 zeros = _mm256_setzero_ps();  // added, they take a zero's sign off
  const __m256 smallest = _mm256_add_ps(_mm256_load_ps(scales->smallest), zeros);
  const __m256 largest = _mm256_add_ps(_mm256_load_ps(scales->largest), zeros);
  _mm256_store_ps(scales->smallest, smallest);
  _mm256_store_ps(scales->largest, largest);
  const __m256 extents = _mm256_sub_ps(largest, smallest);
  _mm256_store_ps(scales->extent, extents);
  _mm256_store_ps(scales->limit, limits_of(kPrecision, extents));
  if constexpr (kPrecision == RowPrecision::kInt8) {
    scale_int8(largest_error, scales);
  } else {
    scale_int4(scales);
  }
}

// 16 numbers of 32 bits, each of 16 bits, in order.
CPR_EXT_INLINE __m256i pack(__m256i a, __m256i b) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8);
}

CPR_EXT_INLINE __m128i to_bytes(__m256i words) {
  return _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}

CPR_EXT_INLINE void keep_int8(const ScalesOf8& scales, int64_t r, std::byte* out) {
  std::memcpy(out, &scales.scale[r], sizeof(float));
  std::memcpy(out + sizeof(float), &scales.bias[r], sizeof(float));
}

// The levels of values in int8, and how far the furthest of each lane lies from its own.
struct LevelsOf8 {
  __m256 biases;
  __m256 inverses;
  __m256i furthest;  // as numbers without a sign: NaN is above all others

  CPR_EXT_INLINE __m256i of(__m256 values) {
    const __m256 steps = _mm256_mul_ps(_mm256_sub_ps(values, biases), inverses);
    const __m256 nearest = _mm256_round_ps(steps, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m256 offsets = magnitude(_mm256_sub_ps(steps, nearest));
    furthest = _mm256_max_epu32(furthest, _mm256_castps_si256(offsets));
    return _mm256_cvtps_epi32(steps);
  }
};

// Row r of its group in int8; false if it must be rounded anew, with its errors.
template <int64_t kDim>
CPR_EXT_INLINE bool round_surely(const float* row, int64_t elements, const ScalesOf8& scales,
                                 int64_t r, std::byte* out) {
  const int64_t dim = kDim > 0 ? kDim : elements;
  LevelsOf8 levels{_mm256_set1_ps(scales.bias[r]), _mm256_set1_ps(scales.inverse[r]),
                   _mm256_setzero_si256()};
  int64_t i = 0;
  for (; i + 4 * kLanes <= dim; i += 4 * kLanes) {
    const __m256i a = levels.of(_mm256_loadu_ps(row + i));
    const __m256i b = levels.of(_mm256_loadu_ps(row + i + kLanes));
    const __m256i c = levels.of(_mm256_loadu_ps(row + i + 2 * kLanes));
    const __m256i d = levels.of(_mm256_loadu_ps(row + i + 3 * kLanes));
    const __m256i packed =
        _mm256_packus_epi16(_mm256_packus_epi32(a, b), _mm256_packus_epi32(c, d));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i),
                        _mm256_permutevar8x32_epi32(packed, order));
  }
  for (; i < dim; i += 2 * kLanes) {
    const __m256i a = levels.of(load(row, i, dim, levels.biases));
    const __m256i b = levels.of(load(row, i + kLanes, dim, levels.biases));
    store(out + i, to_bytes(pack(a, b)), std::min(2 * kLanes, dim - i));
  }
  keep_int8(scales, r, out + dim);
  const __m256 furthest = _mm256_castsi256_ps(levels.furthest);
  const __m256 sure = _mm256_set1_ps(scales.sure[r]);
  return _mm256_movemask_ps(_mm256_cmp_ps(furthest, sure, _CMP_NLT_UQ)) == 0;
}

// Levels of 16 elements as numbers of 16 bits; the elements' errors are added.
CPR_EXT_INLINE __m256i levels_of(const float* row, int64_t i, int64_t elements,
                                 const RowScale& scale, int most, ErrorsOf8* errors) {
  const __m256 bias = _mm256_set1_ps(scale.bias);
  __m256i levels[2];
  for (int half = 0; half < 2; ++half) {
    const __m256 values = load(row, i + half * kLanes, elements, bias);
    const __m256 steps = _mm256_mul_ps(_mm256_sub_ps(values, bias), _mm256_set1_ps(scale.inverse));
    const __m256i nearest = _mm256_max_epi32(_mm256_cvtps_epi32(steps), _mm256_setzero_si256());
    levels[half] = _mm256_min_epi32(nearest, _mm256_set1_epi32(most));
    // In int4 the product is exact, so that it is added as portable code does.
    errors->add(values, _mm256_fmadd_ps(_mm256_cvtepi32_ps(levels[half]),
                                        _mm256_set1_ps(scale.scale), bias));
  }
  return pack(levels[0], levels[1]);
}

template <int64_t kDim>
CPR_EXT_INLINE bool round_int8(const float* row, int64_t elements, ScalesOf8* scales, int64_t r,
                               std::byte* out, ErrorsOf8* of_rows) {
  if (__builtin_expect(round_surely<kDim>(row, elements, *scales, r, out), 1)) return true;
  const float extent = scales->extent[r];
  // Only here a level may be too large for an integer.
  if (extent > 0 && extent < kSmallestExtent) {
    float error = 0;
    const bool fits = round_row(row, elements, RowPrecision::kInt8, out, &error);
    of_rows->add(_mm256_set1_ps(error), _mm256_setzero_ps());
    return fits;
  }
  for (const float inverse : {scales->inverse[r], 255 / extent}) {
    const RowScale scale{scales->scale[r], scales->bias[r], inverse};
    ErrorsOf8 errors;
    for (int64_t i = 0; i < elements; i += 2 * kLanes) {
      const __m256i levels = levels_of(row, i, elements, scale, 255, &errors);
      store(out + i, to_bytes(levels), std::min(2 * kLanes, elements - i));
    }
    if (errors.pass(scales->limit[r], of_rows)) return true;
  }
  return false;
}

template <int64_t kDim>
CPR_EXT_INLINE bool round_int4(const float* row, int64_t elements, const ScalesOf8& scales,
                               int64_t r, std::byte* out, ErrorsOf8* of_rows) {
  const int64_t dim = kDim > 0 ? kDim : elements;
  const RowScale scale{scales.scale[r], scales.bias[r], scales.inverse[r]};
  ErrorsOf8 errors;
  for (int64_t i = 0; i < dim; i += 2 * kLanes) {
    const __m256i levels = levels_of(row, i, dim, scale, 15, &errors);
    const __m256i pairs = _mm256_madd_epi16(levels, _mm256_set1_epi32(0x00100001));
    store(out + i / 2, to_bytes(pack(pairs, pairs)), (std::min(2 * kLanes, dim - i) + 1) / 2);
  }
  std::byte* const behind = out + (dim + 1) / 2;
  std::memcpy(behind, &scales.halves[r], sizeof(uint16_t));
  std::memcpy(behind + sizeof(uint16_t), &scales.biases[r], sizeof(uint16_t));
  return errors.pass(scales.limit[r], of_rows);
}

// Eight float16 or bfloat16.
template <RowPrecision kPrecision>
CPR_EXT_INLINE __m128i halves_of(__m256 values) {
  if constexpr (kPrecision == RowPrecision::kFloat16) {
    return _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  } else {
    const __m256i bits = _mm256_castps_si256(values);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(_mm256_set1_epi32(0x7fff), odd);
    const __m256i halves = _mm256_srli_epi32(_mm256_add_epi32(bits, up), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
  }
}

// Its reverse.
template <RowPrecision kPrecision>
CPR_EXT_INLINE __m256 from_halves(__m128i halves) {
  if constexpr (kPrecision == RowPrecision::kFloat16) {
    return _mm256_cvtph_ps(halves);
  } else {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
  }
}

template <RowPrecision kPrecision, int64_t kDim>
CPR_EXT_INLINE bool round_halves(const float* row, int64_t elements, std::byte* out,
                                 ErrorsOf8* of_rows) {
  const int64_t dim = kDim > 0 ? kDim : elements;
  const __m256 zeros = _mm256_setzero_ps();
  __m256 highest = zeros;
  ErrorsOf8 errors;
  for (int64_t i = 0; i < dim; i += kLanes) {
    const __m256 values = load(row, i, dim, zeros);
    highest = _mm256_max_ps(magnitude(values), highest);  // keeps what it has beside NaN
    const __m128i halves = halves_of<kPrecision>(values);
    errors.add(values, from_halves<kPrecision>(halves));
    store(out + i * 2, halves, 2 * std::min(kLanes, dim - i));
  }
  return errors.pass(limit_of(kPrecision, reduce<LargerOf8>(highest)), of_rows);
}

template <RowPrecision kPrecision, int64_t kDim>
CPR_EXT_AVX2 float round_rows(const RowsOf& rows, int64_t begin, int64_t end, std::byte* out,
                              uint8_t* broken) {
  constexpr bool kIsScaled = kPrecision == RowPrecision::kInt8 || kPrecision == RowPrecision::kInt4;
  const int64_t dim = kDim > 0 ? kDim : rows.array->row_bytes / static_cast<int64_t>(sizeof(float));
  const int64_t row_bytes = dim * static_cast<int64_t>(sizeof(float));
  const int64_t stored_bytes = stored_row_bytes(kPrecision, dim);
  const int64_t ahead = rows_ahead(row_bytes, rows.row_ids == nullptr);
  ErrorsOf8 errors;
  ScalesOf8 scales = {};
  const float* group[kGroupRows];
  for (int64_t first = begin; first < end; first += kGroupRows) {
    const int64_t count = std::min(kGroupRows, end - first);
    for (int64_t r = 0; r < count; ++r) {
      group[r] = reinterpret_cast<const float*>(rows.row(first + r));
    }
    if constexpr (kIsScaled) {
      scale_group<kPrecision, kDim>(group, count, dim, errors.largest(), &scales);
    }
    for (int64_t r = 0; r < count; ++r) {
      // One by one: all at once they would wait for one another.
      prefetch_row(rows.row(std::min(first + r + ahead, end - 1)), row_bytes);
      std::byte* to = out + (first + r) * stored_bytes;
      bool fits;
      if constexpr (kPrecision == RowPrecision::kInt8) {
        fits = round_int8<kDim>(group[r], dim, &scales, r, to, &errors);
      } else if constexpr (kPrecision == RowPrecision::kInt4) {
        fits = round_int4<kDim>(group[r], dim, scales, r, to, &errors);
      } else {
        fits = round_halves<kPrecision, kDim>(group[r], dim, to, &errors);
      }
      if (__builtin_expect(fits, 1)) continue;
      std::memset(to, 0, static_cast<size_t>(stored_bytes));
      broken[first + r] = 1;
    }
  }
  return errors.largest();
}

template <RowPrecision kPrecision>
float round_rows(const RowsOf& rows, int64_t begin, int64_t end, std::byte* out, uint8_t* broken) {
  switch (rows.array->row_bytes) {
    case 16 * sizeof(float):
      return round_rows<kPrecision, 16>(rows, begin, end, out, broken);
    case 32 * sizeof(float):
      return round_rows<kPrecision, 32>(rows, begin, end, out, broken);
    case 64 * sizeof(float):
      return round_rows<kPrecision, 64>(rows, begin, end, out, broken);
    case 128 * sizeof(float):
      return round_rows<kPrecision, 128>(rows, begin, end, out, broken);
    default:
      return round_rows<kPrecision, 0>(rows, begin, end, out, broken);
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
    return from_halves<kPrecision>(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
}

template <RowPrecision kPrecision>
CPR_EXT_AVX2 void restore_rows(const std::byte* stored, int64_t begin, int64_t end,
                               const RowsOf& rows) {
  const int64_t elements = rows.array->row_bytes / static_cast<int64_t>(sizeof(float));
  const int64_t stored_bytes = stored_row_bytes(kPrecision, elements);
  const int64_t ahead = rows_ahead(rows.array->row_bytes, rows.row_ids == nullptr);
  for (int64_t at = begin; at < end; ++at) {
    if (at + ahead < end) prefetch_row(rows.row(at + ahead), rows.array->row_bytes);
    const std::byte* const from = stored + at * stored_bytes;
    auto* const row = reinterpret_cast<float*>(rows.row(at));
    float ends[2] = {};  // scale and bias
    if constexpr (kPrecision == RowPrecision::kInt8) {
      std::memcpy(ends, from + elements, sizeof(ends));
    } else if constexpr (kPrecision == RowPrecision::kInt4) {
      uint16_t halves[2];
      std::memcpy(halves, from + (elements + 1) / 2, sizeof(halves));
      for (int i = 0; i < 2; ++i) ends[i] = from_float16(halves[i]);
    }
    const __m256 scale = _mm256_set1_ps(ends[0]), bias = _mm256_set1_ps(ends[1]);
    for (int64_t i = 0; i < elements; i += kLanes) {
      const __m256 values = restored<kPrecision>(from, i, elements, scale, bias);
      if (i + kLanes <= elements) {
        _mm256_storeu_ps(row + i, values);
      } else {
        _mm256_maskstore_ps(row + i, lanes_before(elements - i), values);
      }
    }
  }
}

}  // namespace
}  // namespace avx2

float round_block_avx2(const RowsOf& rows, RowPrecision precision, int64_t begin, int64_t end,
                       std::byte* out, uint8_t* broken) {
  switch (precision) {
    case RowPrecision::kInt8:
      return avx2::round_rows<RowPrecision::kInt8>(rows, begin, end, out, broken);
    case RowPrecision::kInt4:
      return avx2::round_rows<RowPrecision::kInt4>(rows, begin, end, out, broken);
    case RowPrecision::kFloat16:
      return avx2::round_rows<RowPrecision::kFloat16>(rows, begin, end, out, broken);
    case RowPrecision::kBFloat16:
      return avx2::round_rows<RowPrecision::kBFloat16>(rows, begin, end, out, broken);
    case RowPrecision::kExact:
      break;
  }
  return round_block_portable(rows, precision, begin, end, out, broken);
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
