#include <pybind11/stl.h>

#include <chrono>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/annotations.h"
#include "bindings/path_view.h"
#include "bindings/register.h"
#include "bindings/segment_table.h"
#include "bindings/tensor_view.h"
#include "bindings/weight_view.h"
#include "core/error.h"
#include "core/process.h"
#include "core/stop_flag.h"
#include "pipeline/segment_restore.h"
#include "pipeline/snapshot_pipeline.h"
#include "scrub/row_hashes.h"
#include "tracking/captured_rows.h"

namespace py = pybind11;

namespace cpr_ext {
namespace {

JobState parse_state(const std::string& name) {
  if (name == "captured") return JobState::kCaptured;
  if (name == "written") return JobState::kWritten;
  if (name == "committed") return JobState::kCommitted;
  throw UsageError("state is '" + name + "'; allowed: captured, written, committed");
}

const char* state_name(JobState state) {
  switch (state) {
    case JobState::kCapturing:
      return "capturing";
    case JobState::kCaptured:
      return "captured";
    case JobState::kWritten:
      return "written";
    case JobState::kCommitted:
      return "committed";
    case JobState::kFailed:
      return "failed";
  }
  return "unknown";
}

// Of each chunk that has rounded rows.
std::vector<std::tuple<int, int64_t, int64_t, float>> rounding_of(
    const SegmentJob& job, const std::vector<Chunk>& chunks) {
  std::vector<std::tuple<int, int64_t, int64_t, float>> rounding;
  for (const Chunk& chunk : chunks) {
    if (!job.rounds(chunk.table)) continue;
    rounding.emplace_back(chunk.table, chunk.first, chunk.exact.count, chunk.largest_error);
  }
  return rounding;
}

std::vector<ChunkTuple> to_tuples(const std::vector<Chunk>& chunks) {
  std::vector<ChunkTuple> tuples;
  tuples.reserve(chunks.size());
  for (const Chunk& chunk : chunks) {
    tuples.emplace_back(chunk.table, chunk.first, chunk.count, chunk.step, chunk.checksums);
  }
  return tuples;
}

// A job together with its pipeline, which goes last, and the tensors it captures from.
struct Job {
  std::shared_ptr<SnapshotPipeline> pipeline;
  std::shared_ptr<SegmentJob> job;
  py::list owners;  // of each table
  py::object captured;
};

std::vector<int64_t> copy_before_write(Job& job,
                                       const std::vector<std::pair<int, ArrayLike>>& changing) {
  const int num_tables = static_cast<int>(job.owners.size());
  std::vector<ChangingRows> rows;
  for (const auto& [table, row_ids] : changing) {
    if (table < 0 || table >= num_tables) {
      throw UsageError("table is " + std::to_string(table) + "; there are " +
                       std::to_string(num_tables));
    }
    const TensorView view = view_contiguous(row_ids, "row_ids", 1, {DType::kInt64});
    rows.push_back({table, static_cast<const int64_t*>(view.data), view.shape[0]});
  }
  {
    py::gil_scoped_release release;
    job.job->copy_before_write(&rows);
  }
  std::vector<int64_t> done;
  for (const ChangingRows& each : rows) done.push_back(each.done);
  return done;
}

// The rows of a segment, with the tensors and trackers that they belong to. A job, which any thread
// may end, holds the rows alone.
struct Captured {
  std::shared_ptr<CapturedRows> rows = std::make_shared<CapturedRows>();
  py::list owners;
};

void add_table(Captured& captured, const SequenceOf<RowTracker>& trackers,
               const std::optional<ArrayLike>& weight, int64_t begin, int64_t end,
               const std::optional<ArrayLike>& row_ids, std::shared_ptr<PendingRows> chosen) {
  CapturedRows::Table table;
  table.range = {begin, end};
  for (const py::handle each : trackers) {
    auto* const tracker = each.cast<RowTracker*>();
    if (tracker == nullptr) throw UsageError("a tracker is None");
    table.trackers.push_back(tracker);
    if (tracker->needs_weight() && weight.has_value()) {
      table.weight = view_weight(*weight, tracker->name(), tracker->device());
    }
  }
  if (row_ids.has_value()) {
    const TensorView view = view_contiguous(*row_ids, "row_ids", 1, {DType::kInt64});
    table.row_ids = static_cast<const int64_t*>(view.data);
    table.num_rows = view.shape[0];
    table.chosen = std::move(chosen);
  }
  captured.owners.append(py::make_tuple(py::list(trackers), weight, row_ids));
  captured.rows->add_table(std::move(table));
}

// What is to record hashes of a table's rows: of the first arrays as they are captured, and of all
// as a restore would write them. Both may be null.
using TableHashes = std::tuple<std::shared_ptr<RowHashes>, int64_t, std::shared_ptr<HostRowHashes>>;

// Records hashes of captured rows, and has trackers forget them.
class RowObserver final : public CaptureObserver {
 public:
  RowObserver(const CapturePlan& plan, std::vector<TableHashes> hashes,
              std::shared_ptr<CapturedRows> taken, std::shared_ptr<ThreadPool> threads)
      : threads_(std::move(threads)),
        hashes_(std::move(hashes)),
        taken_(std::move(taken)),
        tables_(plan.tables),
        row_ids_(plan.row_ids) {
    const size_t num_tables = tables_.size();
    hashes_.resize(hashes_.empty() ? num_tables : hashes_.size());
    if (hashes_.size() != num_tables) {
      throw UsageError("there are " + std::to_string(num_tables) + " tables but hashes of " +
                       std::to_string(hashes_.size()));
    }
    if (taken_ != nullptr && taken_->num_tables() != static_cast<int>(num_tables)) {
      throw UsageError("there are " + std::to_string(num_tables) + " tables but trackers of " +
                       std::to_string(taken_->num_tables()));
    }
    for (size_t i = 0; i < num_tables; ++i) {
      const auto& [hashes, num_arrays, stored] = hashes_[i];
      arrays_.emplace_back();
      if (!hashes) continue;
      for (const SegmentArray& array : tables_[i].arrays) arrays_[i].push_back(array.rows);
      arrays_[i].resize(std::clamp<size_t>(num_arrays, 0, arrays_[i].size()));
      hashes->check_arrays(arrays_[i]);
    }
  }

