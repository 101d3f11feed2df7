// The only access to CUDA, for *.cu only: checked calls and launches, and owners of the runtime's
// memory, events and streams. Tests run the same sources on the CPU: their build has a
// cuda_runtime.h of its own.
//
// Every failed call becomes a CudaError with file, line and CUDA's own message, and leaves no error
// that torch would report as its own. Destructors ignore errors; the next call reports them.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>

#include "core/device_stream.h"

#define CPR_EXT_CUDA(call) ::cpr_ext::check_cuda((call), #call, __FILE__, __LINE__)

// Threads per block is a constant of the kernel; a launch of no blocks does nothing.
#define CPR_EXT_LAUNCH(kernel, grid, num_threads, stream, ...)                               \
  ::cpr_ext::check_cuda(::cpr_ext::launch(kernel, grid, num_threads, stream, ##__VA_ARGS__), \
                        #kernel, __FILE__, __LINE__)

namespace cpr_ext {

void check_cuda(cudaError_t code, const char* call, const char* file, int line);

struct Grid {
  Grid(int64_t x, int64_t y = 1) : x(x), y(y) {}  // NOLINT: a number of blocks is a grid
  int64_t x;
  int64_t y;
};

template <class... Params, class... Args>
cudaError_t launch(void (*kernel)(Params...), Grid grid, int num_threads, cudaStream_t stream,
                   Args&&... args) {
  if (grid.x == 0 || grid.y == 0) return cudaSuccess;
  cudaLaunchConfig_t config = {};
  config.gridDim.x = static_cast<unsigned>(grid.x);
  config.gridDim.y = static_cast<unsigned>(grid.y);
  config.gridDim.z = 1;
  config.blockDim.x = static_cast<unsigned>(num_threads);
  config.blockDim.y = config.blockDim.z = 1;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
}

inline cudaStream_t stream_of(int device) {
  return static_cast<cudaStream_t>(current_stream(device));
}

// Makes `device` the current one of this thread.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

// Memory of the device that is current when it is made.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  explicit DeviceMemory(int64_t bytes);  // waits for the device: not while training
  DeviceMemory(DeviceMemory&& other) noexcept : data_(std::exchange(other.data_, nullptr)) {}
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;
  ~DeviceMemory();

  std::byte* data() const { return static_cast<std::byte*>(data_); }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
};

// Memory of the current device that is allocated and freed in the order of a stream; nothing waits.
// It may be destroyed on any thread, whichever device is current there.
class StreamMemory {
 public:
  StreamMemory() = default;
  StreamMemory(int64_t bytes, cudaStream_t stream);
  StreamMemory(StreamMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        device_(other.device_),
        stream_(other.stream_) {}
  StreamMemory& operator=(StreamMemory&& other) noexcept;
  ~StreamMemory();

  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  int device_ = 0;
  cudaStream_t stream_ = nullptr;
};

// Host memory that a device copies to and from, and can read and write itself.
class PinnedMemory {
 public:
  explicit PinnedMemory(int64_t bytes);
  ~PinnedMemory();
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(data_); }
  template <class T>
  T* on_device() const {
    return static_cast<T*>(on_device_);
  }

 private:
  void* data_ = nullptr;
  void* on_device_ = nullptr;
};

class Event {
 public:
  Event();
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(cudaStream_t stream) { CPR_EXT_CUDA(cudaEventRecord(event_, stream)); }
  void block(cudaStream_t stream) { CPR_EXT_CUDA(cudaStreamWaitEvent(stream, event_, 0)); }
  void wait() { CPR_EXT_CUDA(cudaEventSynchronize(event_)); }  // at once if never recorded
  bool is_done();

 private:
  cudaEvent_t event_ = nullptr;
};

// A stream beside training's.
class SideStream {
 public:
  SideStream();
  ~SideStream();
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;

  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

// Copies between ordinary host memory and a device through a few pinned blocks, so that neither the
// caller nor the stream waits for more than those.
class HostLink {
 public:
  // Of this device, made when first asked for; it lives as long as the process.
  static HostLink& of(int device);

  // When it returns `from` may be changed; the bytes are in `to` when `stream` gets here.
  void upload(void* to, const void* from, int64_t bytes, cudaStream_t stream);

  // What lies in `from` when `stream` gets here, or got to `event`. Waits for it; the stream goes
  // on meanwhile.
  void download(void* to, const void* from, int64_t bytes, cudaStream_t stream);
  void download(void* to, const void* from, int64_t bytes, Event& event);

 private:
  static constexpr int kNumBlocks = 4;
  static constexpr int64_t kBlockBytes = 1 << 20;

  HostLink() : blocks_(kNumBlocks * kBlockBytes) {}  // of the current device
  void download_locked(void* to, const void* from, int64_t bytes);
  std::byte* block(int i) { return blocks_.data() + i * kBlockBytes; }

  std::mutex mutex_;  // guards all below
  PinnedMemory blocks_;
  std::array<Event, kNumBlocks> done_;  // with the block
  Event ready_;
  SideStream side_;
  int next_ = 0;
};

}  // namespace cpr_ext
