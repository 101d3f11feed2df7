#include "selection/score_passes.h"

#include <algorithm>
#include <cstring>

#include "core/avx512.h"

namespace cpr_ext {

namespace {

// Keys that are not wanted are written too, over one another, so into `block` first.
int64_t collect_portable(const CountKeys& keys, int64_t begin, int64_t end, uint32_t low,
                         uint32_t high, std::vector<uint32_t>* found) {
  uint32_t block[kBlockRows];
  int64_t num_above = 0;
  for (int64_t first = begin; first < end; first += kBlockRows) {
    const int64_t stop = std::min(end, first + kBlockRows);
    size_t size = 0;
    for (int64_t row_id = first; row_id < stop; ++row_id) {
      const uint32_t key = keys[row_id];
      block[size] = key;
      size += key - low <= high - low;
      num_above += key > high;
    }
    found->insert(found->end(), block, block + size);
  }
  return num_above;
}

#if CPR_EXT_HAS_AVX512

CPR_EXT_AVX512 int64_t collect_avx512(const CountKeys& keys, int64_t begin, int64_t end,
                                      uint32_t low, uint32_t high, std::vector<uint32_t>* found) {
  constexpr int64_t kLanes = 16;
  uint32_t block[kBlockRows + kLanes];
  const __m512i lowest = _mm512_set1_epi32(static_cast<int>(low));
  const __m512i width = _mm512_set1_epi32(static_cast<int>(high - low));
  const __m512i highest = _mm512_set1_epi32(static_cast<int>(high));
  int64_t num_above = 0;
  while (end - begin >= kLanes) {
    const int64_t stop = begin + std::min(kBlockRows, (end - begin) / kLanes * kLanes);
    size_t size = 0;
    for (; begin < stop; begin += kLanes) {
      const __m512i key = _mm512_loadu_si512(keys.scores + begin);
      const __mmask16 between = _mm512_cmple_epu32_mask(_mm512_sub_epi32(key, lowest), width);
      _mm512_storeu_si512(block + size, _mm512_maskz_compress_epi32(between, key));
      size += static_cast<size_t>(__builtin_popcount(between));
      num_above += __builtin_popcount(_mm512_cmpgt_epu32_mask(key, highest));
    }
    found->insert(found->end(), block, block + size);
  }
  return num_above + collect_portable(keys, begin, end, low, high, found);
}

#endif

// Slots past the last chosen row are written too, so rows go into `block` and not into `out`.
template <class Keys>
int64_t* write_portable(const Keys& keys, int64_t begin, int64_t end, uint32_t last, int64_t* out) {
  int64_t block[kBlockRows];
  for (int64_t first = begin; first < end; first += kBlockRows) {
    const int64_t stop = std::min(end, first + kBlockRows);
    size_t size = 0;
    for (int64_t row_id = first; row_id < stop; ++row_id) {
      block[size] = row_id;
      size += keys[row_id] > last;
    }
    std::memcpy(out, block, size * sizeof(int64_t));
    out += size;
  }
  return out;
}

#if CPR_EXT_HAS_AVX512

// 16 rows at a time: compare, pack the positions of those chosen, widen them to row ids.
template <class Keys>
CPR_EXT_AVX512 int64_t* write_avx512(const Keys& keys, int64_t begin, int64_t end, uint32_t last,
                                     int64_t* out) {
  constexpr int64_t kLanes = 16;
  int64_t block[kBlockRows + kLanes];
  const __m512i threshold = _mm512_set1_epi32(static_cast<int>(last));
  const __m512i positions = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (int64_t first = begin; first < end; first += kBlockRows) {
    const int64_t stop = std::min(end, first + kBlockRows);
    size_t size = 0;
    int64_t row_id = first;
    for (; row_id + kLanes <= stop; row_id += kLanes) {
      const __m512i bits = _mm512_loadu_si512(keys.scores + row_id);
      const __mmask16 chosen =
          _mm512_cmpgt_epu32_mask(_mm512_slli_epi32(bits, Keys::kShift), threshold);
      const __m512i packed = _mm512_maskz_compress_epi32(chosen, positions);
      const __m512i base = _mm512_set1_epi64(row_id);
      const __m512i low = _mm512_cvtepi32_epi64(_mm512_castsi512_si256(packed));
      const __m512i high = _mm512_cvtepi32_epi64(_mm512_extracti64x4_epi64(packed, 1));
      _mm512_storeu_si512(block + size, _mm512_add_epi64(low, base));
      _mm512_storeu_si512(block + size + kLanes / 2, _mm512_add_epi64(high, base));
      size += static_cast<size_t>(__builtin_popcount(chosen));
    }
    for (; row_id < stop; ++row_id) {
      block[size] = row_id;
      size += keys[row_id] > last;
    }
    std::memcpy(out, block, size * sizeof(int64_t));
    out += size;
  }
  return out;
}

#endif

template <class Keys>
int64_t* write(const Keys& keys, int64_t begin, int64_t end, uint32_t last, int64_t* out) {
#if CPR_EXT_HAS_AVX512
  if (instruction_set() == InstructionSet::kAvx512) {
    return write_avx512(keys, begin, end, last, out);
  }
#endif
  return write_portable(keys, begin, end, last, out);
}

}  // namespace

int64_t collect_between(const CountKeys& keys, int64_t begin, int64_t end, uint32_t low,
                        uint32_t high, std::vector<uint32_t>* found) {
#if CPR_EXT_HAS_AVX512
  if (instruction_set() == InstructionSet::kAvx512) {
    return collect_avx512(keys, begin, end, low, high, found);
  }
#endif
  return collect_portable(keys, begin, end, low, high, found);
}

int64_t* write_above(const CountKeys& keys, int64_t begin, int64_t end, uint32_t last,
                     int64_t* out) {
  return write(keys, begin, end, last, out);
}

int64_t* write_above(const FloatKeys& keys, int64_t begin, int64_t end, uint32_t last,
                     int64_t* out) {
  return write(keys, begin, end, last, out);
}

}  // namespace cpr_ext
