// A place in the stream that training uses on a device: who keeps memory for work that was
// submitted before asks here whether it is done. Defined only where CUDA is compiled in.
#pragma once

#include <memory>

namespace cpr_ext {

class StreamMark {
 public:
  virtual ~StreamMark() = default;
  virtual bool is_passed() = 0;  // throws CudaError if the stream will not get here
  virtual void wait() = 0;       // as is_passed()
};

// At the end of all that this thread has submitted to the device's current stream.
std::unique_ptr<StreamMark> mark_stream(int device);

}  // namespace cpr_ext
