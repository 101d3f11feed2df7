#include <algorithm>
#include <unordered_map>

#include "core/cuda/device.h"
#include "core/cuda/memory_pool.h"
#include "core/error.h"

namespace cpr_ext {

namespace {

std::unordered_map<int, void*>& streams() {
  thread_local std::unordered_map<int, void*> streams;
  return streams;
}

// A destructor's call: what it says is no one else's business.
void pass_over(cudaError_t code) {
  if (code != cudaSuccess) (void)cudaGetLastError();
}

// Whether this process has a context on the device. Only the driver knows; if it cannot be asked,
// every device counts as used.
bool is_in_use(int device) {
  using GetState = int (*)(int device, unsigned* flags, int* is_active);
  static const auto get_state = [] {
    void* found = nullptr;
#if CUDART_VERSION >= 12050
    cudaDriverEntryPointQueryResult status{};
    const cudaError_t code = cudaGetDriverEntryPointByVersion("cuDevicePrimaryCtxGetState", &found,
                                                              12000, cudaEnableDefault, &status);
    pass_over(code);
    if (code != cudaSuccess || status != cudaDriverEntryPointSuccess) found = nullptr;
#endif
    return reinterpret_cast<GetState>(found);
  }();
  unsigned flags = 0;
  int is_active = 1;
  if (get_state == nullptr || get_state(device, &flags, &is_active) != 0) return true;
  return is_active != 0;
}

}  // namespace

int num_devices() {
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  pass_over(code);
  return code == cudaSuccess ? count : 0;
}

void* current_stream(int device) {
  const auto known = streams().find(device);
  return known == streams().end() ? nullptr : known->second;
}

void set_current_stream(int device, void* stream) { streams()[device] = stream; }

void check_cuda(cudaError_t code, const char* call, const char* file, int line) {
  if (code == cudaSuccess) return;
  pass_over(code);
  throw CudaError(call, static_cast<int>(code), cudaGetErrorString(code), file, line);
}

DeviceGuard::DeviceGuard(int device) {
  CPR_EXT_CUDA(cudaGetDevice(&before_));
  if (before_ == device) return;
  CPR_EXT_CUDA(cudaSetDevice(device));
  changed_ = true;
}

DeviceGuard::DeviceGuard(int device, std::nothrow_t) noexcept {
  const cudaError_t code = cudaGetDevice(&before_);
  pass_over(code);
  if (code != cudaSuccess || before_ == device) return;
  pass_over(cudaSetDevice(device));
  changed_ = true;
}

DeviceGuard::~DeviceGuard() {
  if (changed_ && is_in_use(before_)) pass_over(cudaSetDevice(before_));
}

WaitsBesideCaptures::WaitsBesideCaptures() {
  CPR_EXT_CUDA(cudaThreadExchangeStreamCaptureMode(&before_));
}

WaitsBesideCaptures::~WaitsBesideCaptures() {
  pass_over(cudaThreadExchangeStreamCaptureMode(&before_));
}

DeviceMemory::DeviceMemory(int64_t bytes) {
  CPR_EXT_CUDA(cudaGetDevice(&device_));
  const auto size = static_cast<size_t>(bytes);
  const cudaError_t code = allocate_or_reclaim(device_, [&] { return cudaMalloc(&data_, size); });
  check_cuda(code, "cudaMalloc", __FILE__, __LINE__);
}

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(device_, other.device_);
  return *this;
}

DeviceMemory::~DeviceMemory() {
  if (data_ == nullptr) return;
  const DeviceGuard guard(device_, std::nothrow);
  pass_over(cudaFree(data_));
}

StreamMemory::StreamMemory(int64_t bytes, cudaStream_t stream) : stream_(stream) {
  const size_t size = static_cast<size_t>(std::max<int64_t>(1, bytes));
  CPR_EXT_CUDA(cudaGetDevice(&device_));
  CPR_EXT_CUDA(MemoryPool::of(device_).allocate(&data_, size, stream));
}

StreamMemory& StreamMemory::operator=(StreamMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(device_, other.device_);
  std::swap(stream_, other.stream_);
  return *this;
}

StreamMemory::~StreamMemory() {
  if (data_ == nullptr) return;
  const DeviceGuard guard(device_, std::nothrow);  // the default stream is one of each device
  pass_over(cudaFreeAsync(data_, stream_));
}

PinnedMemory::PinnedMemory(int64_t bytes) {
  CPR_EXT_CUDA(cudaGetDevice(&device_));
  CPR_EXT_CUDA(cudaHostAlloc(&data_, static_cast<size_t>(bytes), cudaHostAllocMapped));
  try {
    CPR_EXT_CUDA(cudaHostGetDevicePointer(&on_device_, data_, 0));
  } catch (...) {
    pass_over(cudaFreeHost(data_));
    throw;
  }
}

PinnedMemory::~PinnedMemory() {
  const DeviceGuard guard(device_, std::nothrow);
  pass_over(cudaFreeHost(data_));
}

Event::Event() {
  CPR_EXT_CUDA(cudaGetDevice(&device_));
  // A thread that waits for it sleeps.
  CPR_EXT_CUDA(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming | cudaEventBlockingSync));
}

bool Event::is_done() {
  const cudaError_t code = cudaEventQuery(event_);
  if (code == cudaErrorNotReady) return false;
  CPR_EXT_CUDA(code);
  return true;
}

Event::~Event() {
  const DeviceGuard guard(device_, std::nothrow);
  pass_over(cudaEventDestroy(event_));
}

SideStream::SideStream() {
  CPR_EXT_CUDA(cudaGetDevice(&device_));
  CPR_EXT_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
}

SideStream::~SideStream() {
  const DeviceGuard guard(device_, std::nothrow);
  pass_over(cudaStreamDestroy(stream_));
}

}  // namespace cpr_ext
