// How a torch tensor or a numpy array crosses into the core: pointer, shape, strides and dtype,
// read by duck typing, so that this module links no libtorch and serves every torch version.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <vector>

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

// Raises UsageError naming `name` unless `object` is a strided torch CPU tensor or a numpy array.
// The view holds no reference: the caller keeps `object` alive while it is used.
TensorView view_tensor(pybind11::handle object, const char* name);

// As view_tensor, but also checks that it is contiguous, has `ndim` dimensions and that its dtype
// is one of `allowed` (any, if empty).
TensorView view_contiguous(pybind11::handle object, const char* name, int ndim,
                           std::initializer_list<DType> allowed);

}  // namespace cpr_ext
