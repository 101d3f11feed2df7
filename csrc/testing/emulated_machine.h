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
  int device = 0;
  std::deque<std::function<void()>> waiting;
};

struct EmulatedEvent {
  int device = 0;
  EmulatedStream* stream = nullptr;  // that it was last recorded on
  int64_t num_recorded = 0;
  int64_t num_reached = 0;
  bool is_captured = false;  // last recorded in a graph: nobody can wait for that
};

namespace emulated_cuda {

constexpr size_t kAllBytes = size_t{1} << 36;  // of a device

struct Failure {
  std::string name;
  int nth;
  cudaError_t error;
};

// A CUDA graph: what its stream was given while it was captured.
struct Graph {
  std::vector<std::function<void()>> work;
  bool is_broken = false;  // by a call that a capture does not allow
};

struct Machine {
  std::recursive_mutex mutex;  // guards all
  bool lazy = false;
  EmulatedStream* capturing = nullptr;  // in the global mode, in which torch captures
  Graph graph;                          // captured last
  std::mt19937_64 random;
  bool shuffles = false;
  std::map<std::string, int64_t> calls;
  std::vector<Failure> failures;
  int num_devices = 1;
  std::set<int> used_devices;            // that have a context
  std::set<const void*> loaded_kernels;  // at their first launch, or when asked about
  bool has_pools = true;                 // devices have memory pools
  size_t free_bytes = kAllBytes;         // of a device, as it says
  std::map<void*, size_t> device_memory;
  std::map<char*, size_t> mapped_memory;          // of the host, that kernels may use
  std::map<int, EmulatedStream> default_streams;  // by device
  std::set<EmulatedStream*> streams;              // all others
  cudaError_t last_error = cudaSuccess;
  bool is_broken = false;  // as a context is after a fault in a kernel
};

Machine& machine();

using Lock = std::lock_guard<std::recursive_mutex>;

// What a capture makes of a call.
enum class InCapture {
  kAllowed,
  kUnsafe,  // no thread may call it, unless it has said that it knows better
};

// The calling thread's.
struct Thread {
  int chosen = 0;  // by cudaSetDevice(): where the runtime makes a context if there is none
  std::vector<int> contexts{-1};  // the driver's stack; -1: none
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  std::map<std::string, int64_t> calls;
};
Thread& this_thread();
int current_device();

// Keeps the error for cudaGetLastError(), and returns it. This and the functions below REQUIRE the
// machine's mutex to be held.
cudaError_t note(cudaError_t error);

// As note(), of a call that ends the capture.
cudaError_t break_capture(cudaError_t error);

// The error that a test has chosen for this call, if any.
cudaError_t planned_failure(const char* name);

// Counts the call, which uses the current device; returns planned_failure(), or what a capture has.
cudaError_t begin_call(const char* name, InCapture in_capture = InCapture::kAllowed);

EmulatedStream* of(cudaStream_t stream);

void submit(cudaStream_t stream, std::function<void()> work);

// Runs until `is_done`, or all that waits. What runs may wait for another stream.
void run_stream(EmulatedStream* stream, const std::function<bool()>& is_done = nullptr);

// Runs the event's stream until this record of it.
void reach(EmulatedEvent* event, int64_t record);

void run_all();

// Runs `thread` once for each thread of the block blockIdx; without `random` in their order. False
// if the block cannot end, since threads wait for others that will not come.
bool run_block(const std::function<void()>& thread, std::mt19937_64* random);

}  // namespace emulated_cuda
