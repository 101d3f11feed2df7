// CUDA executed on the CPU, for tests of this project's kernels: the parts of the language and of
// the runtime that they use, under the same names. The build of `_emulated` has this header's
// folder on its include path, in place of CUDA's own; emulated_device.h controls the device.
//
// A block's threads are fibers that run one at a time, in an order that a test may shuffle. They
// switch at barriers and warp operations, shuffled ones also before some atomic operations. So a
// result that depends on the order of threads varies, and a barrier that not all reach is found.
// Races that need true concurrency, and anything about speed, are not.
//
// Streams run submitted work either at once or, in lazy mode, only when somebody waits for it: then
// memory that is freed too early, or an order that no event requires, shows.
#pragma once

#ifdef __CUDACC__
#error "the emulated cuda_runtime.h is on the include path of a CUDA compiler"
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
// One block runs at a time. What is in this section is garbage when a block begins; a compiler does
// not put there what is in a template, so that shared memory belongs in plain functions.
#define __shared__ static __attribute__((section("emulated_shared")))
#define CUDART_VERSION 13000

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorNoDevice = 100,
  cudaErrorInvalidDevice = 101,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorNotReady = 600,
  cudaErrorLaunchFailure = 719,
  cudaErrorNotSupported = 801,
  cudaErrorStreamCaptureUnsupported = 900,
  cudaErrorStreamCaptureIsolation = 905,
  cudaErrorStreamCaptureImplicit = 906,
  cudaErrorCapturedEvent = 907,
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
enum cudaStreamCaptureMode {
  cudaStreamCaptureModeGlobal,
  cudaStreamCaptureModeThreadLocal,
  cudaStreamCaptureModeRelaxed,
};
enum cudaMemAllocationType { cudaMemAllocationTypePinned = 1 };
enum cudaMemLocationType { cudaMemLocationTypeDevice = 1 };
enum cudaMemPoolAttr { cudaMemPoolAttrReleaseThreshold = 4, cudaMemPoolAttrReservedMemCurrent = 5 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16, cudaDevAttrMemoryPoolsSupported = 115 };
enum cudaDriverEntryPointQueryResult {
  cudaDriverEntryPointSuccess,
  cudaDriverEntryPointSymbolNotFound,
};
constexpr unsigned long long cudaEnableDefault = 0;
constexpr unsigned cudaHostAllocMapped = 2;
constexpr unsigned cudaHostRegisterPortable = 1;
constexpr unsigned cudaEventDisableTiming = 2;
constexpr unsigned cudaEventBlockingSync = 1;
constexpr unsigned cudaStreamNonBlocking = 1;

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
struct alignas(16) uint4 {  // a GPU faults where an address is no multiple of it
  unsigned x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
extern dim3 threadIdx, blockIdx, blockDim, gridDim;

struct EmulatedStream;
struct EmulatedEvent;
using cudaStream_t = EmulatedStream*;
using cudaEvent_t = EmulatedEvent*;
struct EmulatedMemPool;
using cudaMemPool_t = EmulatedMemPool*;
struct cudaMemPoolProps {
  cudaMemAllocationType allocType;
  struct {
    cudaMemLocationType type;
    int id;
  } location;
};

struct cudaFuncAttributes {};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  void* attrs = nullptr;
  unsigned numAttrs = 0;
};

const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* all_bytes);
cudaError_t cudaMalloc(void** data, size_t bytes);
cudaError_t cudaFree(void* data);
cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps* props);
cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool);
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value);
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value);
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t kept_bytes);
cudaError_t cudaMallocFromPoolAsync(void** data, size_t bytes, cudaMemPool_t pool,
                                    cudaStream_t stream);
cudaError_t cudaFreeAsync(void* data, cudaStream_t stream);
cudaError_t cudaHostAlloc(void** data, size_t bytes, unsigned flags);
cudaError_t cudaFreeHost(void* data);
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned flags);
cudaError_t cudaHostRegister(void* data, size_t bytes, unsigned flags);
cudaError_t cudaHostUnregister(void* data);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream);
cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status);
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode);
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned version,
                                             unsigned long long flags,
                                             cudaDriverEntryPointQueryResult* result);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventQuery(cudaEvent_t event);  // in lazy mode it takes some asking

