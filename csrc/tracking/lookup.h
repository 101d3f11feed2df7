// One table's lookups in one batch, as they lie in memory.
#pragma once

#include <cstdint>

#include "core/device_stream.h"
#include "core/dtype.h"

namespace cpr_ext {

struct Lookup {
  const void* indices = nullptr;  // (num_indices), contiguous, aligned; owned by the caller
  DType dtype = DType::kInt64;    // kInt32 or kInt64
  int64_t num_indices = 0;
  int device = kHostMemory;  // whose memory the indices lie in
};

// Calls `body` with the indices as a typed pointer and their number.
template <class Body>
auto visit_indices(const Lookup& lookup, Body&& body) {
  if (lookup.dtype == DType::kInt32) {
    return body(static_cast<const int32_t*>(lookup.indices), lookup.num_indices);
  }
  return body(static_cast<const int64_t*>(lookup.indices), lookup.num_indices);
}

}  // namespace cpr_ext
