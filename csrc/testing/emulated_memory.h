// Memory of the emulated device: garbage before its first use, and guarded behind its end; and its
// pools, which cudaMallocFromPoolAsync() uses.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(data, bytes) ((void)(data), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(data, bytes) ((void)(data), (void)(bytes))
#endif

namespace emulated_cuda {

constexpr unsigned char kGarbage = 0xab;  // in memory that nobody has written

constexpr size_t kUnit = 512;  // memory is aligned to this, and a multiple of it
constexpr size_t kGuardBytes = 64;

// What `bytes` of memory take with a guard behind them. This and the four below REQUIRE the
// machine's mutex to be held.
size_t guarded_size(size_t bytes);

// Fills memory of guarded_size(bytes) with garbage.
void begin_use(void* data, size_t bytes);

// If something has been written behind the memory, the device fails from here on.
void end_use(void* data);

cudaError_t allocate(void** data, size_t bytes);
void release(void* data);

// How often pools have taken memory from the device since the last request: what takes time.
int64_t mappings();

// Bytes that pools hold, in use or not.
int64_t pooled_bytes();

// What every wait for a device does: pools give it back what is unused, down to their threshold.
// REQUIRES: the machine's mutex is held.
void give_back_memory();

}  // namespace emulated_cuda
