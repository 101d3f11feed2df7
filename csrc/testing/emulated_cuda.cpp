#include "testing/emulated_cuda.h"

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <numeric>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "testing/emulated_block.h"

dim3 threadIdx, blockIdx, blockDim, gridDim;

struct EmulatedStream {
  std::deque<std::function<void()>> waiting;
};

struct EmulatedEvent {
  EmulatedStream* stream = nullptr;  // that it was last recorded on
  int64_t num_recorded = 0;
  int64_t num_reached = 0;
};

namespace emulated_cuda {
namespace {

constexpr unsigned char kGarbage = 0xab;  // in memory that nobody has written

struct Failure {
  std::string name;
  int nth;
  cudaError_t error;
};

struct Machine {
  std::recursive_mutex mutex;  // guards all
  bool lazy = false;
  bool is_capturing = false;
  std::mt19937_64 random;
  bool shuffles = false;
  std::map<std::string, int64_t> calls;
  std::vector<Failure> failures;
  std::map<void*, size_t> device_memory;
  EmulatedStream default_stream;
  std::set<EmulatedStream*> streams{&default_stream};
  cudaError_t last_error = cudaSuccess;
  bool is_broken = false;  // as a context is after a fault in a kernel
};

Machine& machine() {
  static Machine* const machine = new Machine;
  return *machine;
}

using Lock = std::lock_guard<std::recursive_mutex>;

cudaError_t note(cudaError_t error) {
  if (error != cudaSuccess && error != cudaErrorNotReady) machine().last_error = error;
  return error;
}

// Counts the call; what it is to fail with, if anything.
cudaError_t begin_call(const char* name) {
  Machine& m = machine();
  ++m.calls[name];
  if (m.is_broken) return note(cudaErrorLaunchFailure);
  for (auto failure = m.failures.begin(); failure != m.failures.end(); ++failure) {
    if (failure->name != name || --failure->nth > 0) continue;
    const cudaError_t error = failure->error;
    m.failures.erase(failure);
    return note(error);
  }
  return cudaSuccess;
}

void run_grid(const cudaLaunchConfig_t& config, const std::function<void()>& body) {
  Machine& m = machine();
  gridDim = config.gridDim;
  blockDim = config.blockDim;
  std::vector<int64_t> order(static_cast<int64_t>(gridDim.x) * gridDim.y);
  std::iota(order.begin(), order.end(), int64_t{0});
  if (m.shuffles) std::shuffle(order.begin(), order.end(), m.random);
  for (const int64_t number : order) {
    blockIdx = {static_cast<unsigned>(number % gridDim.x),
                static_cast<unsigned>(number / gridDim.x), 0};
    if (run_block(body, m.shuffles ? &m.random : nullptr)) continue;
    m.is_broken = true;
    note(cudaErrorLaunchFailure);
    return;
  }
}

EmulatedStream* of(cudaStream_t stream) {
  return stream == nullptr ? &machine().default_stream : stream;
}

// Runs until `is_done`, or all that waits. What runs may wait for another stream.
void run_stream(EmulatedStream* stream, const std::function<bool()>& is_done = nullptr) {
  while (!stream->waiting.empty() && !(is_done && is_done())) {
    const std::function<void()> work = std::move(stream->waiting.front());
    stream->waiting.pop_front();
    work();
  }
}

void submit(cudaStream_t stream, std::function<void()> work) {
  EmulatedStream* target = of(stream);
  target->waiting.push_back(std::move(work));
  if (!machine().lazy) run_stream(target);
}

void reach(EmulatedEvent* event, int64_t record) {
  if (event->stream == nullptr) return;
  run_stream(event->stream, [=] { return event->num_reached >= record; });
}

void run_all() {
  for (EmulatedStream* stream : machine().streams) run_stream(stream);
}

cudaError_t allocate(void** data, size_t bytes) {
  *data = std::aligned_alloc(512, (std::max<size_t>(bytes, 1) + 511) / 512 * 512);
  if (*data == nullptr) return note(cudaErrorMemoryAllocation);
  std::memset(*data, kGarbage, bytes);
  machine().device_memory[*data] = bytes;
  return cudaSuccess;
}

void release(void* data) {
  machine().device_memory.erase(data);
  std::free(data);
}

}  // namespace

void set_lazy(bool lazy) {
  Lock lock(machine().mutex);
  run_all();
  machine().lazy = lazy;
}

void set_capturing(bool capturing) {
  Lock lock(machine().mutex);
  machine().is_capturing = capturing;
}

void shuffle_threads(uint64_t seed) {
  Lock lock(machine().mutex);
  machine().shuffles = seed != 0;
  machine().random.seed(seed);
}

void fail_call(const std::string& name, int nth, cudaError_t error) {
  Lock lock(machine().mutex);
  machine().failures.clear();
  if (nth > 0) machine().failures.push_back({name, nth, error});
}

std::map<std::string, int64_t> calls() {
  Lock lock(machine().mutex);
  return std::exchange(machine().calls, {});
}

void repair() {
  Lock lock(machine().mutex);
  machine().is_broken = false;
  machine().last_error = cudaSuccess;
}

std::map<uintptr_t, int64_t> allocations() {
  Lock lock(machine().mutex);
  run_all();
  std::map<uintptr_t, int64_t> found;
  for (const auto& [data, bytes] : machine().device_memory) {
    found[reinterpret_cast<uintptr_t>(data)] = static_cast<int64_t>(bytes);
  }
  return found;
}

cudaError_t submit_kernel(const cudaLaunchConfig_t& config, std::function<void()> thread) {
  Lock lock(machine().mutex);
  if (const cudaError_t error = begin_call("cudaLaunchKernelEx")) return error;
  const int64_t num_threads = static_cast<int64_t>(config.blockDim.x) * config.blockDim.y;
  const bool fits = num_threads >= 1 && num_threads <= 1024 && config.gridDim.x >= 1 &&
                    config.gridDim.x < (1u << 31) && config.gridDim.y >= 1 &&
                    config.gridDim.y < 65536;
  if (!fits) return note(cudaErrorInvalidValue);
  submit(config.stream, [config, thread = std::move(thread)] { run_grid(config, thread); });
  return machine().is_broken ? cudaErrorLaunchFailure : cudaSuccess;
}

}  // namespace emulated_cuda

