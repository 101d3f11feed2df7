// What a GPU gives the simplest kernel for a stage: no checks, no dispatch, one fixed job. Compiled
// by gpu_bounds.py for the machine it runs on; the library uses none of it. Every function submits
// one kernel and returns CUDA's error code.

#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kThreads = 256;

template <class... Params, class... Args>
int launch(void (*kernel)(Params...), int64_t blocks, int64_t tables, void* stream, Args... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim.x = static_cast<unsigned>(blocks);
  config.gridDim.y = static_cast<unsigned>(tables);
  config.gridDim.z = 1;
  config.blockDim.x = kThreads;
  config.blockDim.y = config.blockDim.z = 1;
  config.stream = static_cast<cudaStream_t>(stream);
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, args...);
  if (error != cudaSuccess) (void)cudaGetLastError();  // torch would report it as its own
  return static_cast<int>(error);
}

int64_t blocks_for(int64_t num_threads) { return (num_threads + kThreads - 1) / kThreads; }

// An addition whose old value nobody asks for. On a generic address nvcc 13 makes of it, for sm_90,
// an ATOM whose result is dropped, not a RED.
__global__ void __launch_bounds__(kThreads)
    add_kernel(uint32_t* const* counts, const int64_t* const* indices, int64_t lookups) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < lookups) atomicAdd(counts[blockIdx.y] + indices[blockIdx.y][i], 1u);
}

// The same with the old value, as saturation needs it.
__global__ void __launch_bounds__(kThreads)
    atom_kernel(uint32_t* const* counts, const int64_t* const* indices, int64_t lookups) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= lookups) return;
  uint32_t* const count = counts[blockIdx.y] + indices[blockIdx.y][i];
  if (atomicAdd(count, 1u) == 0xffffffffu) *count = 0xffffffffu;
}

// As many threads as a row has 16 bytes.
__global__ void __launch_bounds__(kThreads)
    gather_kernel(const uint4* table, const int64_t* row_ids, uint4* packed, int64_t count,
                  int per_row) {
  const int64_t unit = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (unit < count * per_row)
    packed[unit] = table[row_ids[unit / per_row] * per_row + unit % per_row];
}

}  // namespace

extern "C" {

// Adds 1 to counts[t][indices[t][i]] of every table t; both are arrays of pointers on the device.
int bound_count(uint32_t* const* counts, const int64_t* const* indices, int64_t tables,
                int64_t lookups, int returns, void* stream) {
  return launch(returns != 0 ? atom_kernel : add_kernel, blocks_for(lookups), tables, stream,
                counts, indices, lookups);
}

// packed (count, row_bytes) <- rows row_ids of table. REQUIRES: row_bytes is a multiple of 16.
int bound_gather(const void* table, const int64_t* row_ids, void* packed, int64_t count,
                 int64_t row_bytes, void* stream) {
  const int per_row = static_cast<int>(row_bytes / 16);
  return launch(gather_kernel, blocks_for(count * per_row), 1, stream,
                static_cast<const uint4*>(table), row_ids, static_cast<uint4*>(packed), count,
                per_row);
}
}
