#include "selection/collect_between.h"

#include <algorithm>

#include "core/avx512.h"
#include "selection/block_rows.h"

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

}  // namespace cpr_ext
