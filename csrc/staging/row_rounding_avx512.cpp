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

// Rows are rounded in groups: what each row needs once is then computed for all of them at once.
constexpr int64_t kGroupRows = 16;
// A group is read twice, and prefetched while the one before it is rounded, or the one before that.
constexpr int64_t kGroupBytes = 4096;

CPR_EXT_INLINE __mmask16 lanes_from(int64_t begin, int64_t elements) {
  const int64_t left = elements - begin;
  return left >= kLanes ? static_cast<__mmask16>(0xffff) : static_cast<__mmask16>((1u << left) - 1);
}

CPR_EXT_INLINE __m512 load(const float* values, __mmask16 lanes) {
  return lanes == 0xffff ? _mm512_loadu_ps(values) : _mm512_maskz_loadu_ps(lanes, values);
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
    largest = lanes == 0xffff ? _mm512_max_epu32(largest, error)
                              : _mm512_mask_max_epu32(largest, lanes, largest, error);
  }
  CPR_EXT_INLINE bool are_broken() const {
    return _mm512_cmp_ps_mask(_mm512_castsi512_ps(largest), limit, _CMP_NLE_UQ) != 0;
  }
};

struct Smaller {
  CPR_EXT_INLINE static __m512 of(__m512 a, __m512 b) { return _mm512_min_ps(a, b); }
};
struct Larger {
  CPR_EXT_INLINE static __m512 of(__m512 a, __m512 b) { return _mm512_max_ps(a, b); }
};

