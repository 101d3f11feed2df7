#include "bindings/segment_table.h"

#include <pybind11/stl.h>

#include "bindings/register.h"
#include "bindings/row_array_view.h"
#include "bindings/tensor_view.h"
#include "core/error.h"

namespace py = pybind11;

namespace cpr_ext {

TableSpec::TableSpec(std::string name, int64_t num_rows, int64_t row_ids_offset,
                     int64_t range_begin, const ArrayLike& ids) {
  table.name = std::move(name);
  table.num_rows = num_rows;
  table.row_ids_offset = row_ids_offset;
  table.range_begin = range_begin;
  check_table(table);
  if (!ids.is_none()) {
    const TensorView view = view_contiguous(ids, "row_ids", 1, {DType::kInt64});
    const auto* begin = static_cast<const int64_t*>(view.data);
    row_ids.assign(begin, begin + view.shape[0]);
    if (static_cast<int64_t>(row_ids.size()) != num_rows || table.is_range()) {
      throw UsageError("table '" + table.name + "': " + std::to_string(row_ids.size()) +
                       " row_ids for " + std::to_string(num_rows) + " rows");
    }
  }
}

void TableSpec::add_rows(std::string name, const ArrayLike& tensor, int64_t file_offset,
                         int64_t first_row_id, const std::shared_ptr<DeviceStager>& stager) {
  if (first_row_id < 0) throw UsageError(name + ": first_row_id must not be negative");
  const int device = stager == nullptr ? kHostMemory : stager->device();
  RowArray rows = view_rows(tensor, name.c_str(), first_row_id, device);
  rows.stager = stager.get();
  add({name, rows, file_offset}, tensor);
  owners.append(py::cast(stager));
}

void TableSpec::add_bytes(std::string name, const ArrayLike& tensor, int64_t file_offset,
                          bool check_nan) {
  const TensorView view = view_tensor(tensor, name.c_str());
  if (!view.is_contiguous()) throw UsageError(name + " is not contiguous");
  RowArray rows;
  rows.data = static_cast<std::byte*>(view.data);
  rows.num_rows = view.numel() * view.item_bytes;
  rows.row_bytes = 1;
  rows.row_stride_bytes = 1;
  rows.dtype = check_nan ? view.dtype : DType::kOther;
  add({name, rows, file_offset}, tensor);
}

void TableSpec::require_rows_in_memory() const {
  for (const SegmentArray& array : table.arrays) {
    const auto require = [&](int64_t row_id) {
      if (array.rows.holds(row_id)) return;
      throw RowIndexError("table '" + table.name + "', " + array.name + ": row " +
                          std::to_string(row_id) + " is not among the rows " +
                          std::to_string(array.rows.first_row_id) + " to " +
                          std::to_string(array.rows.first_row_id + array.rows.num_rows - 1));
    };
    if (table.is_range() && table.num_rows > 0) {
      require(table.range_begin);
      require(table.range_begin + table.num_rows - 1);
    }
    for (const int64_t row_id : row_ids) require(row_id);
  }
  for (size_t i = 1; i < row_ids.size(); ++i) {
    if (row_ids[i] > row_ids[i - 1]) continue;
    throw UsageError("table '" + table.name + "': row_ids must ascend");
  }
}

void TableSpec::add(SegmentArray array, const py::object& tensor) {
  const DeviceStager* stager = array.rows.stager;
  const int device = stager == nullptr ? kHostMemory : stager->device();
  if (!view_tensor(tensor, array.name.c_str(), device).writable) read_only = array.name;
  table.arrays.push_back(std::move(array));
  try {
    check_table(table);
  } catch (...) {
    table.arrays.pop_back();
    throw;
  }
  owners.append(tensor);
}

void register_segment_table(py::module_& module) {
  module.attr("ALIGNMENT") = kAlignment;
  py::class_<TableSpec>(module, "SegmentTable", "The rows of one table in a segment file.")
      .def(py::init<std::string, int64_t, int64_t, int64_t, const ArrayLike&>(), py::kw_only(),
           py::arg("name"), py::arg("num_rows"), py::arg("row_ids_offset") = -1,
           py::arg("range_begin") = 0, py::arg("row_ids") = py::none())
      .def("add_rows", &TableSpec::add_rows, py::arg("name"), py::arg("tensor"),
           py::arg("file_offset"), py::arg("first_row_id") = 0, py::arg("stager") = nullptr,
           "Add an array of rows.\n\n"
           "first_row_id: of the tensor's first row. stager: of the tensor's CUDA device; None: "
           "the\n"
           "tensor is on the CPU.")
      .def("add_bytes", &TableSpec::add_bytes, py::arg("name"), py::arg("tensor"),
           py::arg("file_offset"), py::arg("check_nan") = true,
           "Add a tensor that is not made of rows: one row per byte.")
      .def(
          "rows_per_chunk",
          [](const TableSpec& spec, int64_t slot_bytes, int64_t max_chunk_bytes) {
            return rows_per_chunk(spec.table, slot_bytes, max_chunk_bytes);
          },
          py::arg("slot_bytes"), py::arg("max_chunk_bytes") = 0,
          "Return the most rows of a chunk that keep every chunk aligned in the file.")
      .def(
          "chunk_bytes",
          [](const TableSpec& spec, int64_t count) {
            if (count < 0 || count > spec.table.num_rows) {
              throw UsageError("count is " + std::to_string(count) + "; the table has " +
                               std::to_string(spec.table.num_rows) + " rows");
            }
            return chunk_bytes(spec.table, count);
          },
          py::arg("count"), "Return the bytes of a chunk of `count` rows in a slot.");
}

}  // namespace cpr_ext
