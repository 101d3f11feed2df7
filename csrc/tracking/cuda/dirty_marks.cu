#include <algorithm>

#include "tracking/cuda/dirty_marks.h"
#include "tracking/cuda/grid.h"

namespace cpr_ext {

namespace {

__global__ void __launch_bounds__(kThreads)
    count_dirty_kernel(const uint32_t* counts, int64_t num_rows, unsigned long long* num_dirty) {
  unsigned mine = 0;
  for (int64_t row = thread_of_grid(); row < num_rows;
       row += static_cast<int64_t>(gridDim.x) * kThreads) {
    mine += counts[row] != 0;
  }
  add_over_warps(mine, num_dirty);
}

// REQUIRES: begin < end.
__global__ void __launch_bounds__(kThreads)
    count_bits_kernel(const uint32_t* words, int64_t begin, int64_t end, unsigned long long* sum) {
  const int64_t first = begin / kBitsPerWord;
  const int64_t last = (end - 1) / kBitsPerWord;
  unsigned mine = 0;
  for (int64_t i = first + thread_of_grid(); i <= last;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    uint32_t bits = words[i];
    if (i == first) bits &= ~0u << (begin % kBitsPerWord);
    if (i == last) bits &= ~0u >> (kBitsPerWord - 1 - (end - 1) % kBitsPerWord);
    mine += static_cast<unsigned>(__popc(bits));
  }
  add_over_warps(mine, sum);
}

}  // namespace

void launch_count(const DirtyMarks& marks, RowRange range, unsigned long long* sum,
                  cudaStream_t stream) {
  if (range.size() == 0) return;
  const int64_t items = marks.are_counts ? range.size() : num_bit_words(range.size()) + 1;
  const int64_t num_blocks = std::min(kMostBlocks, blocks_for(items));
  if (marks.are_counts) {
    CPR_EXT_LAUNCH(count_dirty_kernel, num_blocks, kThreads, stream, marks.words + range.begin,
                   range.size(), sum);
  } else {
    CPR_EXT_LAUNCH(count_bits_kernel, num_blocks, kThreads, stream, marks.words, range.begin,
                   range.end, sum);
  }
}

DeviceBitmap::DeviceBitmap(int64_t num_rows, cudaStream_t stream)
    : num_bytes_(num_bit_words(num_rows) * static_cast<int64_t>(sizeof(uint32_t))),
      words_(num_bytes_) {
  CPR_EXT_CUDA(cudaMemsetAsync(words_.data(), 0, static_cast<size_t>(num_bytes_), stream));
}

}  // namespace cpr_ext
