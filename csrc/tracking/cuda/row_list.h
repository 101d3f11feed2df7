// The rows that a call names, as its kernels see them; for *.cu only.
#pragma once

#include <cstdint>

#include "core/cuda/device.h"
#include "core/cuda/host_link.h"
#include "tracking/row_tracker.h"

namespace cpr_ext {

// Distinct rows: those of row_ids, or without them all from `begin` on.
struct RowList {
  const int64_t* row_ids;
  int64_t begin;
  int64_t size;

  __device__ int64_t row(int64_t i) const { return row_ids == nullptr ? begin + i : row_ids[i]; }
};

// A copy of an array of the host, on the current device when `stream` gets there. The caller may
// change the array once this is made.
template <class T>
class Uploaded {
 public:
  Uploaded(const T* from, int64_t size, int device, cudaStream_t stream)
      : memory_(size * static_cast<int64_t>(sizeof(T)), stream) {
    HostLink::of(device).upload(memory_.template as<T>(), from,
                                size * static_cast<int64_t>(sizeof(T)), stream);
  }

  const T* get() const { return memory_.template as<T>(); }

 private:
  StreamMemory memory_;
};

}  // namespace cpr_ext