  void captured(int table, int64_t first, int64_t count) override {
    if (const auto& hashes = std::get<0>(hashes_[table])) {
      if (!tables_[table].is_range()) {
        const RowIds row_ids{row_ids_[table]->data() + first, count};
        hashes->record(arrays_[table], row_ids, threads_.get());
      } else {
        const int64_t begin = tables_[table].range_begin + first;
        hashes->record_range(arrays_[table], {begin, begin + count}, threads_.get());
      }
    }
    if (taken_) taken_->take(table, first, count);
  }

  void captured_rows(int table, const RowIdVector& row_ids) override {
    const RowIds rows{row_ids.data(), static_cast<int64_t>(row_ids.size())};
    if (const auto& hashes = std::get<0>(hashes_[table])) {
      hashes->record(arrays_[table], rows, threads_.get());
    }
    if (taken_) taken_->take_rows(table, rows);
  }

  void copied_before_write(int table, const RowIdVector& row_ids) override {
    if (taken_) taken_->take_rows(table, {row_ids.data(), static_cast<int64_t>(row_ids.size())});
  }

  void captured_copies(int table, const CopiedRows& copies) override {
    const auto hashes = std::dynamic_pointer_cast<HostRowHashes>(std::get<0>(hashes_[table]));
    if (!hashes) return;
    RowHashes::Arrays arrays = copies.arrays;
    arrays.resize(arrays_[table].size());
    const RowIds row_ids{copies.row_ids.data(), static_cast<int64_t>(copies.row_ids.size())};
    hashes->record_as(arrays, row_ids, copies.positions.data());
  }

  void checked(const Chunk& chunk, const std::byte* slot) override {
    const auto& stored = std::get<2>(hashes_[chunk.table]);
    if (!stored) return;
    constexpr int64_t kRows = 1024;
    const SegmentTable& table = tables_[chunk.table];
    std::vector<std::byte> memory;
    RowIdVector range_ids;
    for (int64_t begin = 0; begin < chunk.count; begin += kRows) {
      const int64_t end = std::min(begin + kRows, chunk.count);
      const int64_t first = chunk.first + begin;
      if (table.is_range()) {
        range_ids.resize(end - begin);
        std::iota(range_ids.begin(), range_ids.end(), table.range_begin + first);
      }
      const int64_t* const row_ids =
          table.is_range() ? range_ids.data() : row_ids_[chunk.table]->data() + first;
      stored->record_as(restore_packed(table, chunk, slot, begin, end, &memory),
                        {row_ids, end - begin});
    }
  }

