#include "bindings/vector_array.h"

namespace py = pybind11;

namespace cpr_ext {

namespace {
// Of this module alone: another one's vectors may be of another layout.
#define CPR_EXT_NAME_OF(module) #module
#define CPR_EXT_ROW_IDS_OF(module) "cpr_ext.row_ids of " CPR_EXT_NAME_OF(module)
constexpr const char* kRowIds = CPR_EXT_ROW_IDS_OF(CPR_EXT_MODULE);
}  // namespace

py::array_t<int64_t> to_numpy(RowIdVector row_ids) {
  auto owner =
      std::make_unique<SharedRowIds>(std::make_shared<const RowIdVector>(std::move(row_ids)));
  const auto size = static_cast<py::ssize_t>((*owner)->size());
  const int64_t* data = (*owner)->data();
  py::capsule keep_alive(owner.get(), kRowIds, [](PyObject* capsule) {
    delete static_cast<SharedRowIds*>(PyCapsule_GetPointer(capsule, kRowIds));
  });
  owner.release();
  return py::array_t<int64_t>(size, data, keep_alive);
}

SharedRowIds share_row_ids(py::handle array, const int64_t* data, int64_t size) {
  if (py::isinstance<py::array>(array)) {
    const py::object base = py::reinterpret_borrow<py::array>(array).base();
    if (base && PyCapsule_IsValid(base.ptr(), kRowIds)) {
      const auto& shared =
          *static_cast<const SharedRowIds*>(PyCapsule_GetPointer(base.ptr(), kRowIds));
      if (shared->data() == data && static_cast<int64_t>(shared->size()) == size) return shared;
    }
  }
  return std::make_shared<const RowIdVector>(data, data + size);
}

}  // namespace cpr_ext
