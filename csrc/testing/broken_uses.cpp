#include "testing/broken_uses.h"

#include <cuda_runtime.h>

#include <limits>
#include <thread>

#include "testing/emulated_device.h"
#include "testing/emulated_memory.h"

namespace emulated_cuda {
namespace {

void empty_kernel() {}

void read_kernel(const uint32_t* from, uint32_t* to) { *to = *from; }

cudaError_t launch_empty(cudaStream_t stream, unsigned num_blocks = 1, unsigned num_threads = 1) {
  cudaLaunchConfig_t config = {};
  config.gridDim.x = num_blocks;
  config.blockDim.x = num_threads;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, empty_kernel);
}

cudaMemPool_t make_pool(bool keeps) {
  cudaMemPoolProps props = {};
  cudaMemPool_t pool = nullptr;
  (void)cudaMemPoolCreate(&pool, &props);
  uint64_t threshold = keeps ? std::numeric_limits<uint64_t>::max() : 0;
  (void)cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold);
  return pool;
}

void faultless_kernel() {
  __syncthreads();
  __shfl_sync(0xffffffffu, 1, 0);
}

void missed_barrier_kernel() {
  if (threadIdx.x != 3) __syncthreads();
  __shfl_sync(0xffffffffu, 1, 0);
}

void wrong_mask_kernel() {
  if (threadIdx.x < 8) __shfl_sync(0xf0u, 1, 0);
}

void two_masks_kernel() { __shfl_sync(threadIdx.x < 8 ? 0xffu : 0xffffffffu, 1, 0); }

constexpr int kThreads = 64;

void sum_shared_kernel(bool clears, unsigned long long* sum) {
  __shared__ unsigned parts[kThreads];
  if (clears) parts[threadIdx.x] = 0;
  parts[threadIdx.x] += 1;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (const unsigned part : parts) *sum += part;
}

void misread_sums_kernel(bool waits, unsigned long long* misread) {
  __shared__ unsigned of_warps[kThreads / 32];
  for (unsigned round = 1; round <= 2; ++round) {
    const unsigned mine = __shfl_sync(0xffffffffu, round, 0);  // here a warp is held up
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = mine;
    __syncthreads();
    if (of_warps[0] + of_warps[1] != 2 * round) atomicAdd(misread, 1ull);
    if (waits) __syncthreads();
  }
}

void fill_kernel(uint32_t* elements, int64_t count) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) elements[i] = 1;
}

}  // namespace

int call_in_capture(const std::string& call) {
  (void)launch_empty(nullptr);
  cudaEvent_t event = nullptr;
  (void)cudaEventCreateWithFlags(&event, 0);
  (void)cudaEventRecord(event, nullptr);
  set_capturing(true);
  void* data = nullptr;
  cudaError_t error = cudaSuccess;
  if (call == "launch") error = launch_empty(nullptr);
  if (call == "launch for the first time") {
    unload_kernels();
    error = launch_empty(nullptr);
  }
  if (call == "wait for the stream") error = cudaStreamSynchronize(nullptr);
  if (call == "wait for an event") error = cudaEventSynchronize(event);
  if (call == "ask for an event") error = cudaEventQuery(event);
  if (call == "wait for an event of before") error = cudaStreamWaitEvent(nullptr, event);
  if (call == "allocate") error = cudaMalloc(&data, 8);
  const bool is_whole = set_capturing(false);
  (void)cudaGetLastError();
  (void)cudaEventDestroy(event);
  return error == cudaSuccess && !is_whole ? cudaErrorInvalidValue : error;
}

int relaxed_call_in_capture(const std::string& call) {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  (void)cudaThreadExchangeStreamCaptureMode(&mode);
  cudaStream_t other = nullptr;
  cudaEvent_t event = nullptr;
  (void)cudaStreamCreateWithFlags(&other, 0);
  (void)cudaEventCreateWithFlags(&event, 0);
  set_capturing(true);
  (void)cudaEventRecord(event, nullptr);
  cudaError_t error = cudaSuccess;
  if (call == "wait for the stream") error = cudaStreamSynchronize(nullptr);
  if (call == "wait for it") error = cudaEventSynchronize(event);
  if (call == "ask for it") error = cudaEventQuery(event);
  if (call == "let another stream wait for it") error = cudaStreamWaitEvent(other, event);
  set_capturing(false);
  (void)cudaThreadExchangeStreamCaptureMode(&mode);
  (void)cudaGetLastError();
  (void)cudaEventDestroy(event);
  (void)cudaStreamDestroy(other);
  return error;
}

int wait_beside_capture(bool waits_beside) {
  cudaEvent_t event = nullptr;
  (void)cudaEventCreateWithFlags(&event, 0);
  (void)cudaEventRecord(event, nullptr);
  set_capturing(true);
  cudaError_t error = cudaSuccess;
  std::thread([&] {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    if (waits_beside) (void)cudaThreadExchangeStreamCaptureMode(&mode);
    error = cudaEventSynchronize(event);
  }).join();
  set_capturing(false);
  (void)cudaGetLastError();
  (void)cudaEventDestroy(event);
  return error;
}

