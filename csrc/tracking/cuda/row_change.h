// row_change() of a row by eight lanes of a warp, bit for bit; for *.cu only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tracking/cuda/grid.h"
#include "tracking/row_change.h"

namespace cpr_ext {

constexpr int kLanesPerRow = 8;  // each has one of row_change()'s independent sums
constexpr int kRowsPerBlock = kThreads / kLanesPerRow;

__device__ inline int lane_of_row() { return static_cast<int>(threadIdx.x % kLanesPerRow); }

// The row of this thread in the whole grid, by position.
__device__ inline int64_t row_of_grid() { return thread_of_grid() / kLanesPerRow; }

// `now` and `before`: (size) elements; a size of 0 gives 0. All lanes of a warp call it, and those
// of a row get its change.
template <class Format>
__device__ float row_change_of_lanes(const std::byte* now_data, const std::byte* before_data,
                                     int64_t size) {
  const auto* now = reinterpret_cast<const typename Format::Stored*>(now_data);
  const auto* before = reinterpret_cast<const typename Format::Stored*>(before_data);
  typename Format::Value sum = 0;
  for (int64_t i = lane_of_row(); i < size; i += kLanesPerRow) {
    sum = add_square(sum, Format::load(now[i]) - Format::load(before[i]));
  }
  // In row_change()'s order; right in the row's first lane.
  sum += __shfl_down_sync(kAllLanes, sum, 4);
  sum += __shfl_down_sync(kAllLanes, sum, 1);
  sum += __shfl_down_sync(kAllLanes, sum, 2);
  if (lane_of_row() == 0 && sum != sum) sum = careful_sum<Format>(now, before, size);
  const auto change = static_cast<float>(square_root(sum));
  return __shfl_sync(kAllLanes, change, static_cast<int>(threadIdx.x % 32) - lane_of_row());
}

}  // namespace cpr_ext
