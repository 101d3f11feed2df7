#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>

#include "core/cuda/device.h"
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

DeviceGuard::~DeviceGuard() {
  if (changed_) pass_over(cudaSetDevice(before_));
}

DeviceMemory::DeviceMemory(int64_t bytes) {
  CPR_EXT_CUDA(cudaMalloc(&data_, static_cast<size_t>(bytes)));
}

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
  std::swap(data_, other.data_);
  return *this;
}

DeviceMemory::~DeviceMemory() {
  if (data_ != nullptr) pass_over(cudaFree(data_));
}

StreamMemory::StreamMemory(int64_t bytes, cudaStream_t stream) : stream_(stream) {
  const size_t size = static_cast<size_t>(std::max<int64_t>(1, bytes));
  CPR_EXT_CUDA(cudaGetDevice(&device_));
  CPR_EXT_CUDA(cudaMallocAsync(&data_, size, stream));
}

StreamMemory& StreamMemory::operator=(StreamMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(device_, other.device_);
  std::swap(stream_, other.stream_);
  return *this;
}

StreamMemory::~StreamMemory() {
  if (data_ == nullptr) return;
  int before = device_;
  pass_over(cudaGetDevice(&before));
  pass_over(cudaSetDevice(device_));  // the default stream is one of each device
  pass_over(cudaFreeAsync(data_, stream_));
  pass_over(cudaSetDevice(before));
}

PinnedMemory::PinnedMemory(int64_t bytes) {
  CPR_EXT_CUDA(cudaHostAlloc(&data_, static_cast<size_t>(bytes), cudaHostAllocMapped));
  try {
    CPR_EXT_CUDA(cudaHostGetDevicePointer(&on_device_, data_, 0));
  } catch (...) {
    pass_over(cudaFreeHost(data_));
    throw;
  }
}

PinnedMemory::~PinnedMemory() { pass_over(cudaFreeHost(data_)); }

Event::Event() {
  // A thread that waits for it sleeps.
  CPR_EXT_CUDA(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming | cudaEventBlockingSync));
}

bool Event::is_done() {
  const cudaError_t code = cudaEventQuery(event_);
  if (code == cudaErrorNotReady) return false;
  CPR_EXT_CUDA(code);
  return true;
}

Event::~Event() { pass_over(cudaEventDestroy(event_)); }

SideStream::SideStream() {
  CPR_EXT_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
}

SideStream::~SideStream() { pass_over(cudaStreamDestroy(stream_)); }

HostLink& HostLink::of(int device) {
  static std::mutex mutex;
  static auto* const links = new std::map<int, std::unique_ptr<HostLink>>;
  std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<HostLink>& link = (*links)[device];
  if (!link) {
    const DeviceGuard guard(device);
    link.reset(new HostLink);
  }
  return *link;
}

void HostLink::upload(void* to, const void* from, int64_t bytes, cudaStream_t stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (int64_t begin = 0; begin < bytes; begin += kBlockBytes) {
    const auto size = static_cast<size_t>(std::min(kBlockBytes, bytes - begin));
    const int i = std::exchange(next_, (next_ + 1) % kNumBlocks);
    done_[i].wait();
    std::memcpy(block(i), static_cast<const std::byte*>(from) + begin, size);
    CPR_EXT_CUDA(cudaMemcpyAsync(static_cast<std::byte*>(to) + begin, block(i), size,
                                 cudaMemcpyHostToDevice, stream));
    done_[i].record(stream);
  }
}

void HostLink::download(void* to, const void* from, int64_t bytes, cudaStream_t stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  ready_.record(stream);
  ready_.block(side_.get());
  download_locked(to, from, bytes);
}

void HostLink::download(void* to, const void* from, int64_t bytes, Event& event) {
  std::lock_guard<std::mutex> lock(mutex_);
  event.block(side_.get());
  download_locked(to, from, bytes);
}

// REQUIRES: mutex_ is held, and the side stream waits for what is in `from`.
void HostLink::download_locked(void* to, const void* from, int64_t bytes) {
  for (Event& done : done_) done.wait();  // an upload may still read its block
  const int64_t num_pieces = (bytes + kBlockBytes - 1) / kBlockBytes;
  const auto size = [&](int64_t piece) {
    return static_cast<size_t>(std::min(kBlockBytes, bytes - piece * kBlockBytes));
  };
  for (int64_t piece = 0; piece < num_pieces + kNumBlocks - 1; ++piece) {
    if (piece < num_pieces) {
      const int i = static_cast<int>(piece % kNumBlocks);
      CPR_EXT_CUDA(cudaMemcpyAsync(block(i),
                                   static_cast<const std::byte*>(from) + piece * kBlockBytes,
                                   size(piece), cudaMemcpyDeviceToHost, side_.get()));
      done_[i].record(side_.get());
    }
    const int64_t arrived = piece - (kNumBlocks - 1);  // the oldest one on its way
    if (arrived < 0 || arrived >= num_pieces) continue;
    const int i = static_cast<int>(arrived % kNumBlocks);
    done_[i].wait();
    std::memcpy(static_cast<std::byte*>(to) + arrived * kBlockBytes, block(i), size(arrived));
  }
}

}  // namespace cpr_ext