// Lane i: the smallest or the largest lane of vector i.
template <class Pick>
CPR_EXT_INLINE __m512 reduce_each(const __m512 (&rows)[kGroupRows]) {
  __m512 quarters[4];
  for (int i = 0; i < 4; ++i) {
    const __m512 a = rows[i], b = rows[4 + i], c = rows[8 + i], d = rows[12 + i];
    const __m512 ab = Pick::of(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    const __m512 cd = Pick::of(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
    quarters[i] = Pick::of(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
  }
  __m512 halves[2];
  for (int i = 0; i < 2; ++i) {
    const __m512 a = quarters[2 * i], b = quarters[2 * i + 1];
    halves[i] = Pick::of(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
  }
  return Pick::of(_mm512_shuffle_ps(halves[0], halves[1], 0x88),
                  _mm512_shuffle_ps(halves[0], halves[1], 0xdd));
}

CPR_EXT_INLINE __m512 limits_of(RowPrecision precision, __m512 extents) {
  const __mmask16 is_finite =
      _mm512_cmp_ps_mask(extents, _mm512_set1_ps(kLargestExtent), _CMP_LE_OQ);
  const __mmask16 is_large =
      _mm512_cmp_ps_mask(extents, _mm512_set1_ps(kSmallestExtent), _CMP_NLT_UQ);
  const __m512 limits =
      _mm512_maskz_mul_ps(is_large, extents, _mm512_set1_ps(limit_factor(precision)));
  return _mm512_mask_blend_ps(is_finite, _mm512_set1_ps(-1), limits);
}

// What each row of a group needs; of halves only the limit.
struct Scales {
  alignas(64) float limit[kGroupRows];
  alignas(64) float bias[kGroupRows];
  alignas(64) float scale[kGroupRows];
  alignas(64) float inverse[kGroupRows];
  alignas(64) float extent[kGroupRows];     // int8
  alignas(64) float sure[kGroupRows];       // int8, see sure_offsets()
  alignas(64) uint32_t halves[kGroupRows];  // int4: scale and bias, as they are kept
};

// The offset of a value is how far it lies from its level, in steps. No value of a row whose
// offsets are all below what is returned breaks the bound, or has an error above `largest`.
//
// With u = 2^-24, E the extent and M the largest magnitude: |x - x'|, as Errors computes it, is at
// most offset * E / 255 if nothing else is rounded; kFbgemmEpsilon, 5.2 u E and 1.01 u (M + E /
// 255) are the most that the epsilon and roundings add. A little more than that is taken off here.
CPR_EXT_INLINE __m512 sure_offsets(__m512 smallest, __m512 highest, __m512 extents, __m512 inverses,
                                   float largest) {
  const __m512 magnitudes = _mm512_max_ps(magnitude(smallest), magnitude(highest));
  const __m512 lost = _mm512_fmadd_ps(_mm512_set1_ps(1.1f * 0x1p-24f),
                                      _mm512_fmadd_ps(_mm512_set1_ps(6), extents, magnitudes),
                                      _mm512_set1_ps(1.1f * kFbgemmEpsilon));
  const __m512 allowed =
      _mm512_min_ps(_mm512_mul_ps(_mm512_set1_ps(limit_factor(RowPrecision::kInt8)), extents),
                    _mm512_set1_ps(largest));
  const __m512 sure = _mm512_mul_ps(_mm512_sub_ps(allowed, lost), inverses);
  const __mmask16 is_usual =
      _mm512_cmp_ps_mask(extents, _mm512_set1_ps(kLargestExtent / 1024), _CMP_LE_OQ) &
      _mm512_cmp_ps_mask(extents, _mm512_set1_ps(kSmallestExtent), _CMP_GE_OQ);
  return _mm512_mask_blend_ps(is_usual, _mm512_set1_ps(-1), sure);
}

CPR_EXT_INLINE void scale_int8(__m512 smallest, __m512 extents, Scales* scales) {
  const __m512 levels = _mm512_set1_ps(255);
  _mm512_store_ps(scales->bias, smallest);
  _mm512_store_ps(scales->extent, extents);
  _mm512_store_ps(scales->scale, _mm512_div_ps(extents, levels));
  const __m512 widened = _mm512_add_ps(extents, _mm512_set1_ps(kFbgemmEpsilon));
  _mm512_store_ps(scales->inverse, _mm512_div_ps(levels, widened));
}

CPR_EXT_INLINE void scale_int4(__m512 smallest, __m512 largest, Scales* scales) {
  const __m512 ones = _mm512_set1_ps(1);
  const __m256i biases = _mm512_cvtps_ph(smallest, _MM_FROUND_TO_NEAREST_INT);
  const __m512 bias = _mm512_cvtph_ps(biases);
  const __m512 steps = _mm512_div_ps(_mm512_sub_ps(largest, bias), _mm512_set1_ps(15));
  __m256i halves = _mm512_cvtps_ph(steps, _MM_FROUND_TO_NEAREST_INT);
  // float16 has no number, other than 0, whose inverse is infinite.
  const __mmask16 is_zero = _mm256_testn_epi16_mask(halves, _mm256_set1_epi16(0x7fff));
  halves =
      _mm256_mask_blend_epi16(is_zero, halves, _mm512_cvtps_ph(ones, _MM_FROUND_TO_NEAREST_INT));
  const __m512 scale = _mm512_cvtph_ps(halves);
  _mm512_store_ps(scales->bias, bias);
  _mm512_store_ps(scales->scale, scale);
  _mm512_store_ps(scales->inverse, _mm512_div_ps(ones, scale));
  _mm512_store_si512(scales->halves,
                     _mm512_or_si512(_mm512_cvtepu16_epi32(halves),
                                     _mm512_slli_epi32(_mm512_cvtepu16_epi32(biases), 16)));
}

// Rows [0, count) of a group; the others are any that can be read.
// kDim: elements of a row if they are known, else 0.
template <RowPrecision kPrecision, int64_t kDim>
CPR_EXT_INLINE void scale_group(const float* const* rows, int64_t count, int64_t elements,
                                float largest_error, Scales* scales) {
  const int64_t dim = kDim > 0 ? kDim : elements;
  constexpr bool kIsHalf =
      kPrecision == RowPrecision::kFloat16 || kPrecision == RowPrecision::kBFloat16;
  __m512 smallest[kGroupRows], largest[kGroupRows];
  for (int64_t r = 0; r < kGroupRows; ++r) {
    smallest[r] = largest[r] = _mm512_setzero_ps();
    if (r >= count) continue;
    int64_t begin = 0;
    if (!kIsHalf && dim < kLanes) smallest[r] = largest[r] = _mm512_set1_ps(rows[r][0]);
    if (!kIsHalf && dim >= kLanes) {
      smallest[r] = largest[r] = _mm512_loadu_ps(rows[r]);
      begin = kLanes;
    }
    for (int64_t i = begin; i < dim; i += kLanes) {
      const __mmask16 lanes = lanes_from(i, dim);
      const __m512 values = load(rows[r] + i, lanes);
      if (kIsHalf) {
        largest[r] = _mm512_max_ps(largest[r], magnitude(values));
      } else {
        smallest[r] = _mm512_mask_min_ps(smallest[r], lanes, smallest[r], values);
        largest[r] = _mm512_mask_max_ps(largest[r], lanes, largest[r], values);
      }
    }
  }
  const __m512 high = reduce_each<Larger>(largest);
  if constexpr (kIsHalf) {
    _mm512_store_ps(scales->limit, limits_of(kPrecision, high));
    return;
  }
  const __m512 zeros = _mm512_setzero_ps();  // added to have no negative ones
  const __m512 bottom = _mm512_add_ps(reduce_each<Smaller>(smallest), zeros);
  const __m512 top = _mm512_add_ps(high, zeros);
  const __m512 extents = _mm512_sub_ps(top, bottom);
  _mm512_store_ps(scales->limit, limits_of(kPrecision, extents));
  if constexpr (kPrecision == RowPrecision::kInt8) {
    scale_int8(bottom, extents, scales);
    const __m512 inverses = _mm512_load_ps(scales->inverse);
    _mm512_store_ps(scales->sure, sure_offsets(bottom, top, extents, inverses, largest_error));
  } else {
    scale_int4(bottom, top, scales);
  }
}

// Row r of its group.
template <int64_t kDim>
CPR_EXT_INLINE Errors round_int8(const float* row, int64_t elements, const Scales& scales,
                                 int64_t r, std::byte* out) {
  const int64_t dim = kDim > 0 ? kDim : elements;
  const __m512 steps = _mm512_set1_ps(scales.scale[r]);
  const __m512 biases = _mm512_set1_ps(scales.bias[r]);
  const __m512 inverses = _mm512_set1_ps(scales.inverse[r]);
  Errors errors{_mm512_set1_ps(scales.limit[r]), _mm512_setzero_si512()};
  for (int64_t i = 0; i < dim; i += kLanes) {
    const __mmask16 lanes = lanes_from(i, dim);
    const __m512 values = load(row + i, lanes);
    const __m512i levels =
        _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_sub_ps(values, biases), inverses));
    errors.add(lanes, values, _mm512_fmadd_ps(_mm512_cvtepi32_ps(levels), steps, biases));
    const __m128i bytes = _mm512_cvtepi32_epi8(levels);
    if (lanes == 0xffff) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), bytes);
    } else {
      _mm_mask_storeu_epi8(out + i, lanes, bytes);
    }
  }
  std::memcpy(out + dim, &scales.scale[r], sizeof(float));
  std::memcpy(out + dim + sizeof(float), &scales.bias[r], sizeof(float));
  return errors;
}

