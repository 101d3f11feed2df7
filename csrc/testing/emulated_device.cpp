#include "testing/emulated_device.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <utility>

#include "testing/emulated_machine.h"
#include "testing/emulated_memory.h"

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulated_cuda {

Machine& machine() {
  static Machine* const machine = new Machine;
  return *machine;
}

cudaError_t note(cudaError_t error) {
  if (error != cudaSuccess && error != cudaErrorNotReady) machine().last_error = error;
  return error;
}

Thread& this_thread() {
  thread_local Thread thread;
  return thread;
}

int current_device() {
  const Thread& thread = this_thread();
  return thread.contexts.back() >= 0 ? thread.contexts.back() : thread.chosen;
}

cudaError_t break_capture(cudaError_t error) {
  machine().graph.is_broken = true;
  return note(error);
}

cudaError_t planned_failure(const char* name) {
  Machine& m = machine();
  for (auto failure = m.failures.begin(); failure != m.failures.end(); ++failure) {
    if (failure->name != name || --failure->nth > 0) continue;
    const cudaError_t error = failure->error;
    m.failures.erase(failure);
    return note(error);
  }
  return cudaSuccess;
}

cudaError_t begin_call(const char* name, InCapture in_capture) {
  Machine& m = machine();
  ++m.calls[name];
  ++this_thread().calls[name];
  this_thread().contexts.back() = current_device();  // the runtime makes it
  m.used_devices.insert(current_device());
  if (m.is_broken) return note(cudaErrorLaunchFailure);
  if (const cudaError_t error = planned_failure(name)) return error;
  const bool is_unsafe =
      in_capture == InCapture::kUnsafe && this_thread().mode != cudaStreamCaptureModeRelaxed;
  if (m.capturing != nullptr && is_unsafe) return break_capture(cudaErrorStreamCaptureUnsupported);
  return cudaSuccess;
}

EmulatedStream* of(cudaStream_t stream) {
  if (stream != nullptr) return stream;
  EmulatedStream& found = machine().default_streams[current_device()];
  found.device = current_device();
  return &found;
}

void run_stream(EmulatedStream* stream, const std::function<bool()>& is_done) {
  while (!stream->waiting.empty() && !(is_done && is_done())) {
    const std::function<void()> work = std::move(stream->waiting.front());
    stream->waiting.pop_front();
    work();
  }
}

void submit(cudaStream_t stream, std::function<void()> work) {
  EmulatedStream* target = of(stream);
  if (target == machine().capturing) {
    machine().graph.work.push_back(std::move(work));
    return;
  }
  target->waiting.push_back(std::move(work));
  if (!machine().lazy) run_stream(target);
}

void reach(EmulatedEvent* event, int64_t record) {
  if (event->num_reached >= record) return;  // its stream may be gone
  run_stream(event->stream, [=] { return event->num_reached >= record; });
}

void run_all() {
  for (auto& [device, stream] : machine().default_streams) run_stream(&stream);
  for (EmulatedStream* stream : machine().streams) run_stream(stream);
}

void set_lazy(bool lazy) {
  Lock lock(machine().mutex);
  run_all();
  machine().lazy = lazy;
}

bool set_capturing(bool capturing) {
  Lock lock(machine().mutex);
  Machine& m = machine();
  if (capturing) m.graph = Graph();
  m.capturing = capturing ? &m.default_streams[0] : nullptr;
  return !m.graph.is_broken;
}

void replay_graph() {
  Lock lock(machine().mutex);
  Machine& m = machine();
  if (m.capturing != nullptr || m.graph.is_broken) return;
  for (const auto& work : m.graph.work) m.default_streams[0].waiting.push_back(work);
  if (!m.lazy) run_stream(&m.default_streams[0]);
}

void set_num_devices(int num_devices) {
  Lock lock(machine().mutex);
  machine().num_devices = num_devices;
  machine().used_devices.clear();
}

void set_device(int device) {
  this_thread().chosen = device;
  this_thread().contexts = {-1};
}

int current_context() { return this_thread().contexts.back(); }

cudaStream_t make_stream() {
  cudaStream_t stream = nullptr;
  (void)cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  return stream;
}

void destroy_stream(cudaStream_t stream) { (void)cudaStreamDestroy(stream); }

void unload_kernels() {
  Lock lock(machine().mutex);
  machine().loaded_kernels.clear();
}

void set_memory_pools(bool has_pools) {
  Lock lock(machine().mutex);
  machine().has_pools = has_pools;
}

void set_free_part(double part) {
  Lock lock(machine().mutex);
  machine().free_bytes = static_cast<size_t>(part * static_cast<double>(kAllBytes));
}

std::set<int> used_devices() {
  Lock lock(machine().mutex);
  return machine().used_devices;
}

void synchronize() {
  Lock lock(machine().mutex);
  run_all();
  give_back_memory();
}

int64_t num_waiting() {
  Lock lock(machine().mutex);
  size_t found = 0;
  for (const auto& [device, stream] : machine().default_streams) found += stream.waiting.size();
  for (const EmulatedStream* stream : machine().streams) found += stream->waiting.size();
  return static_cast<int64_t>(found);
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

std::map<std::string, int64_t> own_calls() { return std::exchange(this_thread().calls, {}); }

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

namespace {

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

}  // namespace

// Loading breaks a capture, of whichever stream.
cudaError_t load_kernel(const void* kernel) {
  Lock lock(machine().mutex);
  Machine& m = machine();
  if (m.loaded_kernels.count(kernel) != 0) return cudaSuccess;
  const bool is_unsafe =
      m.capturing != nullptr && this_thread().mode != cudaStreamCaptureModeRelaxed;
  if (is_unsafe) return break_capture(cudaErrorStreamCaptureUnsupported);
  m.used_devices.insert(current_device());
  m.loaded_kernels.insert(kernel);
  return cudaSuccess;
}

cudaError_t submit_kernel(const cudaLaunchConfig_t& config, const void* kernel,
                          std::function<void()> thread) {
  Lock lock(machine().mutex);
  if (const cudaError_t error = begin_call("cudaLaunchKernelEx")) return error;
  if (const cudaError_t error = load_kernel(kernel)) return error;
  const int64_t num_threads = static_cast<int64_t>(config.blockDim.x) * config.blockDim.y;
  const bool fits = num_threads >= 1 && num_threads <= 1024 && config.gridDim.x >= 1 &&
                    config.gridDim.x < (1u << 31) && config.gridDim.y >= 1 &&
                    config.gridDim.y < 65536;
  if (!fits) return note(cudaErrorInvalidValue);
  if (of(config.stream)->device != current_device()) {
    return note(cudaErrorInvalidResourceHandle);
  }
  submit(config.stream, [config, thread = std::move(thread)] { run_grid(config, thread); });
  return machine().is_broken ? cudaErrorLaunchFailure : cudaSuccess;
}

}  // namespace emulated_cuda