using namespace emulated_cuda;

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorLaunchFailure:
      return "unspecified launch failure";
    case cudaErrorInvalidValue:
      return "invalid argument";
    default:
      return "an emulated error";
  }
}

cudaError_t cudaGetLastError() {
  Lock lock(machine().mutex);
  return std::exchange(machine().last_error, cudaSuccess);
}

cudaError_t cudaGetDeviceCount(int* count) {
  Lock lock(machine().mutex);
  if (const cudaError_t error = begin_call("cudaGetDeviceCount")) return error;
  *count = 1;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  return device == 0 ? cudaSuccess : note(cudaErrorInvalidValue);
}

cudaError_t cudaMalloc(void** data, size_t bytes) {
  Lock lock(machine().mutex);
  if (const cudaError_t error = begin_call("cudaMalloc")) return error;
  return allocate(data, bytes);
}

cudaError_t cudaFree(void* data) {
  Lock lock(machine().mutex);
  run_all();  // as the real one waits for the device
  release(data);
  return cudaSuccess;
}

cudaError_t cudaMallocAsync(void** data, size_t bytes, cudaStream_t) {
  Lock lock(machine().mutex);
  if (const cudaError_t error = begin_call("cudaMallocAsync")) return error;
  return allocate(data, bytes);
}

cudaError_t cudaFreeAsync(void* data, cudaStream_t stream) {
  Lock lock(machine().mutex);
  submit(stream, [=] { release(data); });
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** data, size_t bytes, unsigned) {
  Lock lock(machine().mutex);
  if (const cudaError_t error = begin_call("cudaHostAlloc")) return error;
  *data = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  return *data == nullptr ? note(cudaErrorMemoryAllocation) : cudaSuccess;
}

cudaError_t cudaFreeHost(void* data) {
  Lock lock(machine().mutex);
  run_all();
  std::free(data);
  return cudaSuccess;
}

cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  *device = host;
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void*, size_t, unsigned) {
  Lock lock(machine().mutex);
  return begin_call("cudaHostRegister");
}

cudaError_t cudaHostUnregister(void*) {
  Lock lock(machine().mutex);
  run_all();
  return begin_call("cudaHostUnregister");
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  Lock lock(machine().mutex);
  if (const cudaError_t error = begin_call("cudaMemcpyAsync")) return error;
  submit(stream, [=] { std::memcpy(to, from, bytes); });
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t stream) {
  Lock lock(machine().mutex);
  if (const cudaError_t error = begin_call("cudaMemsetAsync")) return error;
  submit(stream, [=] { std::memset(data, value, bytes); });
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  Lock lock(machine().mutex);
  if (const cudaError_t error = begin_call("cudaStreamCreateWithFlags")) return error;
  *stream = new EmulatedStream;
  machine().streams.insert(*stream);
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  Lock lock(machine().mutex);
  run_stream(stream);
  machine().streams.erase(stream);
  delete stream;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  Lock lock(machine().mutex);
  if (const cudaError_t error = begin_call("cudaStreamSynchronize")) return error;
  run_stream(of(stream));
  return machine().is_broken ? cudaErrorLaunchFailure : cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  Lock lock(machine().mutex);
  *status = machine().is_capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  Lock lock(machine().mutex);
  if (const cudaError_t error = begin_call("cudaStreamWaitEvent")) return error;
  submit(stream, [event, record = event->num_recorded] { reach(event, record); });
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  Lock lock(machine().mutex);
  if (const cudaError_t error = begin_call("cudaEventCreateWithFlags")) return error;
  *event = new EmulatedEvent;
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  Lock lock(machine().mutex);
  run_all();  // a stream may wait for it
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  Lock lock(machine().mutex);
  if (const cudaError_t error = begin_call("cudaEventRecord")) return error;
  event->stream = of(stream);
  const int64_t record = ++event->num_recorded;
  submit(stream, [=] { event->num_reached = std::max(event->num_reached, record); });
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  Lock lock(machine().mutex);
  if (const cudaError_t error = begin_call("cudaEventSynchronize")) return error;
  reach(event, event->num_recorded);
  return machine().is_broken ? cudaErrorLaunchFailure : cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  Lock lock(machine().mutex);
  if (const cudaError_t error = begin_call("cudaEventQuery")) return error;
  if (event->num_reached >= event->num_recorded) return cudaSuccess;
  bool has_moved = false;  // one piece of work for each time that somebody asks
  run_stream(event->stream, [&] { return std::exchange(has_moved, true); });
  return cudaErrorNotReady;
}
