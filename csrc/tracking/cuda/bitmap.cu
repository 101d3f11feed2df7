#include <algorithm>

#include "tracking/cuda/bitmap.h"
#include "tracking/cuda/grid.h"
#include "tracking/cuda/sum.h"

namespace cpr_ext {

namespace {

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

DeviceBitmap::DeviceBitmap(int64_t num_rows, cudaStream_t stream)
    : num_bytes_(num_bit_words(num_rows) * static_cast<int64_t>(sizeof(uint32_t))),
      words_(num_bytes_) {
  CPR_EXT_CUDA(cudaMemsetAsync(words_.data(), 0, static_cast<size_t>(num_bytes_), stream));
}

void DeviceBitmap::launch_count(RowRange range, unsigned long long* sum,
                                cudaStream_t stream) const {
  const int64_t num_blocks = blocks_for(num_bit_words(range.size()) + 1);
  CPR_EXT_LAUNCH(count_bits_kernel, range.size() == 0 ? 0 : std::min(kMostBlocks, num_blocks),
                 kThreads, stream, words(), range.begin, range.end, sum);
}

int64_t DeviceBitmap::count(RowRange range, int device) const {
  return sums_on_device(device, 1, [&](unsigned long long* sum, cudaStream_t stream) {
    launch_count(range, sum, stream);
  })[0];
}

}  // namespace cpr_ext
