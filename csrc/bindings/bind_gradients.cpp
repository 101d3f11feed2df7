// Watches an optimizer's step: one call reads the gradients of all tables, one the version counters
// of all tensors. A batch of 26 tables must cost microseconds here.
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/annotations.h"
#include "bindings/attributes.h"
#include "bindings/register.h"
#include "core/error.h"
#include "core/process.h"
#include "tracking/background_counter.h"

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

// Counts the rows of sparse gradients, table by table.
class GradientCounter {
 public:
  GradientCounter(const SequenceOf<Tensor>& weights,
                  const SequenceOf<SequenceOf<RowTracker>>& trackers,
                  std::shared_ptr<ThreadPool> pool)
      : counter_(new BackgroundCounter(std::move(pool)), DeleteInCreator()) {
    for (size_t i = 0; i < weights.size(); ++i) {
      Table table{weights[i], {}, {}};
      for (const py::handle tracker : trackers[i]) {
        table.kept_alive.push_back(py::reinterpret_borrow<py::object>(tracker));
        table.trackers.push_back(tracker.cast<RowTracker*>());
      }
      tables_.push_back(std::move(table));
    }
  }

  // The number of rows, the tables that have gradients, and those of them whose gradients must be
  // read in another way.
  std::tuple<int64_t, std::vector<size_t>, std::vector<size_t>> count(
      const std::vector<size_t>& tables) {
    int64_t num_rows = 0;
    std::vector<size_t> stepped;
    std::vector<size_t> left;
    stepped.reserve(tables.size());
    std::vector<py::object> kept_alive;
    std::vector<RowTracker*> trackers;
    std::vector<Lookup> lookups;
    kept_alive.reserve(tables.size());
    trackers.reserve(2 * tables.size());
    lookups.reserve(2 * tables.size());
    for (const size_t index : tables) {
      const Table& table = tables_.at(index);
      const py::object gradient = attribute(table.weight, names().grad);
      if (gradient.is_none()) continue;
      stepped.push_back(index);
      py::object indices;
      if (is_sparse_coo(gradient) && is_on_host(gradient, table)) {
        indices = call(gradient, names().indices);
      }
      if (!indices || call(indices, names().is_contiguous).ptr() != Py_True) {
        left.push_back(index);
        continue;
      }
      // (sparse dimensions, entries): the first row of them holds the rows of the table.
      const int64_t num_entries = to_int64(call(gradient, names().nnz));
      const auto* first = reinterpret_cast<void*>(to_int64(call(indices, names().data_ptr)));
      num_rows += num_entries;
      for (RowTracker* tracker : table.trackers) {
        trackers.push_back(tracker);
        lookups.push_back({first, DType::kInt64, num_entries, kHostMemory});
      }
      kept_alive.push_back(std::move(indices));
    }
    py::gil_scoped_release release;
    counter_->count(trackers, lookups);
    return {num_rows, stepped, left};
  }

  void wait() {
    py::gil_scoped_release release;
    counter_->wait();
  }

 private:
  struct Table {
    py::object weight;
    std::vector<py::object> kept_alive;
    std::vector<RowTracker*> trackers;
  };

  static bool is_on_host(const py::object& gradient, const Table& table) {
    for (const RowTracker* tracker : table.trackers) {
      if (tracker->device() != kHostMemory) return false;
    }
    return attribute(gradient, names().is_cpu).ptr() == Py_True;
  }

  std::vector<Table> tables_;
  std::unique_ptr<BackgroundCounter, DeleteInCreator> counter_;  // first to go: it uses trackers
};

// PyTorch's version counters of the tensors of some tables. Most optimizers write each tensor the
// same number of times in every step. Once a tensor has shown that, steps are not read but counted.
class TensorVersions {
 public:
  TensorVersions(const TensorList& tensors, const std::vector<size_t>& tables,
                 const std::vector<int64_t>& versions) {
    if (tensors.size() != tables.size() || tensors.size() != versions.size()) {
      throw UsageError("there are " + std::to_string(tensors.size()) + " tensors, " +
                       std::to_string(tables.size()) + " tables and " +
                       std::to_string(versions.size()) + " versions; pass one for each");
    }
    for (size_t i = 0; i < versions.size(); ++i) {
      entries_.push_back({tensors[i], tables[i], versions[i]});
    }
  }