namespace emulated_cuda {

// What the templates below are made of.
cudaError_t submit_kernel(const cudaLaunchConfig_t& config, const void* kernel,
                          std::function<void()> thread);
cudaError_t load_kernel(const void* kernel);
void barrier();
// Every lane of `mask` gives a value; returns those of all 32 lanes, valid until the next exchange.
const uint64_t* exchange(unsigned mask, uint64_t value);
int lane();
uint64_t& wide_loads();  // so many so far
void reach_atomic();     // where threads change places if their order is random
[[noreturn]] void misuse(const char* what);

template <class T>
uint64_t to_bits(T value) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "one register pair");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}

template <class T>
T from_bits(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

}  // namespace emulated_cuda

template <class... Params, class... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...),
                               Args&&... args) {
  auto values = std::tuple<std::decay_t<Params>...>(std::forward<Args>(args)...);
  return emulated_cuda::submit_kernel(*config, reinterpret_cast<const void*>(kernel),
                                      [=] { std::apply(kernel, values); });
}

template <class... Params>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, void (*kernel)(Params...)) {
  return emulated_cuda::load_kernel(reinterpret_cast<const void*>(kernel));
}

inline void __syncthreads() { emulated_cuda::barrier(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { emulated_cuda::exchange(mask, 0); }
inline void __threadfence() {}
inline void __threadfence_system() {}

template <class T>
T __shfl_sync(unsigned mask, T value, int lane) {
  return emulated_cuda::from_bits<T>(
      emulated_cuda::exchange(mask, emulated_cuda::to_bits(value))[lane & 31]);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta) {
  const int from = emulated_cuda::lane() - static_cast<int>(delta);
  const uint64_t* values = emulated_cuda::exchange(mask, emulated_cuda::to_bits(value));
  return from < 0 ? value : emulated_cuda::from_bits<T>(values[from]);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta) {
  const int from = emulated_cuda::lane() + static_cast<int>(delta);
  const uint64_t* values = emulated_cuda::exchange(mask, emulated_cuda::to_bits(value));
  return from > 31 ? value : emulated_cuda::from_bits<T>(values[from]);
}
template <class T>
unsigned __match_any_sync(unsigned mask, T value) {
  const uint64_t mine = emulated_cuda::to_bits(value);
  const uint64_t* values = emulated_cuda::exchange(mask, mine);
  unsigned equal = 0;
  for (int lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1) != 0 && values[lane] == mine) equal |= 1u << lane;
  }
  return equal;
}

inline int __any_sync(unsigned mask, int predicate) {
  const uint64_t* values = emulated_cuda::exchange(mask, predicate != 0);
  for (int lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1) != 0 && values[lane] != 0) return 1;
  }
  return 0;
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const uint64_t* values = emulated_cuda::exchange(mask, predicate != 0);
  unsigned set = 0;
  for (int lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1) != 0 && values[lane] != 0) set |= 1u << lane;
  }
  return set;
}

inline uint4 __ldg(const uint4* address) {
  ++emulated_cuda::wide_loads();
  return *address;
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(unsigned bits) { return __builtin_ffs(static_cast<int>(bits)); }

template <class T>
T atomicAdd(T* address, T value) {
  emulated_cuda::reach_atomic();
  const T old = *address;
  *address = old + value;
  return old;
}
template <class T>
T atomicExch(T* address, T value) {
  emulated_cuda::reach_atomic();
  const T old = *address;
  *address = value;
  return old;
}
template <class T>
T atomicCAS(T* address, T expected, T value) {
  emulated_cuda::reach_atomic();
  const T old = *address;
  if (old == expected) *address = value;
  return old;
}
template <class T>
T atomicOr(T* address, T value) {
  emulated_cuda::reach_atomic();
  const T old = *address;
  *address = old | value;
  return old;
}
template <class T>
T atomicAnd(T* address, T value) {
  emulated_cuda::reach_atomic();
  const T old = *address;
  *address = old & value;
  return old;
}
template <class T>
T atomicMin(T* address, T value) {
  emulated_cuda::reach_atomic();
  const T old = *address;
  if (value < old) *address = value;
  return old;
}