// The levels of 16 values in int8, and how far the furthest of each lane lies from its own.
struct Levels {
  __m512 biases;
  __m512 inverses;
  __m512i furthest = _mm512_setzero_si512();  // as numbers without a sign: NaN is above all others

  CPR_EXT_INLINE __m512i of(__m512 values) {
    const __m512 steps = _mm512_mul_ps(_mm512_sub_ps(values, biases), inverses);
    const __m512 offsets = magnitude(_mm512_reduce_ps(steps, _MM_FROUND_TO_NEAREST_INT));
    furthest = _mm512_max_epu32(furthest, _mm512_castps_si512(offsets));
    return _mm512_cvtps_epi32(steps);
  }
};

// 64 levels, as bytes.
CPR_EXT_INLINE __m512i bytes_of(__m512i a, __m512i b, __m512i c, __m512i d) {
  const __m512i packed = _mm512_packus_epi16(_mm512_packus_epi32(a, b), _mm512_packus_epi32(c, d));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_epi32(order, packed);
}

// Row r of its group; false if it must be rounded anew, by round_int8.
template <int64_t kDim>
CPR_EXT_INLINE bool round_surely(const float* row, int64_t elements, const Scales& scales,
                                 int64_t r, std::byte* out) {
  const int64_t dim = kDim > 0 ? kDim : elements;
  Levels levels{_mm512_set1_ps(scales.bias[r]), _mm512_set1_ps(scales.inverse[r])};
  int64_t i = 0;
  for (; kDim >= 4 * kLanes && i + 4 * kLanes <= dim; i += 4 * kLanes) {
    const __m512i a = levels.of(_mm512_loadu_ps(row + i));
    const __m512i b = levels.of(_mm512_loadu_ps(row + i + kLanes));
    const __m512i c = levels.of(_mm512_loadu_ps(row + i + 2 * kLanes));
    const __m512i d = levels.of(_mm512_loadu_ps(row + i + 3 * kLanes));
    _mm512_storeu_si512(out + i, bytes_of(a, b, c, d));
  }
  for (; i < dim; i += kLanes) {
    const __mmask16 lanes = lanes_from(i, dim);
    if (lanes == 0xffff) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i),
                       _mm512_cvtepi32_epi8(levels.of(_mm512_loadu_ps(row + i))));
    } else {
      const __m512i last = levels.of(_mm512_mask_loadu_ps(levels.biases, lanes, row + i));
      _mm_mask_storeu_epi8(out + i, lanes, _mm512_cvtepi32_epi8(last));
    }
  }
  std::memcpy(out + dim, &scales.scale[r], sizeof(float));
  std::memcpy(out + dim + sizeof(float), &scales.bias[r], sizeof(float));
  return _mm512_cmp_ps_mask(_mm512_castsi512_ps(levels.furthest), _mm512_set1_ps(scales.sure[r]),
                            _CMP_NLT_UQ) == 0;
}

