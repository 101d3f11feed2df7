#include "testing/emulated_device.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <utility>

#include "testing/emulated_block.h"
#include "testing/emulated_machine.h"

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

EmulatedStream* of(cudaStream_t stream) {
  return stream == nullptr ? &machine().default_stream : stream;
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

namespace {
constexpr unsigned char kGarbage = 0xab;  // in memory that nobody has written
}  // namespace

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
