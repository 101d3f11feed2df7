#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/annotations.h"
#include "bindings/register.h"
#include "bindings/table_view.h"
#include "bindings/tensor_view.h"
#include "bindings/vector_array.h"
#include "core/error.h"
#include "scrub/row_hashes.h"

#if CPR_EXT_HAS_CUDA
#include "scrub/cuda/row_hashes.h"
#endif

namespace py = pybind11;

namespace cpr_ext {
namespace {

using Arrays = std::vector<ArrayLike>;
using ComparisonTuple = std::tuple<int64_t, int64_t, int64_t>;

std::vector<RowArray> view_arrays(const Arrays& arrays, int device = kHostMemory) {
  std::vector<RowArray> views;
  views.reserve(arrays.size());
  for (const ArrayLike& array : arrays) views.push_back(view_rows(array, "array", 0, device));
  return views;
}

RowIds view_row_ids(const ArrayLike& row_ids) {
  const TensorView view = view_contiguous(row_ids, "row_ids", 1, {DType::kInt64});
  return {static_cast<const int64_t*>(view.data), view.shape[0]};
}

ComparisonTuple to_tuple(const RowComparison& found) {
  return {found.changed_row, found.num_compared, found.num_unknown};
}

std::vector<ComparisonTuple> compare_changing_rows(
    const std::vector<std::shared_ptr<HostRowHashes>>& hashes, const std::vector<Arrays>& arrays,
    const std::vector<const RowTracker*>& trackers, const std::vector<ArrayLike>& row_ids,
    ThreadPool* pool) {
  if (arrays.size() != hashes.size() || trackers.size() != hashes.size() ||
      row_ids.size() != hashes.size()) {
    throw UsageError("each table needs its arrays, its tracker and its row ids");
  }
  std::vector<ChangingRows> tables;
  for (size_t i = 0; i < hashes.size(); ++i) {
    tables.push_back(
        {hashes[i].get(), view_arrays(arrays[i]), trackers[i], view_row_ids(row_ids[i])});
  }
  std::vector<ComparisonTuple> found;
  py::gil_scoped_release release;
  for (const RowComparison& each : compare_changing(tables, pool)) found.push_back(to_tuple(each));
  return found;
}

void register_host_hashes(py::module_& module) {
  py::class_<HostRowHashes, RowHashes, std::shared_ptr<HostRowHashes>>(
      module, "HostRowHashes", "Hashes of a table in the host's memory.")
      .def(py::init<std::string, int64_t>(), py::kw_only(), py::arg("name"), py::arg("num_rows"))
      .def(
          "values",
          [](const HostRowHashes& hashes, const ArrayLike& row_ids) {
            return to_numpy(hashes.values(view_row_ids(row_ids)));
          },
          py::arg("row_ids"), "Return the hashes (n,) of rows row_ids (n) int64; 0: not known.")
      .def(
          "compare",
          [](HostRowHashes& hashes, const Arrays& arrays, const RowTracker& tracker,
             const ArrayLike& row_ids) {
            const std::vector<RowArray> views = view_arrays(arrays);
            const RowIds ids = view_row_ids(row_ids);
            py::gil_scoped_release release;
            return to_tuple(hashes.compare(views, tracker, ids));
          },
          py::arg("arrays"), py::arg("tracker"), py::arg("row_ids"),
          "Compare those rows of row_ids (n) int64 that the tracker calls clean.\n\n"
          "Returns (the first row that differs, or -1; rows compared; clean rows whose hash is "
          "not\n"
          "known).")
      .def(
          "compare_range",
          [](HostRowHashes& hashes, const Arrays& arrays, const RowTracker& tracker, int64_t begin,
             int64_t end) {
            const std::vector<RowArray> views = view_arrays(arrays);
            py::gil_scoped_release release;
            return to_tuple(hashes.compare_range(views, tracker, {begin, end}));
          },
          py::arg("arrays"), py::arg("tracker"), py::arg("begin"), py::arg("end"),
          "Compare those rows of [begin, end) that the tracker calls clean, as compare does.");
  module.def("compare_changing", &compare_changing_rows, py::arg("hashes"), py::arg("arrays"),
             py::arg("trackers"), py::arg("row_ids"), py::arg("pool") = nullptr,
             "Compare the clean ones of rows (n) int64 of several tables, perhaps repeated, that\n"
             "are about to change, as HostRowHashes.compare does, and forget their hashes.\n\n"
             "Returns what compare does, of each table.");
}

#if CPR_EXT_HAS_CUDA
void register_device_hashes(py::module_& module) {
  py::class_<PendingComparison>(module, "PendingComparison", "A comparison that a device makes.")
      .def("is_ready", &PendingComparison::is_ready, "Return True if read() need not wait.")
      .def(
          "read",
          [](PendingComparison& pending) {
            py::gil_scoped_release release;
            return to_tuple(pending.read());
          },
          "Return what HostRowHashes.compare does; all rows were compared. Waits for the device.");
  py::class_<DeviceRowHashes, RowHashes, std::shared_ptr<DeviceRowHashes>>(
      module, "DeviceRowHashes",
      "Hashes of a table on a CUDA device, which compares them there. Only range_values waits.")
      .def(py::init<std::string, int64_t, int>(), py::kw_only(), py::arg("name"),
           py::arg("num_rows"), py::arg("device"))
      .def(
          "record_chosen",
          [](DeviceRowHashes& hashes, const Arrays& arrays, const PendingRows& chosen) {
            const std::vector<RowArray> views = view_arrays(arrays, hashes.device());
            py::gil_scoped_release release;
            hashes.record_chosen(views, chosen);
          },
          py::arg("arrays"), py::arg("chosen"),
          "Record rows that the table's tracker has chosen, and that were read.")
      .def(
          "begin_compare",
          [](DeviceRowHashes& hashes, const Arrays& arrays, const RowTracker& tracker,
             int64_t begin, int64_t end) {
            const std::vector<RowArray> views = view_arrays(arrays, hashes.device());
            py::gil_scoped_release release;
            return hashes.begin_compare(views, tracker, {begin, end});
          },
          py::arg("arrays"), py::arg("tracker"), py::arg("begin"), py::arg("end"),
          "Begin to compare the rows [begin, end) that the tracker calls clean.");
}
#endif

}  // namespace

void register_scrub(py::module_& module) {
  py::class_<RowHashes, std::shared_ptr<RowHashes>>(
      module, "RowHashes",
      "Two bytes per row of one table: a hash of it as it was last saved.\n\n"
      "arrays: what is hashed of a row, each (num_rows, ...), always in one order.")
      .def("memory_bytes", &RowHashes::memory_bytes, "Return the bytes for this table.")
      .def(
          "range_values",
          [](const RowHashes& hashes, int64_t begin, int64_t end) {
            std::vector<uint16_t> found;
            {
              py::gil_scoped_release release;
              found = hashes.range_values({begin, end});
            }
            return to_numpy(std::move(found));
          },
          py::arg("begin"), py::arg("end"),
          "Return the hashes of the rows [begin, end); 0: not known.")
      .def("make_memory", &RowHashes::make_memory, py::call_guard<py::gil_scoped_release>(),
           "Have the system make memory now that it else makes when rows are first recorded.\n\n"
           "No other call may run.")
      .def("forget", &RowHashes::forget, "Forget all hashes: rows may have any values.")
      .def(
          "record",
          [](RowHashes& hashes, const Arrays& arrays, const ArrayLike& row_ids, ThreadPool* pool) {
            const std::vector<RowArray> views = view_arrays(arrays, hashes.device());
            const RowIds ids = view_row_ids(row_ids);
            py::gil_scoped_release release;
            hashes.record(views, ids, pool);
          },
          py::arg("arrays"), py::arg("row_ids"), py::arg("pool") = nullptr,
          "Record the rows row_ids (n) int64 as they are now.")
      .def(
          "record_range",
          [](RowHashes& hashes, const Arrays& arrays, int64_t begin, int64_t end,
             ThreadPool* pool) {
            const std::vector<RowArray> views = view_arrays(arrays, hashes.device());
            py::gil_scoped_release release;
            hashes.record_range(views, {begin, end}, pool);
          },
          py::arg("arrays"), py::arg("begin"), py::arg("end"), py::arg("pool") = nullptr,
          "Record the rows [begin, end) as they are now.");
  register_host_hashes(module);
#if CPR_EXT_HAS_CUDA
  register_device_hashes(module);
#endif
}

}  // namespace cpr_ext
