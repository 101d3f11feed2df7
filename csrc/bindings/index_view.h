// The hot path's way across: indices as a flat array, read with the fewest calls into Python. A
// batch of 26 tables must cost microseconds here.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "tracking/lookup.h"

namespace cpr_ext {

// Indices of any number of dimensions, int32 or int64, contiguous, in the memory of `device`: a
// torch tensor or, on the host, a numpy array. Otherwise raises UsageError naming `table`, what was
// given and the remedy. The view holds no reference: the caller keeps `object` alive while it is
// used.
Lookup view_indices(pybind11::handle object, const std::string& table, int device = kHostMemory);

}  // namespace cpr_ext
