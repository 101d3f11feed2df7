// Uses of CUDA with the faults that the emulated device is there to find.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

namespace emulated_cuda {

// In a capture, on this thread: "launch" is allowed; "launch for the first time", which loads the
// kernel, "wait for the stream", "wait for an event", "ask for an event", "wait for an event of
// before" and "allocate" are not. The call's error; the capture has then ended.
cudaError_t call_in_capture(const std::string& call);

// The same on a thread that said that its calls do no harm to captures: "wait for the stream", and
// of an event of the capture "wait for it", "ask for it" and "let another stream wait for it".
cudaError_t relaxed_call_in_capture(const std::string& call);

// On a thread of its own, while this one captures; `waits_beside`: it has said that it may.
cudaError_t wait_beside_capture(bool waits_beside);

// With two devices: "launch on the other's stream", "record the other's event".
cudaError_t mix_devices(const std::string& fault);

// "use a device that is not there", "launch too many threads", "launch no block", "free twice".
cudaError_t call_wrongly(const std::string& fault);

// The error of asking where a device sees the first byte of host memory that is mapped, or
// allocated as "portable" alone; "inside": of the second byte, "beside": of the byte after the
// mapped ones.
cudaError_t see_host_memory(const std::string& fault);

// How often memory is mapped if it is allocated and freed `times` times, with a wait between; it is
// of a pool that keeps what is freed, or not.
int64_t count_mappings(int times, bool keeps);

// What a kernel reads from memory that its owner has freed, in the order of the stream; 0xabab...:
// nobody's. `frees_late`: after the kernel, as it must be; `has_next`: somebody allocates as much
// before the kernel.
uint32_t read_freed(bool frees_late, bool has_next);

}  // namespace emulated_cuda
