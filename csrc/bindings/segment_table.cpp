#include "bindings/segment_table.h"

#include <pybind11/stl.h>

#include <algorithm>

#include "bindings/register.h"
#include "bindings/table_view.h"
#include "bindings/tensor_view.h"
#include "bindings/vector_array.h"
#include "core/error.h"

namespace py = pybind11;

namespace cpr_ext {

TableSpec::TableSpec(std::string name, int64_t num_rows, int64_t row_ids_offset,
                     int64_t range_begin, const ArrayLike& ids, bool is_packed,
                     int64_t block_bytes) {
  table.name = std::move(name);
  table.block_bytes = block_bytes;
  table.num_rows = num_rows;
  table.row_ids_offset = row_ids_offset;
  table.range_begin = range_begin;
  table.is_packed = is_packed;
  check_table(table);
  if (!ids.is_none()) {
    const TensorView view = view_contiguous(ids, "row_ids", 1, {DType::kInt64});
    if (view.shape[0] != num_rows || table.is_range()) {
      throw UsageError("table '" + table.name + "': " + std::to_string(view.shape[0]) +
                       " row_ids for " + std::to_string(num_rows) + " rows");
    }
    row_ids = share_row_ids(ids, static_cast<const int64_t*>(view.data), view.shape[0]);
  }
}

void TableSpec::add_rows(std::string name, const ArrayLike& tensor, int64_t file_offset,
                         int64_t first_row_id, const std::shared_ptr<DeviceStager>& stager,
                         const std::string& precision) {
  if (first_row_id < 0) throw UsageError(name + ": first_row_id must not be negative");
  const int device = stager == nullptr ? kHostMemory : stager->device();
  RowArray rows = view_rows(tensor, name.c_str(), first_row_id, device);
  rows.stager = stager.get();
  const RowPrecision stored = parse_precision(precision);
  if (stored != RowPrecision::kExact && rows.dtype != DType::kFloat32) {
    throw UsageError(name + ": only float32 rows can be " + precision + " in a file");
  }
  add({name, rows, file_offset, stored}, tensor);
  owners.append(py::cast(stager));
}

void TableSpec::describe(
    std::string name, std::string arrays,
    const std::vector<std::tuple<std::string, std::string, std::string>>& stored,
    const std::optional<std::string>& shape) {
  TableText described{
      std::move(name), std::move(arrays), shape.value_or(""), shape.has_value(), {}};
  for (const auto& [array, dtype, row_shape] : stored) {
    described.stored.push_back({array, dtype, row_shape});
  }
  if (described.stored.size() != 1 + table.arrays.size()) {
    throw UsageError("table '" + table.name + "': " + std::to_string(stored.size()) +
                     " texts for row_ids and " + std::to_string(table.arrays.size()) + " arrays");
  }
  text = std::make_shared<const TableText>(std::move(described));
}

TableSpec TableSpec::with_row_ids(const ArrayLike& ids) const {
  const TensorView view = view_contiguous(ids, "row_ids", 1, {DType::kInt64});
  TableSpec other = *this;
  other.table.num_rows = view.shape[0];
  other.table.row_ids_offset = 0;
  other.table.range_begin = 0;
  check_table(other.table);
  other.row_ids = share_row_ids(ids, static_cast<const int64_t*>(view.data), view.shape[0]);
  return other;
}

TableSpec TableSpec::with_range(int64_t begin, int64_t num_rows) const {
  TableSpec other = *this;
  other.table.num_rows = num_rows;
  other.table.row_ids_offset = -1;
  other.table.range_begin = begin;
  other.row_ids = nullptr;
  check_table(other.table);
  return other;
}

TableSpec TableSpec::in_file(int64_t num_rows, std::optional<int64_t> range_begin,
                             int64_t block_bytes) const {
  TableSpec other = *this;
  other.table.num_rows = num_rows;
  other.table.row_ids_offset = range_begin.has_value() ? -1 : 0;
  other.table.range_begin = range_begin.value_or(0);
  other.table.block_bytes = block_bytes;
  for (SegmentArray& array : other.table.arrays) array.file_offset = 0;
  check_table(other.table);
  return other;
}

void TableSpec::place(int64_t row_ids_offset, const std::vector<int64_t>& array_offsets) {
  if ((row_ids_offset < 0) != table.is_range() || array_offsets.size() != table.arrays.size()) {
    throw UsageError("table '" + table.name + "': " + std::to_string(array_offsets.size()) +
                     " offsets, row_ids at " + std::to_string(row_ids_offset) + ", for " +
                     std::to_string(table.arrays.size()) + " arrays of a " +
                     (table.is_range() ? "range" : "table with row_ids"));
  }
  SegmentTable placed = table;
  placed.row_ids_offset = row_ids_offset;
  for (size_t i = 0; i < array_offsets.size(); ++i) placed.arrays[i].file_offset = array_offsets[i];
  check_table(placed);
  table = std::move(placed);
}

void TableSpec::require_rows_in_memory(int64_t begin, int64_t end) const {
  if (row_ids != nullptr) {
    const RowIdVector& ids = *row_ids;
    bool ascend = true;
    for (size_t i = 1; i < ids.size(); ++i) ascend &= ids[i] > ids[i - 1];
    if (!ascend) throw UsageError("table '" + table.name + "': row_ids must ascend");
  }
  if (table.num_rows == 0) return;
  const int64_t last = table.num_rows - 1;
  int64_t first_row = table.range_begin, last_row = table.range_begin + last;
  if (row_ids != nullptr) first_row = row_ids->front(), last_row = row_ids->back();
  if (table.is_packed) first_row = 0, last_row = last;
  first_row = std::max(first_row, begin);
  last_row = std::min(last_row, end - 1);
  if (first_row > last_row) return;
  for (const SegmentArray& array : table.arrays) {
    for (const int64_t row_id : {first_row, last_row}) {
      if (array.rows.holds(row_id)) continue;
      throw RowIndexError("table '" + table.name + "', " + array.name + ": row " +
                          std::to_string(row_id) + " is not among the rows " +
                          std::to_string(array.rows.first_row_id) + " to " +
                          std::to_string(array.rows.first_row_id + array.rows.num_rows - 1));
    }
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
  module.attr("SMALL_BLOCK") = kSmallBlock;
  py::class_<TableSpec>(module, "SegmentTable", "The rows of one table in a segment file.")
      .def(
          py::init<std::string, int64_t, int64_t, int64_t, const ArrayLike&, bool, int64_t>(),
          py::kw_only(), py::arg("name"), py::arg("num_rows"), py::arg("row_ids_offset") = -1,
          py::arg("range_begin") = 0, py::arg("row_ids") = py::none(), py::arg("is_packed") = false,
          py::arg("block_bytes") = kAlignment,
          "row_ids: (num_rows,) int64, ascending, not changed from now on. is_packed: the tensors\n"
          "are copies of these rows alone, in this order; those on a device were settled, see\n"
          "DeviceStager.settle. block_bytes: of the segment.")
      .def("add_rows", &TableSpec::add_rows, py::arg("name"), py::arg("tensor"),
           py::arg("file_offset"), py::arg("first_row_id") = 0, py::arg("stager") = nullptr,
           py::arg("precision") = "float32",
           "Add an array of rows.\n\n"
           "first_row_id: of the tensor's first row. stager: of the tensor's CUDA device; None: "
           "the\n"
           "tensor is on the CPU. precision: of the float32 rows in the file.")
      .def("in_file", &TableSpec::in_file, py::arg("num_rows"), py::arg("range_begin"),
           py::arg("block_bytes"),
           "Return the table with the rows of a file, for place(). range_begin: None: its row ids\n"
           "are in the file.")
      .def("describe", &TableSpec::describe, py::arg("name"), py::arg("arrays"), py::arg("stored"),
           py::arg("shape") = py::none(),
           "Set what the header of a new segment says of the table.\n\n"
           "name: a JSON text. arrays: one that describes the rows. stored: of row_ids and each\n"
           "array the name (a JSON text), the dtype in safetensors, and the shape of a row\n"
           "(',2,3'). shape: of a tensor that is no table ('2,3').")
      .def("with_row_ids", &TableSpec::with_row_ids, py::arg("row_ids"),
           "Return the table with other rows: (n,) int64, ascending, not changed from now on.")
      .def("with_range", &TableSpec::with_range, py::arg("begin"), py::arg("num_rows"),
           "Return the table with other rows: so many from `begin` on.")
      .def("place", &TableSpec::place, py::arg("row_ids_offset"), py::arg("array_offsets"),
           "Set where in the file the row ids (-1: a range) and the arrays begin.")
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
          py::arg("count"), "Return the bytes that a chunk of `count` rows takes in a slot.");
}

}  // namespace cpr_ext
