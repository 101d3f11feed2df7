// Uses of CUDA, and kernels, with the faults that the emulated device is there to find. Each
// returns the error of the fault that it is told, 0: none, or what it says.
#pragma once

#include <cstdint>
#include <string>

namespace emulated_cuda {

// In a capture, on this thread: "launch" is allowed; "launch for the first time", which loads the
// kernel, "wait for the stream", "wait for an event", "ask for an event", "wait for an event of
// before" and "allocate" are not. The call's error; the capture has then ended.
int call_in_capture(const std::string& call);

// The same on a thread that said that its calls do no harm to captures: "wait for the stream", and
// of an event of the capture "wait for it", "ask for it" and "let another stream wait for it".
int relaxed_call_in_capture(const std::string& call);

// On a thread of its own, while this one captures; `waits_beside`: it has said that it may.
int wait_beside_capture(bool waits_beside);

// With two devices: "launch on the other's stream", "record the other's event".
int mix_devices(const std::string& fault);

// "use a device that is not there", "launch too many threads", "launch no block", "free twice".
int call_wrongly(const std::string& fault);

// The error of asking where a device sees the first byte of host memory that is mapped, or
// allocated as "portable" alone; "inside": of the second byte, "beside": of the byte after the
// mapped ones.
int see_host_memory(const std::string& fault);

// How often memory is mapped if it is allocated and freed `times` times, with a wait between; it is
// of a pool that keeps what is freed, or not.
int64_t count_mappings(int times, bool keeps);

// What a kernel reads from memory that its owner has freed, in the order of the stream; 0xabab...:
// nobody's. `frees_late`: after the kernel, as it must be; `has_next`: somebody allocates as much
// before the kernel.
uint32_t read_freed(bool frees_late, bool has_next);

// "none", "some threads miss a barrier", "a lane is not in its mask", "lanes disagree on the mask".
// What waiting for the kernel says; the device is as new afterwards.
int run_broken_kernel(const std::string& fault);

// A kernel's sum of shared memory, of which each thread has set its own part to 1, or, wrongly, has
// relied on zeros: with two blocks, each of 64 threads.
uint64_t sum_shared(bool clears);

// How many threads of a block of two warps read a wrong sum: each warp puts its part into shared
// memory twice, and waits, or, wrongly, does not wait until all have read the first.
uint64_t misread_sums(bool waits);

// What freeing memory says of which a kernel has written so many elements more than it has.
int overrun_memory(int64_t num_elements, int64_t num_more);

}  // namespace emulated_cuda