  void accept() {
    for (TensorVersion& entry : entries_) entry.version = read(entry.tensor);
  }

  void accept_step(const std::vector<size_t>& stepped) {
    std::vector<bool> has_stepped;
    for (const size_t table : stepped) {
      if (table >= has_stepped.size()) has_stepped.resize(table + 1);
      has_stepped[table] = true;
    }
    for (TensorVersion& entry : entries_) {
      const bool is_changed = entry.table < has_stepped.size() && has_stepped[entry.table];
      if (!is_changed) continue;
      if (entry.is_steady()) {
        entry.version += entry.writes;
        continue;
      }
      const int64_t now = read(entry.tensor);
      const int64_t writes = now - entry.version;
      entry.num_alike = writes == entry.writes ? entry.num_alike + 1 : 1;
      entry.writes = writes;
      entry.version = now;
    }
  }

  bool are_same(bool unsteady_only) const {
    for (const TensorVersion& entry : entries_) {
      if (unsteady_only && entry.is_steady()) continue;
      if (read(entry.tensor) != entry.version) return false;
    }
    return true;
  }

  std::vector<int64_t> values() const {
    std::vector<int64_t> versions;
    for (const TensorVersion& entry : entries_) versions.push_back(entry.version);
    return versions;
  }

 private:
  static constexpr int kSteadySteps = 4;

  struct TensorVersion {
    py::object tensor;
    size_t table;
    int64_t version;     // as it should be now
    int64_t writes = 0;  // of the last step that was read
    int num_alike = 0;   // steps in a row with as many writes

    bool is_steady() const { return num_alike >= kSteadySteps; }
  };

  static int64_t read(const py::object& tensor) {
    return to_int64(attribute(tensor, names().version));
  }

  std::vector<TensorVersion> entries_;
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
  py::class_<GradientCounter>(
      module, "GradientCounter",
      "Counts the rows of the tables' sparse gradients on a thread of its own. A tracker's calls\n"
      "wait for the rows that it was given.")
      .def(py::init<const SequenceOf<Tensor>&, const SequenceOf<SequenceOf<RowTracker>>&,
                    std::shared_ptr<ThreadPool>>(),
           py::arg("weights"), py::arg("trackers"), py::arg("pool") = nullptr,
           "weights: the tables' tensors; trackers: of each table, those that count its rows.")
      .def(
          "count", &GradientCounter::count, py::arg("tables"),
          "Read the gradients of the tables at these positions.\n\n"
          "Returns the number of their row ids, the positions of tables that have a gradient, and\n"
          "the positions of those whose gradient it cannot read: dense, on a GPU, not contiguous.\n"
          "Raises RowIndexError, with nothing counted.")
      .def("wait", &GradientCounter::wait, "Wait until all rows are counted.");
  py::class_<TensorVersions>(module, "TensorVersions",
                             "PyTorch's version counters of tensors, as they are expected.")
      .def(py::init<const TensorList&, const std::vector<size_t>&, const std::vector<int64_t>&>(),
           py::arg("tensors"), py::arg("tables"), py::arg("versions"),
           "Each tensor with its table's position and its version.")
      .def("accept", &TensorVersions::accept, "Read them all.")
      .def("accept_step", &TensorVersions::accept_step, py::arg("stepped"),
           "Accept the writes of an optimizer to the tables at these positions.\n\n"
           "Reads their tensors' versions or, of a tensor that four steps have written equally\n"
           "often, adds that number.")
      .def("are_same", &TensorVersions::are_same, py::arg("unsteady_only") = false,
           "Compare with PyTorch's counters, of all or of those that accept_step() reads.")
      .def("values", &TensorVersions::values, "Return the expected versions.");
  py::class_<ParameterLists>(module, "ParameterLists",
                             "The parameters of an optimizer's groups, as they were.")
      .def(py::init<const ParameterGroups&>(), py::arg("groups"))
      .def("are_same", &ParameterLists::are_same, py::arg("groups"),
           "Check that the groups hold the same parameters in the same order.");
}

}  // namespace cpr_ext
