// The emulated device as tests control and observe it; cuda_runtime.h is how kernels use it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <map>
#include <set>
#include <string>

namespace emulated_cuda {

// Streams run only when somebody waits for them.
void set_lazy(bool lazy);

// The default stream of device 0 begins to capture a graph, or ends; false: a call has broken it.
bool set_capturing(bool capturing);

// Launches the graph that was captured last, on the default stream of device 0.
void replay_graph();

// There are this many devices, none of which has a context.
void set_num_devices(int num_devices);

// Chooses the calling thread's device, as torch's runtime does, which makes no context yet.
void set_device(int device);

// The device of the calling thread's context; -1: it has none.
int current_context();

// As in a process in which no kernel has run yet.
void unload_kernels();

// Whether devices have memory pools.
void set_memory_pools(bool has_pools);

// The part of a device's memory that it says is free.
void set_free_part(double part);

// A stream of the current device beside the default one.
cudaStream_t make_stream();
void destroy_stream(cudaStream_t stream);

// Devices that have a context, since a call was made while they were a thread's.
std::set<int> used_devices();

// As torch does at .item(): waits for the device, which gives unused memory back.
void synchronize();

// Submitted and not yet run.
int64_t num_waiting();

// Blocks, and threads of each, run in a random order; 0: in theirs.
void shuffle_threads(uint64_t seed);

// The nth call of this function from here on fails; 0: none does.
void fail_call(const std::string& name, int nth, cudaError_t error);

// Number of calls since the last request, by name.
std::map<std::string, int64_t> calls();
std::map<std::string, int64_t> own_calls();  // of this thread

// Device memory that is not freed: bytes by address. Runs the waiting work.
std::map<uintptr_t, int64_t> allocations();

// Shared memory of all kernels together: what is garbage when a block begins.
int64_t shared_bytes();

// A fault in a kernel breaks the device until this is called.
void repair();

}  // namespace emulated_cuda
