#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <string>
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

thread_local int guarded_device = 0;

template <class Call>
void find_call(const char* name, Call* call) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult status{};
#if CUDART_VERSION >= 12050
  const cudaError_t code =
      cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &status);
#else
  const cudaError_t code = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &status);
#endif
  check_cuda(code, name, __FILE__, __LINE__);
  if (status != cudaDriverEntryPointSuccess) {
    check_cuda(cudaErrorNotSupported, name, __FILE__, __LINE__);
  }
  *call = reinterpret_cast<Call>(found);
}

// The driver's calls for contexts; a context is a pointer, and its errors are the runtime's.
struct Driver {
  int (*get_current)(void** context);
  int (*push)(void* context);
  int (*pop)(void** context);
  int (*retain)(void** context, int device);

  Driver() {
    find_call("cuCtxGetCurrent", &get_current);
    find_call("cuCtxPushCurrent", &push);
    find_call("cuCtxPopCurrent", &pop);
    find_call("cuDevicePrimaryCtxRetain", &retain);
  }
};

const Driver& driver() {
  static const Driver driver;
  return driver;
}

void check_driver(int code, const char* call) {
  check_cuda(static_cast<cudaError_t>(code), call, __FILE__, __LINE__);
}

// The one that all runtimes of the process share. It is kept as long as the process, as its tables
// are.
void* context_of(int device) {
  static std::mutex mutex;
  static auto* const contexts = new std::unordered_map<int, void*>;
  std::lock_guard<std::mutex> lock(mutex);
  void*& context = (*contexts)[device];
  if (context == nullptr) {
    check_driver(driver().retain(&context, device), "cuDevicePrimaryCtxRetain");
  }
  return context;
}

// Where the last work on a device went, on whichever thread: streams run beside each other, and
// what one has counted or copied another may need.
struct LastStream {
  cudaStream_t stream = nullptr;
  std::unique_ptr<Event> passed;
};

void order_behind_last(int device, cudaStream_t next) {
  static std::mutex mutex;
  static auto* const by_device = new std::map<int, LastStream>;
  std::lock_guard<std::mutex> lock(mutex);
  LastStream& last = (*by_device)[device];
  if (last.stream == next) return;
  const DeviceGuard guard(device);
  // A graph waits for nothing outside of it; who captures one has waited for the device.
  if (is_capturing(next) || is_capturing(last.stream)) return;
  if (!last.passed) last.passed = std::make_unique<Event>();
  last.passed->record(last.stream);
  last.passed->block(next);
  last.stream = next;
}

}  // namespace

int num_devices() {
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  pass_over(code);
  return code == cudaSuccess ? count : 0;
}

int checked_device(int device) {
  if (device >= 0 && device < num_devices()) return device;
  throw UsageError("device is " + std::to_string(device) + "; there are " +
                   std::to_string(num_devices()) + " CUDA devices");
}

void* current_stream(int device) {
  const auto known = streams().find(device);
  return known == streams().end() ? nullptr : known->second;
}

void set_current_stream(int device, void* stream) {
  order_behind_last(device, static_cast<cudaStream_t>(stream));
  streams()[device] = stream;
}

int64_t num_multiprocessors(int device) {
  int count = 0;
  CPR_EXT_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t code = cudaStreamIsCapturing(stream, &status);
  if (code == cudaErrorStreamCaptureImplicit) {  // the default stream, while another one captures
    pass_over(code);
    return true;
  }
  CPR_EXT_CUDA(code);
  return status != cudaStreamCaptureStatusNone;
}

void check_cuda(cudaError_t code, const char* call, const char* file, int line) {
  if (code == cudaSuccess) return;
  pass_over(code);
  throw CudaError(call, static_cast<int>(code), cudaGetErrorString(code), file, line);
}

DeviceGuard::DeviceGuard(int device) : before_(guarded_device) {
  void* const wanted = context_of(device);
  void* current = nullptr;
  check_driver(driver().get_current(&current), "cuCtxGetCurrent");
  if (current != wanted) {
    check_driver(driver().push(wanted), "cuCtxPushCurrent");
    is_pushed_ = true;
  }
  guarded_device = device;
}

DeviceGuard::DeviceGuard(int device, std::nothrow_t) noexcept : before_(guarded_device) {
  try {  // its owner was made, so that there is a context
    is_pushed_ = driver().push(context_of(device)) == cudaSuccess;
  } catch (const CudaError&) {
  }
  guarded_device = device;
}

DeviceGuard::~DeviceGuard() {
  void* popped = nullptr;
  if (is_pushed_) (void)driver().pop(&popped);
  guarded_device = before_;
}

int DeviceGuard::device() { return guarded_device; }

WaitsBesideCaptures::WaitsBesideCaptures() {
  CPR_EXT_CUDA(cudaThreadExchangeStreamCaptureMode(&before_));
}

WaitsBesideCaptures::~WaitsBesideCaptures() {
  pass_over(cudaThreadExchangeStreamCaptureMode(&before_));
}

DeviceMemory::DeviceMemory(int64_t bytes) : device_(DeviceGuard::device()) {
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

StreamMemory::StreamMemory(int64_t bytes, cudaStream_t stream)
    : device_(DeviceGuard::device()), stream_(stream) {
  const size_t size = static_cast<size_t>(std::max<int64_t>(1, bytes));
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
  pass_over(MemoryPool::of(device_).free(data_, stream_));
}

PinnedMemory::PinnedMemory(int64_t bytes) : device_(DeviceGuard::device()) {
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

Event::Event() : device_(DeviceGuard::device()) {
  // A thread that waits for it sleeps.
  CPR_EXT_CUDA(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming | cudaEventBlockingSync));
}

void Event::wait() {
  const DeviceGuard guard(device_);
  const WaitsBesideCaptures waits;
  CPR_EXT_CUDA(cudaEventSynchronize(event_));
}

bool Event::is_done() {
  const DeviceGuard guard(device_);
  const WaitsBesideCaptures waits;
  const cudaError_t code = cudaEventQuery(event_);
  if (code == cudaErrorNotReady) return false;
  CPR_EXT_CUDA(code);
  return true;
}

Event::~Event() {
  const DeviceGuard guard(device_, std::nothrow);
  pass_over(cudaEventDestroy(event_));
}

SideStream::SideStream() : device_(DeviceGuard::device()) {
  CPR_EXT_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
}

SideStream::~SideStream() {
  const DeviceGuard guard(device_, std::nothrow);
  pass_over(cudaStreamDestroy(stream_));
}

namespace {

class EventMark final : public StreamMark {
 public:
  explicit EventMark(int device) { event_.record(stream_of(device)); }
  bool is_passed() override { return event_.is_done(); }
  void wait() override { event_.wait(); }

 private:
  Event event_;
};

}  // namespace

std::unique_ptr<StreamMark> mark_stream(int device) {
  const DeviceGuard guard(device);
  return std::make_unique<EventMark>(device);
}

}  // namespace cpr_ext
