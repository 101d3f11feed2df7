// What tables consist of, and PyTorch's version counters of it: each write in place increments one.
// 26 tables are compared before and after each step of an optimizer, so that must cost
// microseconds.
#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "bindings/annotations.h"
#include "bindings/attributes.h"
#include "bindings/register.h"
#include "core/error.h"

namespace py = pybind11;

namespace cpr_ext {

namespace {

using TableList = py::typing::List<AnyTable>;
using RowStateCheck = py::typing::Callable<bool(py::ellipsis)>;

// Numbers of differences, for TableVersions of Python.
enum Difference : int { kNone, kWeightWritten, kOtherMemory, kStateReplaced, kStateWritten };

int64_t version_of(py::handle tensor) { return to_int64(attribute(tensor, names().version)); }

int64_t address_of(py::handle tensor) { return to_int64(call(tensor, names().data_ptr)); }

class TensorVersions {
 public:
  TensorVersions(size_t num_tables, RowStateCheck is_row_state)
      : tables_(num_tables), is_row_state_(std::move(is_row_state)) {}

  void read(const TableList& all, const std::vector<size_t>& tables) {
    CurrentTables scope(*this, all);
    for (const size_t index : tables) take(scope.at(index));
  }

  void accept(const TableList& all, const std::vector<size_t>& tables) {
    CurrentTables scope(*this, all);
    for (const size_t index : tables) {
      const Current now = scope.at(index);
      if (num_row_states(now) != now.watched->row_states.size()) {
        take(now);
      } else {
        read_versions(now.watched);
      }
    }
  }

  bool are_same(const TableList& all) {
    CurrentTables scope(*this, all);
    for (size_t index = 0; index < tables_.size(); ++index) {
      const Watched& watched = tables_[index];
      if (version_of(watched.weight) != watched.weight_version) return false;
      if (has_other_state(scope.at(index)) || has_written_state(watched)) return false;
    }
    return true;
  }

  bool have_same_tensors(const TableList& all) {
    CurrentTables scope(*this, all);
    for (size_t index = 0; index < tables_.size(); ++index) {
      if (has_other_state(scope.at(index))) return false;
    }
    return true;
  }

  bool has_other_state_at(const TableList& all, size_t table) {
    return has_other_state(CurrentTables(*this, all).at(table));
  }

  std::vector<std::pair<size_t, int>> differences(const TableList& all,
                                                  const std::vector<size_t>& tables) {
    CurrentTables scope(*this, all);
    std::vector<std::pair<size_t, int>> found;
    for (const size_t index : tables) {
      const Difference difference = difference_of(scope.at(index));
      if (difference != kNone) found.emplace_back(index, difference);
    }
    return found;
  }

 private:
  struct Value {
    py::object object;  // kept alive, so that no other can take its address
    bool is_row_state;
  };

  struct Versioned {
    py::object tensor;
    int64_t version;
  };

  struct Watched {
    py::object weight;
    int64_t weight_version = 0;
    int64_t address = 0;
    Py_ssize_t place = 0;       // where the optimizer's state has this weight's, as of PyDict_Next
    std::vector<Value> values;  // of that state, in order
    std::vector<Versioned> row_states;  // those of the values that have a value for each row
  };

  // A table as it was, and what its optimizer keeps of its weight now; null: nothing.
  struct Current {
    py::handle table;
    Watched* watched;
    py::object state;
  };

  // The tables during one call: this object does not keep them alive, as they may lead to it.
  class CurrentTables {
   public:
    CurrentTables(TensorVersions& versions, const TableList& all) : versions_(versions), all_(all) {
      if (all.size() != versions.tables_.size()) {
        throw UsageError("there are " + std::to_string(all.size()) + " tables, not " +
                         std::to_string(versions.tables_.size()));
      }
    }

    Current at(size_t index) {
      Watched& watched = versions_.tables_.at(index);
      const py::handle table = PyList_GET_ITEM(all_.ptr(), static_cast<Py_ssize_t>(index));
      if (!watched.weight) watched.weight = attribute(table, names().weight);
      return {table, &watched, state_of(table, &watched)};
    }

   private:
    py::object state_of(py::handle table, Watched* watched) {
      py::object optimizer = attribute(table, names().optimizer);
      if (optimizer.is_none()) return {};
      if (!optimizer.is(optimizer_)) {  // neighbouring tables have the same one
        states_ = attribute(optimizer, names().state);
        optimizer_ = std::move(optimizer);
      }
      if (!PyDict_Check(states_.ptr())) {
        py::object state = states_.attr("get")(watched->weight);
        return state.is_none() ? py::object() : state;
      }
      // Most times it is where it was; that asks no tensor for its hash, which is a call to Python.
      const py::handle weight = watched->weight;
      Py_ssize_t place = watched->place;
      PyObject *key = nullptr, *value = nullptr;
      if (PyDict_Next(states_.ptr(), &place, &key, &value) != 0 && weight.ptr() == key) {
        return py::reinterpret_borrow<py::object>(value);
      }
      PyObject* found = PyDict_GetItemWithError(states_.ptr(), weight.ptr());
      if (found == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
      auto state = py::reinterpret_borrow<py::object>(found);
      for (place = 0, key = nullptr; state && weight.ptr() != key;) {
        watched->place = place;
        if (PyDict_Next(states_.ptr(), &place, &key, &value) == 0) break;
      }
      return state;
    }

    TensorVersions& versions_;
    const TableList& all_;
    py::object optimizer_;
    py::object states_;
  };

