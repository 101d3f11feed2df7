// The only access to CUDA, for *.cu only: checked calls and launches, and owners of the runtime's
// memory, events and streams. Tests run the same sources on the CPU: their build has a
// cuda_runtime.h of its own.
//
// Every failed call becomes a CudaError with file, line and CUDA's own message, and leaves no error
// that torch would report as its own. Destructors ignore errors; the next call reports them.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <new>
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

// Loads a kernel on the current device. Else CUDA does so at its first launch, which in a capture
// ends the capture: whoever makes what graphs may hold calls this. REQUIRES: as for a launch.
template <class... Params>
void load_kernel(void (*kernel)(Params...)) {
  cudaFuncAttributes attributes;
  CPR_EXT_CUDA(cudaFuncGetAttributes(&attributes, kernel));
}

inline cudaStream_t stream_of(int device) {
  return static_cast<cudaStream_t>(current_stream(device));
}

int64_t num_multiprocessors(int device);

// Whether what the stream is given now becomes part of a CUDA graph. REQUIRES: its device is
// current.
bool is_capturing(cudaStream_t stream);

// Makes `device` the current one of this thread, by the driver's stack of contexts. Afterwards the
// thread has the context that it had before, or none. The runtime's cudaSetDevice() could not: it
// would make a context on the device before, and torch's runtime, which is another one, would keep
// an idea of its own.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  DeviceGuard(int device, std::nothrow_t) noexcept;  // for destructors
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

  static int device();  // of the innermost one of this thread. REQUIRES: there is one

 private:
  const int before_;
  bool is_pushed_ = false;
};

// While it lives this thread may wait for what is in no graph, or ask for it, while a CUDA graph is
// captured on this or another thread, which that would end otherwise.
class WaitsBesideCaptures {
 public:
  WaitsBesideCaptures();
  ~WaitsBesideCaptures();
  WaitsBesideCaptures(const WaitsBesideCaptures&) = delete;
  WaitsBesideCaptures& operator=(const WaitsBesideCaptures&) = delete;

 private:
  cudaStreamCaptureMode before_ = cudaStreamCaptureModeRelaxed;
};

// Memory of the device that a DeviceGuard has made current. Like all owners below, it may be
// destroyed on any thread, whichever device is current there.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  explicit DeviceMemory(int64_t bytes);  // waits for the device: not while training
  DeviceMemory(DeviceMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), device_(other.device_) {}
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;
  ~DeviceMemory();

  std::byte* data() const { return static_cast<std::byte*>(data_); }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  int device_ = 0;
};

// Memory of the current device that is allocated and freed in the order of a stream; nothing waits.
// It comes from this library's pool (memory_pool.h).
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
  int device_ = 0;
};

class Event {
 public:
  Event();
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(cudaStream_t stream) { CPR_EXT_CUDA(cudaEventRecord(event_, stream)); }
  void block(cudaStream_t stream) { CPR_EXT_CUDA(cudaStreamWaitEvent(stream, event_, 0)); }
  // Neither ends a capture; what was recorded in one can only fail. At once if never recorded.
  void wait();
  bool is_done();

 private:
  cudaEvent_t event_ = nullptr;
  int device_ = 0;
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
  int device_ = 0;
};

}  // namespace cpr_ext
