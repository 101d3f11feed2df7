// Watches an optimizer's step: one call reads the gradients of all tables. A batch of 26 tables
// must cost microseconds here.
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/annotations.h"
#include "bindings/attributes.h"
#include "bindings/dlpack.h"
#include "bindings/index_view.h"
#include "bindings/register.h"
#include "bindings/tensor_view.h"
#include "core/error.h"
#include "core/process.h"
#include "tracking/background_counter.h"
#include "tracking/count_lookups.h"

namespace py = pybind11;

namespace cpr_ext {

namespace {

// torch's layout objects are unique and live as long as torch: their addresses are compared.
bool is_sparse_coo(py::handle tensor) {
  static PyObject* sparse_coo = nullptr;  // guarded by the GIL
  const py::object layout = attribute(tensor, names().layout);
  if (sparse_coo == nullptr) {
    sparse_coo = py::object(py::module_::import("torch").attr("sparse_coo")).release().ptr();
  }
  return layout.ptr() == sparse_coo;
}

// Counts the rows of sparse gradients, or of reported lookups, table by table.
class RowCounter {
 public:
  RowCounter(const SequenceOf<Tensor>& weights, const SequenceOf<SequenceOf<RowTracker>>& trackers,
             std::shared_ptr<ThreadPool> pool)
      : counter_(new BackgroundCounter(std::move(pool)), DeleteInCreator()) {
    for (size_t i = 0; i < weights.size(); ++i) {
      CountedTable table{weights[i], {}, {}};
      for (const py::handle tracker : trackers[i]) {
        table.kept_alive.push_back(py::reinterpret_borrow<py::object>(tracker));
        table.trackers.push_back(tracker.cast<RowTracker*>());
      }
      tables_.push_back(std::move(table));
    }
  }

  // The number of rows, the tables that have gradients, and those of them whose gradients must be
  // read in another way. kept: gets what devices will read; without it, their gradients are left.
  std::tuple<int64_t, std::vector<size_t>, std::vector<size_t>> count_gradients(
      const std::vector<size_t>& tables, std::optional<TensorList> kept) {
    int64_t num_rows = 0;
    std::vector<size_t> stepped;
    std::vector<size_t> left;
    stepped.reserve(tables.size());
    std::vector<py::object> kept_alive;
    Batch on_host(tables.size());
    Batch on_devices(kept ? tables.size() : 0);
    kept_alive.reserve(tables.size());
    for (const size_t index : tables) {
      const CountedTable& table = tables_.at(index);
      const py::object gradient = attribute(table.weight, names().grad);
      if (gradient.is_none()) continue;
      stepped.push_back(index);
      const int device = device_of(table.trackers);
      const bool is_on_host = device == kHostMemory;
      py::object indices;
      GradientRows rows;
      if (is_sparse_coo(gradient) && (is_on_host || (kept && device != kNoMemory))) {
        indices = call(gradient, names().indices);
        rows = rows_of(gradient, indices, device);
      }
      if (rows.size < 0) {
        left.push_back(index);
        continue;
      }
      num_rows += rows.size;
      Batch& batch = is_on_host ? on_host : on_devices;
      for (RowTracker* tracker : table.trackers) {
        batch.trackers.push_back(tracker);
        batch.lookups.push_back({rows.first, DType::kInt64, rows.size, device});
      }
      if (!is_on_host) kept->append(indices);
      kept_alive.push_back(std::move(indices));
    }
    count(on_host, on_devices);
    return {num_rows, stepped, left};
  }

  // Rows of tables, one tensor of row ids for each.
  void count_rows(const std::vector<size_t>& tables, const SequenceOf<ArrayLike>& rows) {
    if (tables.size() != rows.size()) {
      throw UsageError("there are " + std::to_string(tables.size()) + " tables but " +
                       std::to_string(rows.size()) + " tensors of row ids; pass one for each");
    }
    Batch on_host(tables.size());
    Batch on_devices(0);
    std::vector<py::object> kept_alive;  // another thread may change the list meanwhile
    kept_alive.reserve(tables.size());
    for (size_t i = 0; i < tables.size(); ++i) {
      kept_alive.push_back(rows[i]);
      for (RowTracker* tracker : tables_.at(tables[i]).trackers) {
        Batch& batch = tracker->device() == kHostMemory ? on_host : on_devices;
        batch.trackers.push_back(tracker);
        batch.lookups.push_back(view_indices(kept_alive[i], tracker->name(), tracker->device()));
      }
    }
    count(on_host, on_devices);
  }

  void wait() {
    py::gil_scoped_release release;
    counter_->wait();
  }

  std::optional<std::string> error() const { return counter_->error(); }

 private:
  struct CountedTable {
    py::object weight;
    std::vector<py::object> kept_alive;
    std::vector<RowTracker*> trackers;
  };

  struct Batch {
    explicit Batch(size_t num_tables) {
      trackers.reserve(2 * num_tables);
      lookups.reserve(2 * num_tables);
    }

    std::vector<RowTracker*> trackers;
    std::vector<Lookup> lookups;
  };

