#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <memory>

#include "bindings/annotations.h"
#include "bindings/register.h"
#include "bindings/row_array_view.h"
#include "bindings/tensor_view.h"
#include "core/crc32c.h"
#include "core/error.h"
#include "staging/find_nan.h"
#include "staging/row_copy.h"
#include "staging/slot_pool.h"

namespace py = pybind11;

namespace cpr_ext {

RowArray view_rows(py::handle tensor, const char* name, int64_t first_row_id, int device) {
  const TensorView view = view_tensor(tensor, name, device);
  if (view.shape.empty()) {
    throw UsageError(std::string(name) + " is a scalar; its first dimension must be num_rows");
  }
  RowArray rows;
  rows.data = static_cast<std::byte*>(view.data);
  rows.num_rows = view.shape[0];
  rows.dtype = view.dtype;
  rows.first_row_id = first_row_id;
  int64_t row_items = 1;
  for (size_t i = view.shape.size(); i-- > 1;) {
    if (view.shape[i] == 0) throw UsageError(std::string(name) + ": a row has no bytes");
    const bool is_apart = view.shape[i] != 1 && view.strides[i] != row_items;
    if (is_apart && rows.num_rows > 0) {  // numpy gives empty arrays any strides
      throw UsageError(std::string(name) + ": the elements of a row must be contiguous");
    }
    row_items *= view.shape[i];
  }
  rows.row_bytes = row_items * view.item_bytes;
  if (rows.row_bytes == 0) throw UsageError(std::string(name) + ": a row has no bytes");
  rows.row_stride_bytes = view.strides[0] * view.item_bytes;
  if (rows.num_rows > 1 && rows.row_stride_bytes < rows.row_bytes) {
    throw UsageError(std::string(name) + ": rows overlap or are in reverse order");
  }
  if (rows.num_rows <= 1) rows.row_stride_bytes = rows.row_bytes;
  return rows;
}

namespace {

// The packed rows and the row ids of a gather or scatter, checked against the table.
struct RowCopy {
  RowArray table;
  std::byte* packed;
  const int64_t* row_ids;
  int64_t count;
};

RowCopy check_row_copy(py::handle table, py::handle row_ids, py::handle packed) {
  RowCopy copy;
  copy.table = view_rows(table, "table", 0);
  const TensorView ids = view_contiguous(row_ids, "row_ids", 1, {DType::kInt64});
  copy.row_ids = static_cast<const int64_t*>(ids.data);
  copy.count = ids.shape[0];
  for (int64_t i = 0; i < copy.count; ++i) {
    if (!copy.table.holds(copy.row_ids[i])) {
      throw RowIndexError("row_ids[" + std::to_string(i) + "] is " +
                          std::to_string(copy.row_ids[i]) + "; the table has " +
                          std::to_string(copy.table.num_rows) + " rows");
    }
  }
  const TensorView bytes = view_tensor(packed, "packed");
  if (!bytes.is_contiguous() ||
      bytes.numel() * bytes.item_bytes != copy.count * copy.table.row_bytes) {
    throw UsageError("packed has " + std::to_string(bytes.numel() * bytes.item_bytes) +
                     " bytes; needed are " + std::to_string(copy.count) + " contiguous rows of " +
                     std::to_string(copy.table.row_bytes));
  }
  copy.packed = static_cast<std::byte*>(bytes.data);
  const std::byte* table_end = copy.table.data + copy.table.num_rows * copy.table.row_stride_bytes;
  if (copy.packed < table_end && copy.packed + bytes.numel() * bytes.item_bytes > copy.table.data) {
    throw UsageError("packed shares memory with the table");
  }
  return copy;
}

void require_writable(py::handle tensor, const char* name) {
  if (!view_tensor(tensor, name).writable) throw UsageError(std::string(name) + " is read-only");
}

void gather(const ArrayLike& table, const ArrayLike& row_ids, const ArrayLike& out,
            ThreadPool* pool) {
  require_writable(out, "out");
  const RowCopy copy = check_row_copy(table, row_ids, out);
  py::gil_scoped_release release;
  gather_rows(copy.table, copy.row_ids, copy.count, copy.packed, pool);
}

void scatter(const ArrayLike& packed, const ArrayLike& row_ids, const ArrayLike& table,
             ThreadPool* pool) {
  require_writable(table, "table");
  const RowCopy copy = check_row_copy(table, row_ids, packed);
  for (int64_t i = 1; i < copy.count; ++i) {
    if (copy.row_ids[i] <= copy.row_ids[i - 1]) {
      throw UsageError("row_ids must ascend; row_ids[" + std::to_string(i) + "] is " +
                       std::to_string(copy.row_ids[i]) + " after " +
                       std::to_string(copy.row_ids[i - 1]));
    }
  }
  py::gil_scoped_release release;
  scatter_rows(copy.packed, copy.row_ids, copy.count, copy.table, pool);
}

uint32_t checksum(const py::buffer& data, uint32_t crc, const std::string& backend) {
  Crc32cFunction function = crc32c_extend;
  if (backend == "portable") {
    function = crc32c_portable;
  } else if (backend == "sse42") {
    function = crc32c_sse42();
    if (function == nullptr) throw UsageError("this CPU has no SSE4.2");
  } else if (backend != "best") {
    throw UsageError("backend is '" + backend + "'; allowed: best, portable, sse42");
  }
  const py::buffer_info info = data.request();
  if (PyBuffer_IsContiguous(info.view(), 'C') == 0) throw UsageError("data is not contiguous");
  const auto* bytes = info.ptr;
  const auto size = static_cast<size_t>(info.size * info.itemsize);
  py::gil_scoped_release release;
  return function(crc, bytes, size);
}

int64_t nan_position(const ArrayLike& array) {
  const TensorView view = view_tensor(array, "array");
  if (!view.is_contiguous()) throw UsageError("array is not contiguous");
  py::gil_scoped_release release;
  return find_nan(view.dtype, static_cast<const std::byte*>(view.data), view.numel());
}

}  // namespace

void register_staging(py::module_& module) {
  module.def("gather_rows", &gather, py::arg("table"), py::arg("row_ids"), py::arg("out"),
             py::arg("pool") = nullptr,
             "Pack the rows row_ids (n,) int64 of table (num_rows, ...) into out (n, ...).");
  module.def("scatter_rows", &scatter, py::arg("packed"), py::arg("row_ids"), py::arg("table"),
             py::arg("pool") = nullptr,
             "Write packed rows (n, ...) to the rows row_ids (n,) int64, ascending, of table.");
  module.def("find_nan", &nan_position, py::arg("array"),
             "Find the flat position of the first NaN of a contiguous float array, or -1.");
  module.def("crc32c", &checksum, py::arg("data"), py::arg("crc") = 0, py::arg("backend") = "best",
             "Compute the CRC32C of a bytes-like object, continuing from crc.");
  py::class_<SlotPool, std::shared_ptr<SlotPool>>(module, "SlotPool",
                                                  "A fixed number of page-aligned buffers.")
      .def(py::init<int, int64_t>(), py::kw_only(), py::arg("num_slots"), py::arg("slot_bytes"))
      .def_property_readonly("num_slots", &SlotPool::num_slots, "All slots.")
      .def_property_readonly("num_free", &SlotPool::num_free, "Slots that are not leased.")
      .def_property_readonly("slot_bytes", &SlotPool::slot_bytes, "Bytes of a slot.");
}

}  // namespace cpr_ext
