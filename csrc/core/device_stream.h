// A GPU as those parts of the core see it that know no CUDA: its number, and the stream on which
// training uses it. Defined only where CUDA is compiled in.
#pragma once

namespace cpr_ext {

constexpr int kHostMemory = -1;  // in place of the number of a device

// Devices that can be used: 0 without a GPU or a driver.
int num_devices();

// The stream (a cudaStream_t) that this thread trains on, as last told; the device's default stream
// if never. All work on a device goes there, so that it is ordered with training's own.
void* current_stream(int device);
void set_current_stream(int device, void* stream);

}  // namespace cpr_ext
