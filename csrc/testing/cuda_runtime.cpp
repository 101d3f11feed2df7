// The functions of the CUDA runtime, each on the emulated machine.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <string>
#include <utility>

#include "testing/emulated_machine.h"
#include "testing/emulated_memory.h"

using namespace emulated_cuda;  // NOLINT: these are its functions

namespace {
constexpr int kMultiprocessors = 2;  // so few that a block gets more than its fewest rows
}

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
  ++machine().calls["cudaGetDeviceCount"];  // which uses no device
  *count = machine().num_devices;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  Lock lock(machine().mutex);
  if (device < 0 || device >= machine().num_devices) return note(cudaErrorInvalidDevice);
  this_thread().chosen = device;
  this_thread().contexts.back() = device;
  machine().used_devices.insert(device);  // CUDA 12 and later make a context at once
  return cudaSuccess;
}

// The driver's contexts: of device 0 it is 1, and so on.
namespace {

int get_current(void** context) {
  *context = reinterpret_cast<void*>(static_cast<intptr_t>(this_thread().contexts.back() + 1));
  return cudaSuccess;
}

int push(void* context) {
  Lock lock(machine().mutex);
  const int device = static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1;
  if (const cudaError_t error = planned_failure("cuCtxPushCurrent")) return error;
  machine().used_devices.insert(device);
  this_thread().contexts.push_back(device);
  return cudaSuccess;
}

int pop(void** context) {
  get_current(context);
  this_thread().contexts.pop_back();
  return cudaSuccess;
}

int retain(void** context, int device) {
  Lock lock(machine().mutex);
  if (device < 0 || device >= machine().num_devices) return cudaErrorInvalidDevice;
  machine().used_devices.insert(device);
  *context = reinterpret_cast<void*>(static_cast<intptr_t>(device + 1));
  return cudaSuccess;
}

const std::map<std::string, void*>& driver_calls() {
  static const std::map<std::string, void*> calls = {
      {"cuCtxGetCurrent", reinterpret_cast<void*>(&get_current)},
      {"cuCtxPushCurrent", reinterpret_cast<void*>(&push)},
      {"cuCtxPopCurrent", reinterpret_cast<void*>(&pop)},
      {"cuDevicePrimaryCtxRetain", reinterpret_cast<void*>(&retain)},
  };
  return calls;
}

}  // namespace

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  const auto known = driver_calls().find(symbol);
  const bool is_known = known != driver_calls().end();
  *function = is_known ? known->second : nullptr;
  *result = is_known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  Lock lock(machine().mutex);
  const int of_pools = machine().has_pools ? 1 : 0;
  *value = attribute == cudaDevAttrMultiProcessorCount ? kMultiprocessors : of_pools;
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* all_bytes) {
  Lock lock(machine().mutex);
  if (const cudaError_t error = begin_call("cudaMemGetInfo")) return error;
  *free_bytes = machine().free_bytes;
  *all_bytes = kAllBytes;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, this_thread().mode);
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** data, size_t bytes) {
  Lock lock(machine().mutex);
  if (const cudaError_t error = begin_call("cudaMalloc", InCapture::kUnsafe)) return error;
  return allocate(data, bytes);
}

cudaError_t cudaFree(void* data) {
  Lock lock(machine().mutex);
  machine().used_devices.insert(current_device());
  run_all();  // as the real one waits for the device
  release(data);
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** data, size_t bytes, unsigned flags) {
  Lock lock(machine().mutex);
  if (const cudaError_t error = begin_call("cudaHostAlloc", InCapture::kUnsafe)) return error;
  *data = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  if (*data == nullptr) return note(cudaErrorMemoryAllocation);
  if (flags & cudaHostAllocMapped) machine().mapped_memory[static_cast<char*>(*data)] = bytes;
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* data) {
  Lock lock(machine().mutex);
  machine().used_devices.insert(current_device());
  run_all();
  machine().mapped_memory.erase(static_cast<char*>(data));
  std::free(data);
  return cudaSuccess;
}

// CUDA promises it of where the memory begins alone.
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  Lock lock(machine().mutex);
  if (machine().mapped_memory.count(static_cast<char*>(host)) == 0) {
    return note(cudaErrorInvalidValue);
  }
  *device = host;
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void*, size_t, unsigned) {
  Lock lock(machine().mutex);
  if (const cudaError_t error = begin_call("cudaHostRegister", InCapture::kUnsafe)) return error;
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void*) {
  Lock lock(machine().mutex);
  run_all();
  return begin_call("cudaHostUnregister", InCapture::kUnsafe);
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
  (*stream)->device = current_device();
  machine().streams.insert(*stream);
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  Lock lock(machine().mutex);
  machine().used_devices.insert(current_device());
  run_stream(stream);
  machine().streams.erase(stream);
  delete stream;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  Lock lock(machine().mutex);
  if (const cudaError_t error = begin_call("cudaStreamSynchronize", InCapture::kUnsafe)) {
    return error;
  }
  if (of(stream) == machine().capturing) return break_capture(cudaErrorStreamCaptureUnsupported);
  run_stream(of(stream));
  give_back_memory();
  return machine().is_broken ? cudaErrorLaunchFailure : cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  Lock lock(machine().mutex);
  const bool is_capturing = of(stream) == machine().capturing;
  *status = is_capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

// A capture may wait for its own events only, and nobody else for those. (CUDA lets a second stream
// join a capture so; nothing here does.)
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  Lock lock(machine().mutex);
  if (const cudaError_t error = begin_call("cudaStreamWaitEvent")) return error;
  const bool is_capturing = of(stream) == machine().capturing;
  if (is_capturing != event->is_captured) return break_capture(cudaErrorStreamCaptureIsolation);
  submit(stream, [event, record = event->num_recorded] { reach(event, record); });
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  Lock lock(machine().mutex);
  if (const cudaError_t error = begin_call("cudaEventCreateWithFlags")) return error;
  *event = new EmulatedEvent;
  (*event)->device = current_device();
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  Lock lock(machine().mutex);
  machine().used_devices.insert(current_device());
  run_all();  // a stream may wait for it
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  Lock lock(machine().mutex);
  if (const cudaError_t error = begin_call("cudaEventRecord")) return error;
  if (event->device != of(stream)->device) return note(cudaErrorInvalidResourceHandle);
  event->is_captured = of(stream) == machine().capturing;
  if (event->is_captured) return cudaSuccess;
  event->stream = of(stream);
  const int64_t record = ++event->num_recorded;
  submit(stream, [=] { event->num_reached = std::max(event->num_reached, record); });
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  Lock lock(machine().mutex);
  if (const cudaError_t error = begin_call("cudaEventSynchronize", InCapture::kUnsafe)) {
    return error;
  }
  if (event->is_captured) return note(cudaErrorCapturedEvent);
  reach(event, event->num_recorded);
  give_back_memory();
  return machine().is_broken ? cudaErrorLaunchFailure : cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  Lock lock(machine().mutex);
  if (const cudaError_t error = begin_call("cudaEventQuery", InCapture::kUnsafe)) return error;
  if (event->is_captured) return note(cudaErrorCapturedEvent);
  if (event->num_reached >= event->num_recorded) return cudaSuccess;
  bool has_moved = false;  // one piece of work for each time that somebody asks
  run_stream(event->stream, [&] { return std::exchange(has_moved, true); });
  return cudaErrorNotReady;
}