  void count(const Batch& on_host, const Batch& on_devices) {
    py::gil_scoped_release release;
    counter_->count(on_host.trackers, on_host.lookups);
    if (!on_devices.trackers.empty()) {
      count_lookups(on_devices.trackers, on_devices.lookups, nullptr);
    }
  }

  // Row ids, one after the other; a negative size: they are not so.
  struct GradientRows {
    const void* first = nullptr;
    int64_t size = -1;
  };

  // `indices` are (sparse dimensions, entries): the first row of them holds the rows of the table.
  static GradientRows rows_of(const py::object& gradient, const py::object& indices, int device) {
    DlpackView view;
    if (view_dlpack(indices, &view) && lies_on(view.memory, device) && view.ndim == 2 &&
        view.dtype == DType::kInt64) {
      if (!view.is_contiguous()) return {};
      return {view.data, view.shape[1]};
    }
    const bool is_on_host = attribute(gradient, names().is_cpu).ptr() == Py_True;
    if (!lies_on(is_on_host ? kHostMemory : memory_of(gradient), device)) return {};
    if (call(indices, names().is_contiguous).ptr() != Py_True) return {};
    return {reinterpret_cast<void*>(to_int64(call(indices, names().data_ptr))),
            to_int64(call(gradient, names().nnz))};
  }

  // kNoMemory: they are on several.
  static int device_of(const std::vector<RowTracker*>& trackers) {
    const int device = trackers.empty() ? kHostMemory : trackers.front()->device();
    for (const RowTracker* tracker : trackers) {
      if (tracker->device() != device) return kNoMemory;
    }
    return device;
  }

  std::vector<CountedTable> tables_;
  std::unique_ptr<BackgroundCounter, DeleteInCreator> counter_;  // first to go: it uses trackers
};

// The parameters of an optimizer's groups, as they were.
class ParameterLists {
 public:
  explicit ParameterLists(const ParameterGroups& groups) {
    for (const py::handle group : groups) {
      lists_.emplace_back();
      for (const py::handle parameter : group["params"]) {
        lists_.back().push_back(py::reinterpret_borrow<py::object>(parameter));
      }
    }
  }

  bool are_same(const ParameterGroups& groups) const {
    if (groups.size() != lists_.size()) return false;
    for (size_t i = 0; i < lists_.size(); ++i) {
      const py::object now = groups[i]["params"];
      if (!py::isinstance<py::list>(now)) return false;
      if (PyList_GET_SIZE(now.ptr()) != static_cast<Py_ssize_t>(lists_[i].size())) return false;
      for (size_t at = 0; at < lists_[i].size(); ++at) {
        const PyObject* parameter = PyList_GET_ITEM(now.ptr(), static_cast<Py_ssize_t>(at));
        if (parameter != lists_[i][at].ptr()) return false;
      }
    }
    return true;
  }

 private:
  // Kept alive, so that no other parameter can take the address of one.
  std::vector<std::vector<py::object>> lists_;
};

}  // namespace

void register_gradients(py::module_& module) {
  py::class_<RowCounter>(
      module, "RowCounter",
      "Counts rows of tables, such as those of sparse gradients, on a thread of its own. A\n"
      "tracker's calls wait for the rows that it was given.")
      .def(py::init<const SequenceOf<Tensor>&, const SequenceOf<SequenceOf<RowTracker>>&,
                    std::shared_ptr<ThreadPool>>(),
           py::arg("weights"), py::arg("trackers"), py::arg("pool") = nullptr,
           "weights: the tables' tensors; trackers: of each table, those that count its rows.")
      .def(
          "count_gradients", &RowCounter::count_gradients, py::arg("tables"),
          py::arg("kept") = std::nullopt,
          "Read the gradients of the tables at these positions.\n\n"
          "kept: gets the tensors that GPUs will read, for the caller to keep until then. Without\n"
          "it, gradients on GPUs are not read.\n\n"
          "Returns the number of their row ids, the positions of tables that have a gradient, and\n"
          "the positions of those whose gradient it cannot read: dense, not contiguous.\n"
          "Raises RowIndexError, with nothing counted, and the error that ended counting.")
      .def(
          "count_rows", &RowCounter::count_rows, py::arg("tables"), py::arg("rows"),
          "Count rows of the tables at these positions.\n\n"
          "rows: of each, int32 or int64 of any shape, contiguous, where the trackers are. Raises\n"
          "RowIndexError, with no row on the CPU counted, and the error that ended counting.")
      .def("wait", &RowCounter::wait,
           "Wait until all rows are counted.\n\nRaises the error that ended counting, each time.")
      .def_property_readonly("error", &RowCounter::error,
                             "The message of the error that ended counting, or None.");
  module.def("use_dlpack", &use_dlpack, py::arg("use"),
             "Let torch's DLPack exchange API read tensors, or not; for tests and measurements.\n\n"
             "Returns whether it does: torch 2.10 and later have it.");
  py::class_<ParameterLists>(module, "ParameterLists",
                             "The parameters of an optimizer's groups, as they were.")
      .def(py::init<const ParameterGroups&>(), py::arg("groups"))
      .def("are_same", &ParameterLists::are_same, py::arg("groups"),
           "Check that the groups hold the same parameters in the same order.");
}

}  // namespace cpr_ext