  // Calls body(position, value) for each value of a state.
  template <class Body>
  static void visit_values(const py::object& state, Body&& body) {
    if (!state) return;
    size_t position = 0;
    if (PyDict_CheckExact(state.ptr())) {
      Py_ssize_t place = 0;
      PyObject *key = nullptr, *value = nullptr;
      while (PyDict_Next(state.ptr(), &place, &key, &value) != 0) body(position++, value);
      return;
    }
    for (const py::handle value : call(state, names().values)) body(position++, value);
  }

  bool is_row_state(const Current& now, size_t position, py::handle value) const {
    const std::vector<Value>& known = now.watched->values;
    if (position < known.size() && known[position].object.is(value)) {
      return known[position].is_row_state;
    }
    if (PyLong_Check(value.ptr()) || PyFloat_Check(value.ptr())) return false;  // such as a step
    return is_row_state_(value, attribute(now.table, names().num_embeddings)).cast<bool>();
  }

  size_t num_row_states(const Current& now) const {
    size_t number = 0;
    visit_values(now.state, [&](size_t position, py::handle value) {
      number += is_row_state(now, position, value);
    });
    return number;
  }

  void take(const Current& now) const {
    std::vector<Value> values;
    visit_values(now.state, [&](size_t position, py::handle value) {
      auto object = py::reinterpret_borrow<py::object>(value);
      const bool is_of_rows = is_row_state(now, position, object);
      values.push_back({std::move(object), is_of_rows});
    });
    Watched& watched = *now.watched;
    watched.values = std::move(values);
    watched.row_states.clear();
    for (const Value& value : watched.values) {
      if (value.is_row_state) watched.row_states.push_back({value.object, 0});
    }
    watched.address = address_of(watched.weight);
    read_versions(&watched);
  }

  static void read_versions(Watched* watched) {
    watched->weight_version = version_of(watched->weight);
    for (Versioned& each : watched->row_states) each.version = version_of(each.tensor);
  }

  bool has_other_state(const Current& now) const {
    const std::vector<Versioned>& then = now.watched->row_states;
    size_t number = 0;
    bool is_other = false;
    visit_values(now.state, [&](size_t position, py::handle value) {
      if (is_other || !is_row_state(now, position, value)) return;
      is_other = number >= then.size() || !then[number].tensor.is(value);
      ++number;
    });
    return is_other || number != then.size();
  }

  static bool has_written_state(const Watched& watched) {
    for (const Versioned& each : watched.row_states) {
      if (version_of(each.tensor) != each.version) return true;
    }
    return false;
  }

  Difference difference_of(const Current& now) const {
    const Watched& watched = *now.watched;
    if (version_of(watched.weight) != watched.weight_version) return kWeightWritten;
    if (address_of(watched.weight) != watched.address) return kOtherMemory;
    if (has_other_state(now)) return kStateReplaced;
    return has_written_state(watched) ? kStateWritten : kNone;
  }

  std::vector<Watched> tables_;
  RowStateCheck is_row_state_;
};

}  // namespace

void register_versions(py::module_& module) {
  py::class_<TensorVersions>(
      module, "TensorVersions",
      "The weights of tables and their optimizers' state by row, and PyTorch's version counters\n"
      "of both. Tables are given by their positions.")
      .def(py::init<size_t, RowStateCheck>(), py::arg("num_tables"), py::arg("is_row_state"),
           "is_row_state: called with a value of a state and the number of rows. Nothing is read\n"
           "yet. all, below: a cpr_ext.Table each, always the same ones.")
      .def("read", &TensorVersions::read, py::arg("all"), py::arg("tables"),
           "Take tables as they are now, whatever tensors they consist of.")
      .def("accept", &TensorVersions::accept, py::arg("all"), py::arg("tables"),
           "Read the versions of the tensors that tables had. One that another has replaced still\n"
           "differs. Tables with more or fewer of them are read.")
      .def("are_same", &TensorVersions::are_same, py::arg("all"),
           "Check that all consist of the same tensors, in the same versions.")
      .def("have_same_tensors", &TensorVersions::have_same_tensors, py::arg("all"),
           "Check that no tensor of a state was made, dropped or replaced.")
      .def("has_other_state", &TensorVersions::has_other_state_at, py::arg("all"), py::arg("table"),
           "Check whether one was in this table's state.")
      .def("differences", &TensorVersions::differences, py::arg("all"), py::arg("tables"),
           "Return the tables that differ, each with 1: weight written, 2: it has other memory,\n"
           "3: state replaced, 4: state written.");
}

}  // namespace cpr_ext
