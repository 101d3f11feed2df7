#include "bindings/index_view.h"

#include <pybind11/numpy.h>

#include "bindings/attributes.h"
#include "bindings/dlpack.h"
#include "bindings/tensor_view.h"
#include "core/error.h"

namespace py = pybind11;

namespace cpr_ext {

namespace {

[[noreturn]] void refuse(const std::string& table, const std::string& fault) {
  throw UsageError("table '" + table + "': the indices " + fault);
}

[[noreturn]] void refuse_dtype(const std::string& table, py::handle dtype) {
  refuse(table, "have dtype " + std::string(py::str(dtype)) +
                    "; allowed: int32, int64 (convert with .long() or .astype('int64'))");
}

[[noreturn]] void refuse_layout(const std::string& table) {
  refuse(table,
         "are not contiguous; pass indices.contiguous() or numpy.ascontiguousarray(indices)");
}

[[noreturn]] void refuse_unstrided(const std::string& table, py::handle tensor) {
  refuse(table, "have layout " + std::string(py::str(tensor.attr("layout"))) +
                    "; they must be a strided tensor with memory of its own");
}

Lookup view_numpy(py::handle object, const std::string& table) {
  const auto array = py::reinterpret_borrow<py::array>(object);
  const py::dtype dtype = array.dtype();
  const bool native = dtype.byteorder() == '=';
  if (dtype.kind() != 'i' || !native || (dtype.itemsize() != 4 && dtype.itemsize() != 8)) {
    refuse_dtype(table, dtype);
  }
  constexpr int kAligned = py::detail::npy_api::NPY_ARRAY_ALIGNED_;
  if ((array.flags() & py::array::c_style) == 0 || (array.flags() & kAligned) == 0) {
    refuse_layout(table);
  }
  return {array.data(), dtype.itemsize() == 4 ? DType::kInt32 : DType::kInt64, array.size(),
          kHostMemory};
}

// torch's dtype objects are unique and live as long as torch: their addresses are compared.
DType index_dtype(const py::object& dtype, const std::string& table) {
  static PyObject* int32 = nullptr;  // guarded by the GIL
  static PyObject* int64 = nullptr;
  if (dtype.ptr() == int64) return DType::kInt64;
  if (dtype.ptr() == int32) return DType::kInt32;
  const std::string name = py::str(dtype);
  if (name == "torch.int64") {
    int64 = dtype.inc_ref().ptr();
    return DType::kInt64;
  }
  if (name == "torch.int32") {
    int32 = dtype.inc_ref().ptr();
    return DType::kInt32;
  }
  refuse_dtype(table, dtype);
}

Lookup view_torch(py::handle object, const std::string& table, int device) {
  Lookup lookup;
  lookup.dtype = index_dtype(attribute(object, names().dtype), table);
  const bool on_host = attribute(object, names().is_cpu).ptr() == Py_True;
  if (!lies_on(on_host ? kHostMemory : memory_of(object), device)) {
    refuse(table, "are " + elsewhere(object, device));
  }
  try {
    if (call(object, names().is_contiguous).ptr() != Py_True) {
      const std::string layout = py::str(object.attr("layout"));
      if (layout != "torch.strided") refuse_unstrided(table, object);
      refuse_layout(table);
    }
    lookup.num_indices = to_int64(call(object, names().numel));
    lookup.indices = reinterpret_cast<void*>(to_int64(call(object, names().data_ptr)));
  } catch (const py::error_already_set&) {
    refuse_unstrided(table, object);
  }
  return lookup;
}

}  // namespace

Lookup view_indices(py::handle object, const std::string& table, int device) {
  Lookup lookup;
  DlpackView view;
  if (view_dlpack(object, &view) && view.dtype != DType::kOther && lies_on(view.memory, device) &&
      view.is_contiguous()) {
    return {view.data, view.dtype, view.numel(), device};
  }
  if (py::isinstance<py::array>(object) && lies_on(kHostMemory, device)) {
    lookup = view_numpy(object, table);
    lookup.device = device;
    return lookup;
  }
  if (PyObject_HasAttr(object.ptr(), names().data_ptr) != 0) {
    lookup = view_torch(object, table, device);
    lookup.device = device;
    return lookup;
  }
  refuse(table, "are a " + std::string(py::str(py::type::of(object).attr("__name__"))) +
                    "; allowed: torch.Tensor, numpy.ndarray");
}

}  // namespace cpr_ext
