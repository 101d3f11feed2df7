// How the kernels of this room are laid out; for *.cu only.
#pragma once

#include "core/cuda/device.h"

namespace cpr_ext {

constexpr int kThreads = 256;          // of a block
constexpr int64_t kMostBlocks = 2048;  // of a grid whose threads take several elements
constexpr unsigned kAllLanes = 0xffffffffu;

inline int64_t blocks_for(int64_t size, int64_t per_block = kThreads) {
  return (size + per_block - 1) / per_block;
}

// The number of this thread in the whole grid.
__device__ inline int64_t thread_of_grid() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

}  // namespace cpr_ext
