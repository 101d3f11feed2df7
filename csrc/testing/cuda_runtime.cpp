// The functions of the CUDA runtime, each on the emulated machine.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "testing/emulated_machine.h"

using namespace emulated_cuda;  // NOLINT: these are its functions

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
