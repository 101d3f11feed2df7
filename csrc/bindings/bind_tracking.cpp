#include <pybind11/stl.h>

#include <optional>

#include "bindings/annotations.h"
#include "bindings/index_view.h"
#include "bindings/register.h"
#include "bindings/table_view.h"
#include "bindings/tensor_view.h"
#include "bindings/vector_array.h"
#include "core/error.h"
#include "core/stop_flag.h"
#include "tracking/access_counter.h"
#include "tracking/change_meter.h"
#include "tracking/count_lookups.h"
#include "tracking/dirty_rows.h"
#include "tracking/row_change.h"
#include "tracking/row_sampler.h"

namespace py = pybind11;

namespace cpr_ext {

namespace {

using Pool = std::shared_ptr<ThreadPool>;

RowRange range_of(const RowTracker& tracker, int64_t begin, std::optional<int64_t> end) {
  return {begin, end.value_or(tracker.num_rows())};
}

void observe(RowTracker& tracker, const ArrayLike& indices) {
  const Lookup lookup = view_indices(indices, tracker.name(), tracker.device());
  py::gil_scoped_release release;
  tracker.check(lookup);
  tracker.settle();
  tracker.observe(lookup);
}

void check(const RowTracker& tracker, const ArrayLike& indices) {
  const Lookup lookup = view_indices(indices, tracker.name(), tracker.device());
  py::gil_scoped_release release;
  tracker.check(lookup);
}

int64_t num_dirty(const RowTracker& tracker, int64_t begin, std::optional<int64_t> end) {
  py::gil_scoped_release release;
  return tracker.num_dirty(range_of(tracker, begin, end));
}

std::vector<int64_t> num_dirty_of(const std::vector<const RowTracker*>& trackers) {
  std::vector<TrackedRange> ranges;
  for (const RowTracker* tracker : trackers) ranges.push_back({tracker, {0, tracker->num_rows()}});
  py::gil_scoped_release release;
  return RowTracker::num_dirty_of(ranges);
}

bool are_clean(const std::vector<const RowTracker*>& trackers, const std::vector<int64_t>& begins,
               const std::vector<int64_t>& ends) {
  if (begins.size() != trackers.size() || ends.size() != trackers.size()) {
    throw UsageError("trackers, begins and ends must be equally many");
  }
  std::vector<TrackedRange> ranges;
  for (size_t i = 0; i < trackers.size(); ++i)
    ranges.push_back({trackers[i], {begins[i], ends[i]}});
  py::gil_scoped_release release;
  return RowTracker::are_clean(ranges);
}

bool is_clean(const RowTracker& tracker, int64_t begin, std::optional<int64_t> end) {
  py::gil_scoped_release release;
  return tracker.is_clean(range_of(tracker, begin, end));
}

py::array_t<int64_t> dirty_rows(const RowTracker& tracker, int64_t begin,
                                std::optional<int64_t> end) {
  RowIdVector row_ids;
  {
    py::gil_scoped_release release;
    row_ids = tracker.dirty_rows(range_of(tracker, begin, end));
  }
  return to_numpy(std::move(row_ids));
}

std::optional<py::array_t<int64_t>> select(const RowTracker& tracker, int64_t begin, int64_t end,
                                           int64_t k, const ArrayLike& weight, const Pool& pool,
                                           const StopFlag* stop) {
  const OptionalWeight now(weight, tracker);
  RowIdVector row_ids;
  try {
    py::gil_scoped_release release;
    const StopScope scope(stop);
    row_ids = tracker.select({begin, end}, k, now.get(), pool.get());
  } catch (const Stopped&) {
    return std::nullopt;
  }
  return to_numpy(std::move(row_ids));
}

TakenRows take(RowTracker& tracker, const ArrayLike& row_ids, const ArrayLike& weight,
               const Pool& pool) {
  const TensorView view = view_contiguous(row_ids, "row_ids", 1, {DType::kInt64});
  const OptionalWeight now(weight, tracker);
  py::gil_scoped_release release;
  return tracker.take({static_cast<const int64_t*>(view.data), view.shape[0]}, now.get(),
                      pool.get());
}

TakenRows take_chosen(RowTracker& tracker, const ArrayLike& row_ids,
                      std::shared_ptr<PendingRows> chosen, int64_t first, const ArrayLike& weight) {
  if (!chosen) throw UsageError("chosen is None");
  const TensorView view = view_contiguous(row_ids, "row_ids", 1, {DType::kInt64});
  const OptionalWeight now(weight, tracker);
  const int64_t count = view.shape[0];
  py::gil_scoped_release release;
  return tracker.take_chosen({std::move(chosen), first, count},
                             {static_cast<const int64_t*>(view.data), count}, now.get());
}

TakenRows take_range(RowTracker& tracker, int64_t begin, int64_t end, const ArrayLike& weight,
                     const Pool& pool) {
  const OptionalWeight now(weight, tracker);
  py::gil_scoped_release release;
  return tracker.take_range({begin, end}, now.get(), pool.get());
}

void put_back(RowTracker& tracker, TakenRows& taken) {
  py::gil_scoped_release release;
  tracker.put_back(taken);
}

void count_lookups_of(const SequenceOf<RowTracker>& trackers, const SequenceOf<ArrayLike>& indices,
                      const Pool& pool) {
  const size_t size = trackers.size();
  if (size != indices.size()) {
    throw UsageError("there are " + std::to_string(size) + " trackers but " +
                     std::to_string(indices.size()) + " index tensors; pass one for each");
  }
  std::vector<RowTracker*> targets(size);
  std::vector<Lookup> lookups(size);
  std::vector<py::object> alive(2 * size);  // another thread may change the lists meanwhile
  for (size_t i = 0; i < size; ++i) {
    alive[2 * i] = trackers[i];
    alive[2 * i + 1] = indices[i];
    try {
      targets[i] = alive[2 * i].cast<RowTracker*>();
    } catch (const py::cast_error&) {
      targets[i] = nullptr;
    }
    if (targets[i] == nullptr) {
      throw UsageError("trackers[" + std::to_string(i) + "] is a " +
                       std::string(py::str(py::type::of(alive[2 * i]).attr("__name__"))) +
                       "; allowed: AccessCounter, RowSampler, ChangeMeter, DirtyRows");
    }
    lookups[i] = view_indices(alive[2 * i + 1], targets[i]->name(), targets[i]->device());
  }
  py::gil_scoped_release release;
  for (const RowTracker* target : targets) target->settle();
  count_lookups(targets, lookups, pool.get());
}

void settle(const RowTracker& tracker) {
  py::gil_scoped_release release;
  tracker.settle();
}

const TakenRows& settled(TakenRows& taken) {
  py::gil_scoped_release release;
  taken.settle();
  return taken;
}

std::string describe(const RowTracker& tracker) {
  return std::string(tracker.kind()) + "(name='" + tracker.name() +
         "', num_rows=" + std::to_string(tracker.num_rows()) + ")";
}

void register_taken_rows(py::module_& module) {
  py::class_<TakenRows>(module, "TakenRows",
                        "The state that a tracker cleared when rows were captured; for put_back.")
      .def_property_readonly(
          "num_rows", [](TakenRows& taken) { return settled(taken).num_rows(); },
          "Number of them that were dirty.")
      .def_property_readonly(
          "row_ids", [](TakenRows& taken) { return to_numpy(RowIdVector(settled(taken).row_ids)); },
          "(num_rows) int64, ascending, a copy.")
      .def("__repr__", [](TakenRows& taken) {
        return "TakenRows(" + taken.kind + " '" + taken.tracker +
               "', num_rows=" + std::to_string(settled(taken).num_rows()) + ")";
      });
}

py::typing::Optional<PendingRows> begin_select(const RowTracker& tracker, int64_t begin,
                                               int64_t end, int64_t k, const ArrayLike& weight) {
  const OptionalWeight now(weight, tracker);
  std::shared_ptr<PendingRows> pending;
  {
    py::gil_scoped_release release;
    pending = tracker.begin_select({begin, end}, k, now.get());
  }
  return py::cast(std::move(pending));
}

py::array_t<int64_t> read_pending(PendingRows& pending) {
  RowIdVector row_ids;
  {
    py::gil_scoped_release release;
    row_ids = pending.read();
  }
  return to_numpy(std::move(row_ids));
}

void register_row_tracker(py::module_& module) {
  py::class_<RowTracker>(module, "RowTracker",
                         "Which rows of one table are dirty (looked up since last taken), and how\n"
                         "much each matters. Used by one thread at a time.")
      .def_property_readonly("name", &RowTracker::name, "Name of its table.")
      .def_property_readonly("num_rows", &RowTracker::num_rows, "Rows of its table.")
      .def_property_readonly(
          "device",
          [](const RowTracker& tracker) -> std::optional<int> {
            if (tracker.device() == kHostMemory) return std::nullopt;
            return tracker.device();
          },
          "Number of the CUDA device that its lookups must lie on; None: the CPU.")
      .def("report_faults", &RowTracker::report_faults,
           "Raise RowIndexError, once, if a device has found an index outside the table since\n"
           "the last call. Does not wait for the device.")
      .def("memory_bytes", &RowTracker::memory_bytes,
           "Return the bytes for this table, once all its rows are used.")
      .def("make_memory", &RowTracker::make_memory, py::call_guard<py::gil_scoped_release>(),
           "Have the system make memory now that it else makes when rows are first counted.\n\n"
           "No other call may run.")
      .def("check", &check, py::arg("indices"),
           "Raise RowIndexError for the first index outside the table.")
      .def("observe", &observe, py::arg("indices"),
           "Mark the rows dirty and add to their score.\n\n"
           "indices: int32 or int64, any shape, contiguous; torch (CPU) or numpy. Raises\n"
           "RowIndexError, with nothing changed, for an index outside the table.")
      .def("num_dirty", &num_dirty, py::arg("begin") = 0, py::arg("end") = py::none(),
           "Count the dirty rows in [begin, end); by default in the whole table.")
      .def("is_clean", &is_clean, py::arg("begin") = 0, py::arg("end") = py::none(),
           "Return True if no row of [begin, end) is dirty; stops at the first that is.")
      .def("dirty_rows", &dirty_rows, py::arg("begin") = 0, py::arg("end") = py::none(),
           "List the dirty rows in [begin, end): int64, ascending.")
      .def("select", &select, py::arg("begin"), py::arg("end"), py::arg("k"), py::kw_only(),
           py::arg("weight") = py::none(), py::arg("pool") = nullptr, py::arg("stop") = nullptr,
           "Select at most k dirty rows in [begin, end), highest score first, ties by lowest row "
           "id.\n\n"
           "weight: (num_rows, embedding_dim), as it is now; ChangeMeter needs it, others ignore\n"
           "it. Returns int64 row ids, ascending; the same for any number of threads. None: "
           "`stop`,\n"
           "a StopFlag that another thread may set, was set before the rows were found.")
      .def(
          "begin_select", &begin_select, py::arg("begin"), py::arg("end"), py::arg("k"),
          py::kw_only(), py::arg("weight") = py::none(),
          "Begin what select does, of a tracker on a device, without waiting for it. Returns None\n"
          "for a tracker on the CPU.")
      .def("take", &take, py::arg("row_ids"), py::kw_only(), py::arg("weight") = py::none(),
           py::arg("pool") = nullptr,
           "Clear the score and dirtiness of rows that have just been captured.\n\n"
           "row_ids: (n) int64, strictly ascending. Returns TakenRows for put_back.")
      .def("take_chosen", &take_chosen, py::arg("row_ids"), py::kw_only(), py::arg("chosen"),
           py::arg("first"), py::arg("weight") = py::none(),
           "Do what take does, with the ids that a device still has.\n\n"
           "chosen: what begin_select of this tracker returned, and read() has been called.\n"
           "first: position of row_ids[0] in what it returned; row_ids are the rows from there on.")
      .def("take_range", &take_range, py::arg("begin"), py::arg("end"), py::kw_only(),
           py::arg("weight") = py::none(), py::arg("pool") = nullptr,
           "Take every row in [begin, end).")
      .def("put_back", &put_back, py::arg("taken"),
           "Mark the rows of a failed save dirty again, and add their scores to those gathered\n"
           "since. Leaves `taken` empty.")
      .def("__repr__", &describe);
}

}  // namespace

void register_tracking(py::module_& module) {
  py::class_<StopFlag>(module, "StopFlag", "Asks work on another thread to return early.")
      .def(py::init<>())
      .def(
          "set", [](StopFlag& flag) { flag.value = true; }, "Ask.")
      .def(
          "clear", [](StopFlag& flag) { flag.value = false; }, "Withdraw the request.")
      .def(
          "is_set", [](const StopFlag& flag) { return flag.value.load(); },
          "Return True from set() until clear().");
  register_taken_rows(module);
  py::class_<PendingRows, std::shared_ptr<PendingRows>>(
      module, "PendingRows", "Rows that a device is selecting; it keeps their ids.")
      .def("is_ready", &PendingRows::is_ready, "Return True if read() need not wait.")
      .def("read", &read_pending, "Return the row ids: int64, ascending. Waits for the device.");
  register_row_tracker(module);
  py::class_<DirtyRows, RowTracker>(module, "DirtyRows",
                                    "One bit per row; every dirty row scores the same.")
      .def(py::init<std::string, int64_t>(), py::kw_only(), py::arg("name"), py::arg("num_rows"));
  py::class_<AccessCounter, RowTracker>(
      module, "AccessCounter",
      "MFU: how often each row was looked up; four bytes per row, saturating at 2**32 - 1.")
      .def(py::init<std::string, int64_t>(), py::kw_only(), py::arg("name"), py::arg("num_rows"))
      .def(
          "counts",
          [](const py::object& self) {
            const auto& counter = self.cast<const AccessCounter&>();
            settle(counter);
            py::array_t<uint32_t> view(counter.num_rows(), counter.counts(), self);
            view.attr("flags").attr("writeable") = false;
            return view;
          },
          "Return a read-only view (num_rows) uint32 of the live counts, keeping the counter "
          "alive.\n"
          "Those of later batches appear in it once a call has waited for them.")
      .def(
          "sum_counts",
          [](const AccessCounter& counter, int64_t begin, int64_t end) {
            py::gil_scoped_release release;
            return counter.sum_counts({begin, end});
          },
          py::arg("begin"), py::arg("end"), "Return the sum of the counts of rows [begin, end).");
  py::class_<RowSampler, RowTracker>(
      module, "RowSampler",
      "SSU: a bounded sample of the lookups; two bits per row and eight bytes per sampled row.")
      .def(py::init([](std::string name, int64_t num_rows, int64_t capacity, int64_t period,
                       uint64_t seed) {
             return std::make_unique<RowSampler>(std::move(name), num_rows,
                                                 SamplerOptions{capacity, period, seed});
           }),
           py::kw_only(), py::arg("name"), py::arg("num_rows"), py::arg("capacity"),
           py::arg("period") = SamplerOptions{}.period, py::arg("seed") = SamplerOptions{}.seed)
      .def_property_readonly(
          "capacity", [](const RowSampler& sampler) { return sampler.options().capacity; },
          "Most rows that the sample holds.")
      .def_property_readonly(
          "num_sampled",
          [](const RowSampler& sampler) {
            settle(sampler);
            return sampler.num_sampled();
          },
          "Rows in the sample.");
  py::class_<ChangeMeter, RowTracker>(
      module, "ChangeMeter",
      "SCAR: L2 change of each dirty row since last taken; holds one more copy of the weight.")
      .def(py::init([](std::string name, const ArrayLike& weight) {
             const WeightView view = view_weight(weight, name, kHostMemory);
             return std::make_unique<ChangeMeter>(std::move(name), view);
           }),
           py::kw_only(), py::arg("name"), py::arg("weight"));
  module.def("num_dirty_of", &num_dirty_of, py::arg("trackers"),
             "Count the dirty rows of each tracker; waits once for each device.");
  module.def("are_clean", &are_clean, py::arg("trackers"), py::arg("begins"), py::arg("ends"),
             "Check that no row [begins[i], ends[i]) of trackers[i] is dirty; waits once for each\n"
             "device.");
  module.def(
      "count_lookups", &count_lookups_of, py::arg("trackers"), py::arg("indices"),
      py::arg("pool") = nullptr,
      "Count a whole batch in one call: trackers[i] observes indices[i]; a tracker may occur\n"
      "more than once. All is checked before anything changes (RowIndexError, UsageError).\n\n"
      "indices: int32 or int64 each, any shape, contiguous; torch (CPU) or numpy.");
}

}  // namespace cpr_ext
