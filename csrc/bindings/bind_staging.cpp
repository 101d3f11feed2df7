#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "bindings/annotations.h"
#include "bindings/register.h"
#include "bindings/table_view.h"
#include "bindings/tensor_view.h"
#include "core/crc32c.h"
#include "core/error.h"
#include "staging/device_stager.h"
#include "staging/find_nan.h"
#include "staging/row_copy.h"
#include "staging/row_rounding.h"
#include "staging/slot_pool.h"

namespace py = pybind11;

namespace cpr_ext {

namespace {

using Stager = std::shared_ptr<DeviceStager>;

void require_writable(py::handle tensor, const char* name) {
  if (!view_tensor(tensor, name).writable) throw UsageError(std::string(name) + " is read-only");
}

// Rows of an array of a table, and their bytes in the host's memory.
struct PackedRows {
  StagedArray array;
  StagedRows rows;
  std::byte* packed;

  PackedRows(const ArrayLike& table, const ArrayLike& row_ids, const ArrayLike& bytes,
             const std::string& precision, const Stager& stager) {
    array.rows = view_rows(table, "table", 0, stager ? stager->device() : kHostMemory);
    array.precision = parse_precision(precision);
    if (is_rounded() && array.rows.dtype != DType::kFloat32) {
      throw UsageError("table is not float32");
    }
    const TensorView ids = view_contiguous(row_ids, "row_ids", 1, {DType::kInt64});
    rows.row_ids = static_cast<const int64_t*>(ids.data);
    rows.count = ids.shape[0];
    const TensorView view = view_tensor(bytes, "packed");
    const int64_t size = view.numel() * view.item_bytes;
    if (!view.is_contiguous() || size != rows.count * array.packed_row_bytes()) {
      throw UsageError("packed has " + std::to_string(size) + " bytes; needed are " +
                       std::to_string(rows.count) + " contiguous rows of " +
                       std::to_string(array.packed_row_bytes()));
    }
    packed = static_cast<std::byte*>(view.data);
    const std::byte* end = array.rows.data + array.rows.num_rows * array.rows.row_stride_bytes;
    if (!stager && packed < end && packed + size > array.rows.data) {
      throw UsageError("packed shares memory with the table");
    }
  }

  bool is_rounded() const { return array.precision != RowPrecision::kExact; }
  RowsOf on_host() const { return {&array.rows, rows.row_ids, 0, rows.count}; }

  // Throws RowIndexError if the table lacks one of the rows [first, first + count).
  void check(int64_t first, int64_t count) const {
    bool holds_all = true;  // without a branch per row: copies wait for it
    for (int64_t i = first; i < first + count; ++i) holds_all &= array.rows.holds(rows.row_ids[i]);
    if (holds_all) return;
    while (array.rows.holds(rows.row_ids[first])) ++first;
    throw RowIndexError("row_ids[" + std::to_string(first) + "] is " +
                        std::to_string(rows.row_ids[first]) + "; the table has " +
                        std::to_string(array.rows.num_rows) + " rows");
  }
};

// A round at a time: the device gathers one while the ids of the next are checked. What was
// submitted is waited for also if a later id is bad.
void gather_from(DeviceStager& stager, const PackedRows& of) {
  const int64_t row_bytes = of.array.packed_row_bytes();
  const int64_t in_round =
      std::max<int64_t>(1, stager.buffer_bytes() / (row_bytes + int64_t{sizeof(int64_t)}));
  std::vector<std::unique_ptr<Arrival>> arrivals;
  for (int64_t first = 0; first < of.rows.count; first += in_round) {
    const int64_t count = std::min(in_round, of.rows.count - first);
    of.check(first, count);
    const StagedRows rows{of.rows.row_ids + first, 0, count};
    arrivals.push_back(stager.gather({of.array}, rows, of.packed + first * row_bytes));
  }
  for (const auto& arrival : arrivals) arrival->wait();
}

void gather(const ArrayLike& table, const ArrayLike& row_ids, const ArrayLike& out,
            ThreadPool* pool, const std::string& precision, const Stager& stager) {
  require_writable(out, "out");
  const PackedRows of(table, row_ids, out, precision, stager);
  py::gil_scoped_release release;
  if (stager) return gather_from(*stager, of);
  of.check(0, of.rows.count);
  if (of.is_rounded()) return gather_rounded(of.on_host(), of.array.precision, of.packed, pool);
  gather_rows(of.array.rows, of.rows.row_ids, of.rows.count, of.packed, pool);
}

void scatter(const ArrayLike& packed, const ArrayLike& row_ids, const ArrayLike& table,
             ThreadPool* pool, const std::string& precision, const Stager& stager) {
  const PackedRows of(table, row_ids, packed, precision, stager);
  if (!stager) require_writable(table, "table");
  const int64_t* const ids = of.rows.row_ids;
  of.check(0, of.rows.count);
  for (int64_t i = 1; !stager && i < of.rows.count; ++i) {
    if (ids[i] > ids[i - 1]) continue;
    throw UsageError("row_ids must ascend; row_ids[" + std::to_string(i) + "] is " +
                     std::to_string(ids[i]) + " after " + std::to_string(ids[i - 1]));
  }
  py::gil_scoped_release release;
  if (stager) return stager->scatter({of.array}, of.rows, of.packed)->wait();
  if (of.is_rounded()) return scatter_rounded(of.packed, of.array.precision, of.on_host(), pool);
  scatter_rows(of.packed, ids, of.rows.count, of.array.rows, pool);
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
  module.def(
      "gather_rows", &gather, py::arg("table"), py::arg("row_ids"), py::arg("out"),
      py::arg("pool") = nullptr, py::kw_only(), py::arg("precision") = "float32",
      py::arg("stager") = nullptr,
      "Pack the rows row_ids (n,) int64 of table (num_rows, ...) into out, n rows in the host's\n"
      "memory; waits until they are there.\n\n"
      "precision: of the packed rows, if the table is of float32. stager: of its CUDA device.");
  module.def(
      "scatter_rows", &scatter, py::arg("packed"), py::arg("row_ids"), py::arg("table"),
      py::arg("pool") = nullptr, py::kw_only(), py::arg("precision") = "float32",
      py::arg("stager") = nullptr,
      "Write packed rows to the rows row_ids (n,) int64 of table, ascending, or on a device\n"
      "distinct; waits. Options as of gather_rows.");
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