int mix_devices(const std::string& fault) {
  set_num_devices(2);
  cudaStream_t stream = nullptr;
  cudaEvent_t event = nullptr;
  (void)cudaStreamCreateWithFlags(&stream, 0);  // of device 0
  (void)cudaEventCreateWithFlags(&event, 0);
  (void)cudaSetDevice(1);
  cudaError_t error = launch_empty(nullptr);
  if (fault == "launch on the other's stream") error = launch_empty(stream);
  if (fault == "record the other's event") error = cudaEventRecord(event, nullptr);
  (void)cudaSetDevice(0);
  (void)cudaEventDestroy(event);
  (void)cudaStreamDestroy(stream);
  (void)cudaGetLastError();
  set_num_devices(1);
  return error;
}

int call_wrongly(const std::string& fault) {
  const cudaMemPool_t pool = make_pool(true);
  void* data = nullptr;
  cudaError_t error = cudaMallocFromPoolAsync(&data, 8, pool, nullptr);
  (void)cudaFreeAsync(data, nullptr);
  if (fault == "use a device that is not there") error = cudaSetDevice(1);
  if (fault == "launch too many threads") error = launch_empty(nullptr, 1, 1025);
  if (fault == "launch no block") error = launch_empty(nullptr, 0);
  if (fault == "free twice") error = cudaFreeAsync(data, nullptr);
  (void)cudaGetLastError();
  (void)cudaMemPoolDestroy(pool);
  return error;
}

int see_host_memory(const std::string& fault) {
  void *memory = nullptr, *seen = nullptr;
  (void)cudaHostAlloc(&memory, 16, fault == "portable" ? 0u : cudaHostAllocMapped);
  const int offset = fault == "inside" ? 1 : fault == "beside" ? 8 : 0;
  const cudaError_t error = cudaHostGetDevicePointer(&seen, static_cast<char*>(memory) + offset, 0);
  (void)cudaFreeHost(memory);
  (void)cudaGetLastError();
  return error;
}

int64_t count_mappings(int times, bool keeps) {
  const cudaMemPool_t pool = make_pool(keeps);
  mappings();
  for (int i = 0; i < times; ++i) {
    void* data = nullptr;
    (void)cudaMallocFromPoolAsync(&data, 4096, pool, nullptr);
    (void)cudaFreeAsync(data, nullptr);
    (void)cudaStreamSynchronize(nullptr);
  }
  const int64_t mapped = mappings();
  (void)cudaMemPoolDestroy(pool);
  return mapped;
}

uint32_t read_freed(bool frees_late, bool has_next) {
  const cudaMemPool_t pool = make_pool(true);
  void* data = nullptr;
  uint32_t found = 0;
  (void)cudaMallocFromPoolAsync(&data, 4096, pool, nullptr);
  (void)cudaMemsetAsync(data, 1, 4096, nullptr);
  if (!frees_late) (void)cudaFreeAsync(data, nullptr);
  void* next = nullptr;  // the same memory, if it is free
  if (has_next) (void)cudaMallocFromPoolAsync(&next, 4096, pool, nullptr);
  cudaLaunchConfig_t config = {};
  (void)cudaLaunchKernelEx(&config, read_kernel, static_cast<const uint32_t*>(data), &found);
  if (frees_late) (void)cudaFreeAsync(data, nullptr);
  if (has_next) (void)cudaFreeAsync(next, nullptr);
  (void)cudaStreamSynchronize(nullptr);
  (void)cudaMemPoolDestroy(pool);
  return found;
}

int overrun_memory(int64_t num_elements, int64_t num_more) {
  const cudaMemPool_t pool = make_pool(false);
  void* memory;
  (void)cudaMallocFromPoolAsync(&memory, static_cast<size_t>(num_elements) * sizeof(uint32_t), pool,
                                nullptr);
  cudaLaunchConfig_t config = {};
  config.gridDim.x = static_cast<unsigned>((num_elements + num_more) / kThreads + 1);
  config.blockDim.x = kThreads;
  (void)cudaLaunchKernelEx(&config, fill_kernel, static_cast<uint32_t*>(memory),
                           num_elements + num_more);
  (void)cudaFreeAsync(memory, nullptr);
  const cudaError_t error = cudaStreamSynchronize(nullptr);
  repair();
  (void)cudaMemPoolDestroy(pool);
  return error;
}

uint64_t misread_sums(bool waits) {
  unsigned long long misread = 0;
  cudaLaunchConfig_t config = {};
  config.blockDim.x = kThreads;
  (void)cudaLaunchKernelEx(&config, misread_sums_kernel, waits, &misread);
  (void)cudaStreamSynchronize(nullptr);
  return misread;
}

uint64_t sum_shared(bool clears) {
  unsigned long long sum = 0;
  cudaLaunchConfig_t config = {};
  config.gridDim.x = 2;
  config.blockDim.x = kThreads;
  (void)cudaLaunchKernelEx(&config, sum_shared_kernel, clears, &sum);
  (void)cudaStreamSynchronize(nullptr);
  return sum;
}

int run_broken_kernel(const std::string& fault) {
  void (*kernel)() = faultless_kernel;
  if (fault == "some threads miss a barrier") kernel = missed_barrier_kernel;
  if (fault == "a lane is not in its mask") kernel = wrong_mask_kernel;
  if (fault == "lanes disagree on the mask") kernel = two_masks_kernel;
  cudaLaunchConfig_t config = {};
  config.blockDim.x = 64;
  (void)cudaLaunchKernelEx(&config, kernel);
  const cudaError_t error = cudaStreamSynchronize(nullptr);
  repair();
  return error;
}

}  // namespace emulated_cuda
