// How a torch tensor or a numpy array crosses into the core: pointer, shape, strides and dtype,
// read by duck typing, so that this module links no libtorch and serves every torch version.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <vector>

#include "core/device_stream.h"
#include "core/dtype.h"

namespace cpr_ext {

struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kOther;
  std::string dtype_name;
  int64_t item_bytes = 0;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;  // in elements
  bool writable = true;

  int64_t numel() const;
  bool is_contiguous() const;
};

// The device whose memory a torch tensor lies in: kHostMemory, the number of a CUDA device, or
// kNoMemory (a meta tensor, such as).
constexpr int kNoMemory = -2;
int memory_of(pybind11::handle tensor);

// Raises UsageError naming `name` unless `object` is a strided torch tensor in the memory of
// `device`, or for the host's a numpy array.
// The view holds no reference: the caller keeps `object` alive while it is used.
TensorView view_tensor(pybind11::handle object, const char* name, int device = kHostMemory);

// In place of view_tensor's words for a tensor elsewhere; "this tensor is on device 'cuda:1'; ...".
std::string elsewhere(pybind11::handle tensor, int device);

// Whether memory there, such as memory_of() says, is what `device` means. Emulated devices have the
// host's memory, too, unless strict; then, as a GPU does, they take only what says it is theirs.
bool lies_on(int memory, int device);
#ifdef CPR_EXT_EMULATED_DEVICE
void set_strict_memory(bool strict);
#endif

// As view_tensor, but also checks that it is contiguous, has `ndim` dimensions and that its dtype
// is one of `allowed` (any, if empty).
TensorView view_contiguous(pybind11::handle object, const char* name, int ndim,
                           std::initializer_list<DType> allowed, int device = kHostMemory);

}  // namespace cpr_ext
