// The state of the emulated device, behind emulated_device.h and cuda_runtime.h.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <vector>

struct EmulatedStream {
  std::deque<std::function<void()>> waiting;
};

struct EmulatedEvent {
  EmulatedStream* stream = nullptr;  // that it was last recorded on
  int64_t num_recorded = 0;
  int64_t num_reached = 0;
};

namespace emulated_cuda {

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

Machine& machine();

using Lock = std::lock_guard<std::recursive_mutex>;

// Keeps the error for cudaGetLastError(), and returns it. This and the functions below REQUIRE the
// machine's mutex to be held.
cudaError_t note(cudaError_t error);

// Counts the call; returns the error that a test has chosen for it, if any.
cudaError_t begin_call(const char* name);

EmulatedStream* of(cudaStream_t stream);

void submit(cudaStream_t stream, std::function<void()> work);

// Runs until `is_done`, or all that waits. What runs may wait for another stream.
void run_stream(EmulatedStream* stream, const std::function<bool()>& is_done = nullptr);

// Runs the event's stream until this record of it.
void reach(EmulatedEvent* event, int64_t record);

void run_all();

cudaError_t allocate(void** data, size_t bytes);
void release(void* data);

}  // namespace emulated_cuda
