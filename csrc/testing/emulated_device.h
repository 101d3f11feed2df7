// The emulated device as tests control and observe it; cuda_runtime.h is how kernels use it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <map>
#include <string>

namespace emulated_cuda {

// Streams run only when somebody waits for them.
void set_lazy(bool lazy);

// Streams say that a graph is made of them, but run.
void set_capturing(bool capturing);

// Blocks, and threads of each, run in a random order; 0: in theirs.
void shuffle_threads(uint64_t seed);

// The nth call of this function from here on fails; 0: none does.
void fail_call(const std::string& name, int nth, cudaError_t error);

// Number of calls since the last request, by name.
std::map<std::string, int64_t> calls();

// Device memory that is not freed: bytes by address. Runs the waiting work.
std::map<uintptr_t, int64_t> allocations();

// A fault in a kernel breaks the device until this is called.
void repair();

}  // namespace emulated_cuda