template <int64_t kDim>
CPR_EXT_INLINE Errors round_int4(const float* row, int64_t elements, const Scales& scales,
                                 int64_t r, std::byte* out) {
  const int64_t dim = kDim > 0 ? kDim : elements;
  const __m512 steps = _mm512_set1_ps(scales.scale[r]);
  const __m512 biases = _mm512_set1_ps(scales.bias[r]);
  const __m512 inverses = _mm512_set1_ps(scales.inverse[r]);
  Errors errors{_mm512_set1_ps(scales.limit[r]), _mm512_setzero_si512()};
  for (int64_t i = 0; i < dim; i += kLanes) {
    const __mmask16 lanes = lanes_from(i, dim);
    const __m512 values = load(row + i, lanes);
    const __m512i nearest =
        _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_sub_ps(values, biases), inverses));
    const __m512i positive = _mm512_max_epi32(nearest, _mm512_setzero_si512());
    const __m512i levels = _mm512_maskz_min_epi32(lanes, positive, _mm512_set1_epi32(15));
    errors.add(lanes, values,
               _mm512_add_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(levels), steps), biases));
    // Two lanes of 32 bits, of which 4 count, become 8 bits.
    const __m128i bytes =
        _mm512_cvtepi64_epi8(_mm512_or_si512(levels, _mm512_srli_epi64(levels, 28)));
    if (lanes == 0xffff) {
      _mm_storel_epi64(reinterpret_cast<__m128i*>(out + i / 2), bytes);
    } else {
      const int64_t num_bytes = (dim - i + 1) / 2;
      _mm_mask_storeu_epi8(out + i / 2, static_cast<__mmask16>((1u << num_bytes) - 1), bytes);
    }
  }
  std::memcpy(out + (dim + 1) / 2, &scales.halves[r], sizeof(uint32_t));
  return errors;
}

