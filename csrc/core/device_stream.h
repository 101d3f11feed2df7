// A GPU as those parts of the core see it that know no CUDA: its number, and the stream on which
// training uses it. Defined only where CUDA is compiled in.
#pragma once

#include <functional>
#include <memory>

namespace cpr_ext {

constexpr int kHostMemory = -1;  // in place of the number of a device

// Devices that can be used: 0 without a GPU or a driver.
int num_devices();

// The same number; throws UsageError if there is no such device.
int checked_device(int device);

// The stream (a cudaStream_t) that this thread trains on, as last told; the device's default stream
// if never. All work on a device goes there, so that it is ordered with training's own. The work on
// another stream comes after all that was submitted to the one before, on whichever thread; that
// one still exists. Throws CudaError.
void* current_stream(int device);
void set_current_stream(int device, void* stream);

// Called when a device is out of memory: frees what the process only keeps for later, such as
// torch's cache, and returns whether it did; the allocation is then tried once more.
using MemoryReclaimer = std::function<bool(int device)>;
void set_memory_reclaimer(MemoryReclaimer reclaimer);

// Gives memory of the device that was freed, and kept for later, back to other allocators; the
// second only if little of the device is free.
void trim_memory(int device);
void trim_memory_if_short(int device);

// A place in the stream that training uses on a device: who keeps memory for work that was
// submitted before asks here whether it is done.
class StreamMark {
 public:
  virtual ~StreamMark() = default;
  virtual bool is_passed() = 0;  // throws CudaError if the stream will not get here
  virtual void wait() = 0;       // as is_passed()
};

// At the end of all that this thread has submitted to the device's current stream.
std::unique_ptr<StreamMark> mark_stream(int device);

}  // namespace cpr_ext
