#include "bindings/tensor_view.h"

#include <pybind11/numpy.h>

#include <algorithm>
#include <unordered_map>

#include "core/error.h"

namespace py = pybind11;

namespace cpr_ext {

namespace {

struct DTypeInfo {
  DType dtype;
  std::string name;
  int64_t item_bytes;
};

const std::unordered_map<std::string, DType>& dtype_names() {
  static const std::unordered_map<std::string, DType> names = {
      {"bool", DType::kBool},       {"uint8", DType::kUInt8},       {"int8", DType::kInt8},
      {"int16", DType::kInt16},     {"int32", DType::kInt32},       {"int64", DType::kInt64},
      {"uint32", DType::kUInt32},   {"uint64", DType::kUInt64},     {"float16", DType::kFloat16},
      {"float32", DType::kFloat32}, {"bfloat16", DType::kBFloat16}, {"float64", DType::kFloat64},
  };
  return names;
}

// torch's and numpy's dtype objects live as long as their modules: their addresses are keys.
const DTypeInfo& dtype_info(py::handle dtype) {
  static std::unordered_map<PyObject*, DTypeInfo> cache;  // guarded by the GIL
  const auto hit = cache.find(dtype.ptr());
  if (hit != cache.end()) return hit->second;
  std::string name = py::str(dtype);
  if (name.rfind("torch.", 0) == 0) name = name.substr(6);
  const auto known = dtype_names().find(name);
  const DType type = known == dtype_names().end() ? DType::kOther : known->second;
  dtype.inc_ref();  // the address stays taken while it is a key
  return cache
      .emplace(dtype.ptr(), DTypeInfo{type, name, py::cast<int64_t>(dtype.attr("itemsize"))})
      .first->second;
}

TensorView view_numpy(py::handle object, const char* name) {
  const auto array = py::reinterpret_borrow<py::array>(object);
  TensorView view;
  view.data = const_cast<void*>(array.data());
  view.writable = array.writeable();
  view.item_bytes = array.itemsize();
  const py::dtype dtype = array.dtype();
  if (dtype.kind() == 'i' && view.item_bytes == 8 && dtype.byteorder() == '=') {
    view.dtype = DType::kInt64;  // row ids: to ask for the name takes longer than all else here
    view.dtype_name = "int64";
  } else {
    // A fresh numpy dtype object may be made per array, so look it up by name, without the cache.
    view.dtype_name = py::str(dtype);
    const auto known = dtype_names().find(view.dtype_name);
    view.dtype = known == dtype_names().end() ? DType::kOther : known->second;
    if (py::cast<bool>(dtype.attr("hasobject"))) {
      throw UsageError(std::string(name) + " holds Python objects, not numbers");
    }
  }
  const auto item_bytes = std::max<py::ssize_t>(1, array.itemsize());
  for (py::ssize_t i = 0; i < array.ndim(); ++i) {
    // A field of a packed record has strides between the items.
    if (array.shape(i) > 1 && array.strides(i) % item_bytes != 0) {
      throw UsageError(std::string(name) + " has strides that are not whole elements; pass a copy");
    }
    view.shape.push_back(array.shape(i));
    view.strides.push_back(array.strides(i) / item_bytes);
  }
  return view;
}

TensorView view_torch(py::handle object, const char* name, int device) {
  TensorView view;
  if (!lies_on(memory_of(object), device)) {
    throw UsageError(std::string(name) + " is " + elsewhere(object, device));
  }
  const DTypeInfo& info = dtype_info(object.attr("dtype"));
  view.dtype = info.dtype;
  view.dtype_name = info.name;
  view.item_bytes = info.item_bytes;
  try {
    for (const py::handle stride : object.attr("stride")()) {
      view.strides.push_back(py::cast<int64_t>(stride));
    }
    view.data = reinterpret_cast<void*>(py::cast<uintptr_t>(object.attr("data_ptr")()));
  } catch (const py::error_already_set&) {
    throw UsageError(std::string(name) + " has layout " +
                     std::string(py::str(object.attr("layout"))) +
                     "; it must be a strided tensor with memory of its own");
  }
  for (const py::handle size : object.attr("shape")) {
    view.shape.push_back(py::cast<int64_t>(size));
  }
  return view;
}

}  // namespace

int64_t TensorView::numel() const {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  return count;
}

bool TensorView::is_contiguous() const {
  if (numel() == 0) return true;
  int64_t expected = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    if (shape[i] != 1 && strides[i] != expected) return false;
    expected *= shape[i];
  }
  return true;
}

#ifdef CPR_EXT_EMULATED_DEVICE
namespace {
bool is_strict = false;  // guarded by the GIL
}

void set_strict_memory(bool strict) { is_strict = strict; }

bool lies_on(int memory, int device) {
  return memory == device || (memory == kHostMemory && !is_strict);
}
#else
bool lies_on(int memory, int device) { return memory == device; }
#endif

int memory_of(py::handle tensor) {
  if (py::cast<bool>(tensor.attr("is_cpu"))) return kHostMemory;
  if (!py::cast<bool>(tensor.attr("is_cuda"))) return kNoMemory;
  return py::cast<int>(tensor.attr("device").attr("index"));
}

std::string elsewhere(py::handle tensor, int device) {
  const std::string found = "on device '" + std::string(py::str(tensor.attr("device"))) + "'; ";
  if (device == kHostMemory) return found + "needed is a CPU tensor: move it with .cpu()";
  return found + "needed is 'cuda:" + std::to_string(device) + "', where its table is";
}

TensorView view_tensor(py::handle object, const char* name, int device) {
  if (py::isinstance<py::array>(object) && lies_on(kHostMemory, device)) {
    return view_numpy(object, name);
  }
  if (py::hasattr(object, "data_ptr")) return view_torch(object, name, device);
  throw UsageError(std::string(name) + " is a " +
                   std::string(py::str(py::type::of(object).attr("__name__"))) +
                   "; allowed: torch.Tensor, numpy.ndarray");
}

TensorView view_contiguous(py::handle object, const char* name, int ndim,
                           std::initializer_list<DType> allowed, int device) {
  TensorView view = view_tensor(object, name, device);
  if (static_cast<int>(view.shape.size()) != ndim) {
    throw UsageError(std::string(name) + " has " + std::to_string(view.shape.size()) +
                     " dimensions; it must have " + std::to_string(ndim));
  }
  if (!view.is_contiguous()) {
    throw UsageError(std::string(name) + " is not contiguous; pass " + name + ".contiguous()");
  }
  if (view.item_bytes > 0 && reinterpret_cast<uintptr_t>(view.data) % view.item_bytes != 0) {
    throw UsageError(std::string(name) + " starts at an unaligned address; pass a copy");
  }
  if (allowed.size() != 0 &&
      std::find(allowed.begin(), allowed.end(), view.dtype) == allowed.end()) {
    std::string names;
    for (const auto& [text, dtype] : dtype_names()) {
      if (std::find(allowed.begin(), allowed.end(), dtype) == allowed.end()) continue;
      names += (names.empty() ? "" : ", ") + text;
    }
    throw UsageError(std::string(name) + " has dtype " + view.dtype_name + "; allowed: " + names);
  }
  return view;
}

}  // namespace cpr_ext
