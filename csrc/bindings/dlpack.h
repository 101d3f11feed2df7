// Torch tensors read with one C call each, where torch has DLPack's C exchange API (2.10 and
// later).
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "core/dtype.h"

namespace cpr_ext {

// A strided tensor, as it is during one call: `shape` and `strides` are the tensor's own.
struct DlpackView {
  void* data;
  int memory;   // kHostMemory or the number of a CUDA device
  DType dtype;  // kInt32 or kInt64; of all others kOther
  int ndim;
  const int64_t* shape;
  const int64_t* strides;  // in elements

  int64_t numel() const;
  bool is_contiguous() const;
};

// Returns false, with no Python error set, for all that its caller reads by attributes instead: an
// object that is no torch.Tensor or of a subclass of it, one without strided memory of its own or
// in another memory, and every tensor of a torch without the API.
bool view_dlpack(pybind11::handle object, DlpackView* view);

// For tests and measurements: whether view_dlpack() may use the API. Returns whether it does, which
// needs a torch that has it.
bool use_dlpack(bool use);

}  // namespace cpr_ext