template <int64_t kDim, bool kIsFloat16>
CPR_EXT_INLINE Errors round_halves(const float* row, int64_t elements, float limit,
                                   std::byte* out) {
  const int64_t dim = kDim > 0 ? kDim : elements;
  Errors errors{_mm512_set1_ps(limit), _mm512_setzero_si512()};
  for (int64_t i = 0; i < dim; i += kLanes) {
    const __mmask16 lanes = lanes_from(i, dim);
    const __m512 values = load(row + i, lanes);
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
    if (lanes == 0xffff) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i * 2), halves);
    } else {
      _mm256_mask_storeu_epi16(out + i * 2, lanes, halves);
    }
  }
  return errors;
}

template <RowPrecision kPrecision, int64_t kDim>
CPR_EXT_INLINE Errors round_of_group(const float* row, int64_t dim, Scales* scales, int64_t r,
                                     std::byte* out) {
  if constexpr (kPrecision == RowPrecision::kInt4) {
    return round_int4<kDim>(row, dim, *scales, r, out);
  } else if constexpr (kPrecision == RowPrecision::kInt8) {
    const Errors errors = round_int8<kDim>(row, dim, *scales, r, out);
    if (__builtin_expect(!errors.are_broken(), 1)) return errors;
    scales->inverse[r] = 255 / scales->extent[r];
    return round_int8<kDim>(row, dim, *scales, r, out);
  } else {
    return round_halves<kDim, kPrecision == RowPrecision::kFloat16>(row, dim, scales->limit[r],
                                                                    out);
  }
}

template <RowPrecision kPrecision, int64_t kDim>
CPR_EXT_AVX512 float round_rows(const RowsOf& rows, int64_t begin, int64_t end, std::byte* out,
                                uint8_t* broken) {
  const int64_t dim = kDim > 0 ? kDim : rows.array->row_bytes / static_cast<int64_t>(sizeof(float));
  const int64_t row_bytes = dim * static_cast<int64_t>(sizeof(float));
  const int64_t stored_bytes = stored_row_bytes(kPrecision, dim);
  const int64_t group_rows = std::clamp<int64_t>(kGroupBytes / row_bytes, 2, kGroupRows);
  const int64_t ahead = std::max(group_rows, rows_ahead(row_bytes, rows.row_ids == nullptr));
  __m512 largest = _mm512_setzero_ps();  // errors so far
  Scales scales;
  const float* group[kGroupRows];
  for (int64_t first = begin; first < end; first += group_rows) {
    const int64_t count = std::min(group_rows, end - first);
    for (int64_t r = 0; r < count; ++r) {
      group[r] = reinterpret_cast<const float*>(rows.row(first + r));
    }
    const float largest_error =
        kPrecision == RowPrecision::kInt8 ? _mm512_reduce_max_ps(largest) : 0;
    scale_group<kPrecision, kDim>(group, count, dim, largest_error, &scales);
    for (int64_t r = 0; r < count; ++r) {
      // One by one: all at once they would wait for one another.
      prefetch_row(rows.row(std::min(first + r + ahead, end - 1)), row_bytes);
      std::byte* to = out + (first + r) * stored_bytes;
      if constexpr (kPrecision == RowPrecision::kInt8) {
        if (__builtin_expect(round_surely<kDim>(group[r], dim, scales, r, to), 1)) continue;
      }
      const Errors errors = round_of_group<kPrecision, kDim>(group[r], dim, &scales, r, to);
      if (__builtin_expect(errors.are_broken(), 0)) {
        std::memset(to, 0, stored_bytes);
        broken[first + r] = 1;
      } else {
        largest = _mm512_max_ps(largest, _mm512_castsi512_ps(errors.largest));
      }
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
  const int64_t ahead = rows_ahead(row_bytes, rows.row_ids == nullptr);
  constexpr bool kIsInt4 = kPrecision == RowPrecision::kInt4;
  for (int64_t i = begin; i < end; ++i) {
    if (i + ahead < end) prefetch_row(rows.row(i + ahead), row_bytes);
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

#undef CPR_EXT_INLINE
#endif
