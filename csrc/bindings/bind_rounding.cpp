#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <utility>

#include "bindings/annotations.h"
#include "bindings/register.h"
#include "bindings/row_array_view.h"
#include "bindings/row_precision_name.h"
#include "bindings/tensor_view.h"
#include "core/error.h"
#include "core/packed_row_ids.h"
#include "staging/row_rounding.h"

namespace py = pybind11;

namespace cpr_ext {

RowPrecision parse_precision(const std::string& name) {
  if (name == "float32") return RowPrecision::kExact;
  if (name == "float16") return RowPrecision::kFloat16;
  if (name == "bfloat16") return RowPrecision::kBFloat16;
  if (name == "int8") return RowPrecision::kInt8;
  if (name == "int4") return RowPrecision::kInt4;
  throw UsageError("precision is '" + name + "'; allowed: float32, float16, bfloat16, int8, int4");
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

std::pair<py::array_t<bool>, float> round_rows(const ArrayLike& table,
                                               const std::optional<ArrayLike>& row_ids,
                                               const std::string& precision,
                                               const ArrayLike& stored, ThreadPool* pool) {
  Rounding rounding;
  check_rounding(table, row_ids, precision, stored, &rounding);
  if (!view_tensor(stored, "stored").writable) throw UsageError("stored is read-only");
  py::array_t<bool> broken(rounding.rows.count);
  auto* flags = reinterpret_cast<uint8_t*>(broken.mutable_data());
  std::fill_n(flags, rounding.rows.count, uint8_t{0});
  py::gil_scoped_release release;
  const float error =
      gather_rounded(rounding.rows, rounding.precision, rounding.stored, flags, pool);
  return {std::move(broken), error};
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

RowIdRun run_of(int64_t count, int64_t first, int64_t last) {
  const RowIdRun run{count, first, last};
  if (!is_possible(run)) {
    throw UsageError("there are no " + std::to_string(count) + " row ids from " +
                     std::to_string(first) + " to " + std::to_string(last));
  }
  return run;
}

py::array_t<uint8_t> pack_ids(const ArrayLike& row_ids) {
  const TensorView ids = view_contiguous(row_ids, "row_ids", 1, {DType::kInt64});
  const auto* first = static_cast<const int64_t*>(ids.data);
  const int64_t count = ids.shape[0];
  if (count == 0) return py::array_t<uint8_t>(0);
  const RowIdRun run = run_of(count, first[0], first[count - 1]);
  for (int64_t i = 1; i < count; ++i) {
    if (first[i] <= first[i - 1]) throw UsageError("row_ids must ascend");
  }
  py::array_t<uint8_t> packed(packed_bytes(run));
  pack_row_ids(first, run, reinterpret_cast<std::byte*>(packed.mutable_data()));
  return packed;
}

std::optional<py::array_t<int64_t>> unpack_ids(const ArrayLike& packed, int64_t count,
                                               int64_t first, int64_t last) {
  const RowIdRun run = run_of(count, first, last);
  const TensorView bytes = view_contiguous(packed, "packed", 1, {DType::kUInt8});
  if (bytes.shape[0] != packed_bytes(run)) {
    throw UsageError("packed has " + std::to_string(bytes.shape[0]) + " bytes; needed are " +
                     std::to_string(packed_bytes(run)));
  }
  py::array_t<int64_t> ids(count);
  if (!unpack_row_ids(static_cast<const std::byte*>(bytes.data), run, ids.mutable_data())) {
    return std::nullopt;
  }
  return ids;
}

}  // namespace

void register_rounding(py::module_& module) {
  module.def(
      "round_rows", &round_rows, py::arg("table"), py::arg("row_ids"), py::arg("precision"),
      py::arg("stored"), py::arg("pool") = nullptr,
      "Pack rows of a float32 table, rounded, into stored (n, bytes) uint8; without row_ids\n"
      "all rows.\n\n"
      "Returns (n,) bool, which rows broke the bound and are zeros, and the largest error\n"
      "of the others.");
  module.def("restore_rows", &restore_rows, py::arg("stored"), py::arg("row_ids"),
             py::arg("precision"), py::arg("table"), py::arg("pool") = nullptr,
             "Write rounded rows (n, bytes) uint8 to the rows row_ids, ascending, as float32.");
  module.def("pack_row_ids", &pack_ids, py::arg("row_ids"),
             "Return ascending row ids (n,) int64 in few bits, by Elias and Fano.");
  module.def(
      "unpack_row_ids", &unpack_ids, py::arg("packed"), py::arg("count"), py::arg("first"),
      py::arg("last"),
      "Invert pack_row_ids() of `count` ids from `first` to `last`; None if it is not that.");
  module.def(
      "packed_row_id_bytes",
      [](int64_t count, int64_t first, int64_t last) {
        return packed_bytes(run_of(count, first, last));
      },
      py::arg("count"), py::arg("first"), py::arg("last"),
      "Return the bytes of `count` packed row ids from `first` to `last`.");
}

}  // namespace cpr_ext
