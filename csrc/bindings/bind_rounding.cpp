#include <pybind11/stl.h>

#include <memory>
#include <optional>

#include "bindings/annotations.h"
#include "bindings/register.h"
#include "bindings/row_array_view.h"
#include "bindings/row_precision_name.h"
#include "bindings/tensor_view.h"
#include "core/error.h"
#include "staging/row_rounding.h"

namespace py = pybind11;

namespace cpr_ext {

RowPrecision parse_precision(const std::string& name) {
  if (name == "float32") return RowPrecision::kExact;
  if (name == "float16") return RowPrecision::kFloat16;
  if (name == "int8") return RowPrecision::kInt8;
  throw UsageError("precision is '" + name + "'; allowed: float32, float16, int8");
}

namespace {

// The rows of a float32 table, and the bytes that they have rounded.
struct Rounding {
  RowArray table;
  RowsOf rows;
  RowPrecision precision;
  std::byte* stored;
};

RowsOf checked_rows(const RowArray* table, const ArrayLike& row_ids) {
  const TensorView ids = view_contiguous(row_ids, "row_ids", 1, {DType::kInt64});
  const auto* first = static_cast<const int64_t*>(ids.data);
  for (int64_t i = 0; i < ids.shape[0]; ++i) {
    if (table->holds(first[i])) continue;
    throw RowIndexError("row_ids[" + std::to_string(i) + "] is " + std::to_string(first[i]) +
                        "; the table has " + std::to_string(table->num_rows) + " rows");
  }
  return {table, first, 0, ids.shape[0]};
}

// Without row ids: all rows of the table.
void check_rounding(const ArrayLike& table, const std::optional<ArrayLike>& row_ids,
                    const std::string& name, const ArrayLike& stored, Rounding* rounding) {
  rounding->table = view_rows(table, "table", 0);
  if (rounding->table.dtype != DType::kFloat32) throw UsageError("table is not float32");
  rounding->precision = parse_precision(name);
  if (rounding->precision == RowPrecision::kExact) throw UsageError("float32 rows are not rounded");
  rounding->rows = {&rounding->table, nullptr, 0, rounding->table.num_rows};
  if (row_ids) rounding->rows = checked_rows(&rounding->table, *row_ids);
  const TensorView bytes = view_contiguous(stored, "stored", 2, {DType::kUInt8});
  const int64_t wanted = stored_row_bytes(rounding->precision, rounding->table.row_bytes / 4);
  if (bytes.shape[0] != rounding->rows.count || bytes.shape[1] != wanted) {
    throw UsageError("stored has shape (" + std::to_string(bytes.shape[0]) + ", " +
                     std::to_string(bytes.shape[1]) + "); needed: (" +
                     std::to_string(rounding->rows.count) + ", " + std::to_string(wanted) + ")");
  }
  rounding->stored = static_cast<std::byte*>(bytes.data);
}

void round_rows(const ArrayLike& table, const std::optional<ArrayLike>& row_ids,
                const std::string& precision, const ArrayLike& stored, ThreadPool* pool) {
  Rounding rounding;
  check_rounding(table, row_ids, precision, stored, &rounding);
  if (!view_tensor(stored, "stored").writable) throw UsageError("stored is read-only");
  py::gil_scoped_release release;
  gather_rounded(rounding.rows, rounding.precision, rounding.stored, pool);
}

void restore_rows(const ArrayLike& stored, const ArrayLike& row_ids, const std::string& precision,
                  const ArrayLike& table, ThreadPool* pool) {
  Rounding rounding;
  check_rounding(table, row_ids, precision, stored, &rounding);
  if (!view_tensor(table, "table").writable) throw UsageError("table is read-only");
  for (int64_t i = 1; i < rounding.rows.count; ++i) {
    if (rounding.rows.row_ids[i] <= rounding.rows.row_ids[i - 1]) {
      throw UsageError("row_ids must ascend");
    }
  }
  py::gil_scoped_release release;
  scatter_rounded(rounding.stored, rounding.precision, rounding.rows, pool);
}

}  // namespace

void register_rounding(py::module_& module) {
  module.def(
      "round_rows", &round_rows, py::arg("table"), py::arg("row_ids"), py::arg("precision"),
      py::arg("stored"), py::arg("pool") = nullptr,
      "Pack rows of a float32 table, rounded, into stored (n, bytes) uint8; without row_ids\n"
      "all rows.");
  module.def("restore_rows", &restore_rows, py::arg("stored"), py::arg("row_ids"),
             py::arg("precision"), py::arg("table"), py::arg("pool") = nullptr,
             "Write rounded rows (n, bytes) uint8 to the rows row_ids, ascending, as float32.");
}

}  // namespace cpr_ext