 private:
  const std::shared_ptr<ThreadPool> threads_;
  std::vector<TableHashes> hashes_;
  const std::shared_ptr<CapturedRows> taken_;
  const std::vector<SegmentTable> tables_;
  const std::vector<SharedRowIds> row_ids_;
  std::vector<RowHashes::Arrays> arrays_;
};

Job start(std::shared_ptr<SnapshotPipeline> pipeline, const std::filesystem::path& path,
          int64_t header_bytes, int64_t file_bytes, const std::vector<TableSpec*>& tables,
          bool direct_io, bool refuse_nan, int64_t max_chunk_bytes, bool copy_on_write,
          std::vector<TableHashes> hashes, const std::shared_ptr<Captured>& captured) {
  CapturePlan plan;
  plan.path = path.string();
  plan.header_bytes = header_bytes;
  plan.file_bytes = file_bytes;
  plan.direct_io = direct_io;
  plan.refuse_nan = refuse_nan;
  plan.max_chunk_bytes = max_chunk_bytes;
  plan.copy_on_write = copy_on_write;
  py::list owners;
  for (const TableSpec* spec : tables) {
    if (spec == nullptr) throw UsageError("a table is None");
    spec->require_rows_in_memory();
    if (!spec->table.is_range() && spec->row_ids == nullptr && spec->table.num_rows > 0) {
      throw UsageError("table '" + spec->table.name + "': row_ids are needed to capture its rows");
    }
    plan.tables.push_back(spec->table);
    plan.row_ids.push_back(spec->row_ids);
    owners.append(spec->owners);
  }
  check_layout(plan.tables, header_bytes, file_bytes);
  if (!hashes.empty() || captured) {
    plan.observer = std::make_shared<RowObserver>(
        plan, std::move(hashes), captured ? captured->rows : nullptr, pipeline->threads());
  }
  std::shared_ptr<SegmentJob> job = pipeline->start(std::move(plan));
  return Job{std::move(pipeline), std::move(job), owners, py::cast(captured)};
}

bool wait_for(const Job& job, const std::string& state, std::optional<double> timeout_seconds) {
  const JobState wanted = parse_state(state);
  const double seconds = timeout_seconds.value_or(std::numeric_limits<double>::infinity());
  // In slices: an infinite wait_for overflows its clock, and Ctrl-C must get through.
  for (double left = seconds; left > 0;) {
    const double slice = std::min(left, 0.2);
    {
      py::gil_scoped_release release;
      if (job.job->settle(wanted, std::chrono::duration<double>(slice))) break;
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    left -= slice;
  }
  py::gil_scoped_release release;
  return job.job->wait(wanted, std::chrono::duration<double>(0));
}

}  // namespace

void register_captured_rows(py::module_& module) {
  const auto call = [](void (CapturedRows::*act)()) {
    return [act](Captured& captured) {
      py::gil_scoped_release release;
      (*captured.rows.*act)();
    };
  };
  py::class_<Captured, std::shared_ptr<Captured>>(
      module, "CapturedRows",
      "The rows of a segment. Their trackers forget those that are captured, the moment they are,\n"
      "and get them back if the segment fails. Used by one thread at a time.")
      .def(py::init<>())
      .def("add_table", &add_table, py::kw_only(), py::arg("trackers"), py::arg("weight"),
           py::arg("begin"), py::arg("end"), py::arg("row_ids"), py::arg("chosen") = nullptr,
           "Add a table: its rows [begin, end), or `row_ids` (n,) int64 of them, ascending.\n\n"
           "weight: the table's, or None if no tracker needs it.\n"
           "chosen: has row_ids on a device; None: nothing has.")
      .def("take_all", call(&CapturedRows::take_all), "Have the trackers forget all rows.")
      .def("put_back", call(&CapturedRows::put_back), "Give the trackers back what they forgot.")
      .def(
          "forget",
          [](Captured& captured) {
            {
              py::gil_scoped_release release;
              captured.rows->forget();
            }
            captured.owners.attr("clear")();
          },
          "Free the memory: no rows will be put back.");
}

void register_pipeline(py::module_& module) {
  register_captured_rows(module);
  py::class_<Job>(module, "SegmentJob", "One segment on its way to disk.")
      .def(
          "capture",
          [](Job& job, int64_t step, int64_t max_bytes, bool wait_for_slot, const StopFlag* stop) {
            std::vector<Chunk> chunks;
            {
              py::gil_scoped_release release;
              chunks = job.job->capture(step, max_bytes, wait_for_slot,
                                        stop == nullptr ? nullptr : &stop->value);
            }
            return to_tuples(chunks);
          },
          py::kw_only(), py::arg("step"), py::arg("max_bytes") = 0,
          py::arg("wait_for_slot") = false, py::arg("stop") = nullptr,
          "Copy whole chunks into slots, about max_bytes of them (0: all), while slots are "
          "free.\n\n"
          "At least one chunk; then `stop` ends the call. Returns the captured chunks (table, "
          "first,\n"
          "count, step, checksums), their checksums not yet known.")
      .def("copy_before_write", &copy_before_write, py::arg("changing"),
           "Copy those rows that wait to be captured, before they change.\n\n"
           "changing: tables, each with the ids (n,) int64 of rows.\n\n"
           "Returns how many of the row ids of each are done; fewer than n if memory is full.")
      .def_property_readonly(
          "state", [](const Job& job) { return state_name(job.job->state()); },
          "capturing, captured, written, committed or failed.")
      .def("wait", &wait_for, py::arg("state"), py::arg("timeout_seconds") = py::none(),
           "Return True once `state` is reached, False at the time-out. Raises the job's first\n"
           "error.")
      .def(
          "chunks", [](const Job& job) { return to_tuples(job.job->chunks()); },
          "Return the captured chunks with their checksums; UsageError before all are written.")
      .def(
          "rounding", [](const Job& job) { return rounding_of(*job.job, job.job->chunks()); },
          "Return (table, first, exact rows, largest error) of each chunk of rounded rows.")
      .def(
          "finish",
          [](Job& job, const py::bytes& header) {
            const std::string bytes = header;
            py::gil_scoped_release release;
            job.job->finish(bytes);
          },
          py::arg("header"), "Write the header and sync the file.")
      .def(
          "mark_committed", [](Job& job) { job.job->mark_committed(); },
          "Record that a manifest names the segment; UsageError before finish().")
      .def(
          "cancel",
          [](Job& job, const py::str& reason) {
            const std::string text = text_from(reason);
            py::gil_scoped_release release;
            job.job->cancel(text);
          },
          py::arg("reason"),
          "Abort the job, from any thread; wait() returns when nothing of it is left.");
  py::class_<SnapshotPipeline, std::shared_ptr<SnapshotPipeline>>(
      module, "SnapshotPipeline", "Double-buffered writing of segments on a thread of its own.")
      .def(py::init([](int num_slots, int64_t slot_bytes, int64_t copy_on_write_bytes,
                       std::shared_ptr<ThreadPool> pool,
                       std::vector<std::shared_ptr<DeviceStager>> stagers) {
             return std::shared_ptr<SnapshotPipeline>(
                 new SnapshotPipeline(num_slots, slot_bytes, copy_on_write_bytes, std::move(pool),
                                      std::move(stagers)),
                 DeleteInCreator());
           }),
           py::kw_only(), py::arg("num_slots"), py::arg("slot_bytes"),
           py::arg("copy_on_write_bytes") = 0, py::arg("pool") = nullptr,
           py::arg("stagers") = std::vector<std::shared_ptr<DeviceStager>>())
      .def("start", &start, py::kw_only(), py::arg("path"), py::arg("header_bytes"),
           py::arg("file_bytes"), py::arg("tables"), py::arg("direct_io") = true,
           py::arg("refuse_nan") = true, py::arg("max_chunk_bytes") = 0,
           py::arg("copy_on_write") = false, py::arg("hashes") = std::vector<TableHashes>(),
           py::arg("captured") = nullptr,
           "Start a segment. Raises UsageError if the tables do not fit the slots or the file.\n\n"
           "hashes: of each table (hashes, n, stored). Captured rows are recorded in `hashes`, of\n"
           "their first n arrays, and in `stored` as a restore will write them; both may be None.\n"
           "captured: whose trackers forget rows as they are captured; None: no tracker does.")
      .def(
          "make_memory", [](SnapshotPipeline& pipeline) { pipeline.copy_arena().make_memory(); },
          py::call_guard<py::gil_scoped_release>(),
          "Have the system make the memory for copied rows now, not when rows are first copied.")
      .def_property_readonly(
          "copied_bytes",
          [](SnapshotPipeline& pipeline) { return pipeline.copy_arena().used_bytes(); },
          "Memory that rows copied before they changed take now.")
      .def(
          "start_log", [](SnapshotPipeline& pipeline) { pipeline.log().start(); },
          "Start to record when the checker and the writer work on a slot.")
      .def(
          "stop_log",
          [](SnapshotPipeline& pipeline) {
            std::vector<std::tuple<std::string, int64_t, int64_t>> spans;
            for (const WorkLog::WorkSpan& entry : pipeline.log().stop()) {
              spans.emplace_back(entry.what, entry.begin_ns, entry.end_ns);
            }
            return spans;
          },
          "Return the record: (\"check\" or \"write\", begin, end) in nanoseconds of\n"
          "time.perf_counter_ns(), in the order of their ends.")
      .def_property_readonly(
          "num_free_slots", [](SnapshotPipeline& pipeline) { return pipeline.slots().num_free(); },
          "Slots that hold no rows.")
      .def_property_readonly(
          "slot_bytes", [](SnapshotPipeline& pipeline) { return pipeline.slots().slot_bytes(); },
          "Bytes of a slot.");
}

}  // namespace cpr_ext
