#include <pybind11/stl.h>

#include <chrono>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/annotations.h"
#include "bindings/path_view.h"
#include "bindings/register.h"
#include "bindings/segment_table.h"
#include "bindings/table_view.h"
#include "bindings/tensor_view.h"
#include "core/error.h"
#include "core/process.h"
#include "core/stop_flag.h"
#include "pipeline/segment_layout.h"
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

std::vector<ChunkTuple> to_tuples(const std::vector<Chunk>& chunks) {
  std::vector<ChunkTuple> tuples;
  tuples.reserve(chunks.size());
  for (const Chunk& chunk : chunks) {
    tuples.emplace_back(chunk.table, chunk.first, chunk.count, chunk.step, chunk.checksums);
  }
  return tuples;
}

std::unique_ptr<SegmentLayout> plan_segment(const std::vector<TableSpec*>& tables,
                                            std::string metadata, int64_t slot_bytes,
                                            int64_t max_chunk_bytes, int64_t block_bytes) {
  std::vector<PlannedTable> planned;
  for (TableSpec* spec : tables) {
    if (spec == nullptr) throw UsageError("a table is None");
    if (spec->text == nullptr) {
      throw UsageError("table '" + spec->table.name + "': describe() was not called");
    }
    planned.push_back({&spec->table, spec->text});
  }
  if (metadata.size() < 3 || metadata.back() != '}') {
    throw UsageError("metadata must be a JSON object that is not empty");
  }
  return std::make_unique<SegmentLayout>(planned, std::move(metadata), slot_bytes, max_chunk_bytes,
                                         block_bytes);
}

// A job together with its pipeline, which goes last, and the tensors it captures from.
struct Job {
  std::shared_ptr<SnapshotPipeline> pipeline;
  std::shared_ptr<SegmentJob> job;
  py::list owners;  // of each table
  py::object captured;
};

// What forgets rows of a table when they are captured, with the tensor that it needs for that.
struct TrackedTable {
  std::vector<RowTracker*> trackers;
  std::optional<WeightView> weight;
  py::tuple owners;

  TrackedTable(const SequenceOf<RowTracker>& all, const ArrayLike& of_table) {
    for (const py::handle each : all) {
      auto* const tracker = each.cast<RowTracker*>();
      if (tracker == nullptr) throw UsageError("a tracker is None");
      trackers.push_back(tracker);
      if (tracker->needs_weight() && !of_table.is_none()) {
        weight = view_weight(of_table, tracker->name(), tracker->device());
      }
    }
    owners = py::make_tuple(py::tuple(all), of_table);
  }
};

// The rows of a segment, with the tensors and trackers that they belong to. A job, which any thread
// may end, holds the rows alone.
struct Captured {
  std::shared_ptr<CapturedRows> rows = std::make_shared<CapturedRows>();
  std::vector<SharedRowIds> row_ids;
  py::list owners;
};

void add_tables(Captured& captured, const std::vector<const TrackedTable*>& tracked,
                const std::vector<const TableSpec*>& tables,
                const std::vector<std::shared_ptr<PendingRows>>& chosen) {
  if (tracked.size() != tables.size() || (!chosen.empty() && chosen.size() != tables.size())) {
    throw UsageError("tracked, tables and chosen must be equally many");
  }
  for (size_t i = 0; i < tables.size(); ++i) {
    if (tracked[i] == nullptr || tables[i] == nullptr) throw UsageError("a table is None");
    const SegmentTable& rows = tables[i]->table;
    CapturedRows::Table table;
    table.trackers = tracked[i]->trackers;
    table.weight = tracked[i]->weight;
    table.range = {rows.range_begin, rows.range_begin + rows.num_rows};
    if (tables[i]->row_ids != nullptr) {
      table.row_ids = tables[i]->row_ids->data();
      table.num_rows = rows.num_rows;
      if (!chosen.empty()) table.chosen = chosen[i];
      captured.row_ids.push_back(tables[i]->row_ids);
    }
    captured.owners.append(tracked[i]->owners);
    captured.rows->add_table(std::move(table));
  }
}

// What is to record hashes of a table's rows, of its first arrays; may be null.
using TableHashes = std::tuple<std::shared_ptr<RowHashes>, int64_t>;

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
      const auto& [hashes, num_arrays] = hashes_[i];
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
          bool direct_io, bool refuse_nan, int64_t max_chunk_bytes, std::vector<TableHashes> hashes,
          const std::shared_ptr<Captured>& captured) {
  CapturePlan plan;
  plan.path = path.string();
  plan.header_bytes = header_bytes;
  plan.file_bytes = file_bytes;
  plan.direct_io = direct_io;
  plan.refuse_nan = refuse_nan;
  plan.max_chunk_bytes = max_chunk_bytes;
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
  py::class_<TrackedTable>(module, "TrackedTable", "What forgets captured rows of a table.")
      .def(py::init<const SequenceOf<RowTracker>&, const ArrayLike&>(), py::arg("trackers"),
           py::arg("weight") = py::none(), "weight: the table's, or None if no tracker needs it.");
  py::class_<Captured, std::shared_ptr<Captured>>(
      module, "CapturedRows",
      "The rows of a segment. Their trackers forget those that are captured, the moment they are,\n"
      "and get them back if the segment fails. Used by one thread at a time.")
      .def(py::init<>())
      .def("add_tables", &add_tables, py::arg("tracked"), py::arg("tables"),
           py::arg("chosen") = std::vector<std::shared_ptr<PendingRows>>(),
           "Add the rows of a segment's tables, and who is to forget them.\n\n"
           "chosen: of each table what has its row ids on a device, or None; empty: of none.")
      .def("take_all", call(&CapturedRows::take_all), "Have the trackers forget all rows.")
      .def("put_back", call(&CapturedRows::put_back), "Give the trackers back what they forgot.")
      .def(
          "forget",
          [](Captured& captured) {
            {
              py::gil_scoped_release release;
              captured.rows->forget();
            }
            captured.row_ids.clear();
            captured.owners.attr("clear")();
          },
          "Free the memory: no rows will be put back.");
}

void register_pipeline(py::module_& module) {
  register_captured_rows(module);
  module.attr("SEGMENT_VERSION") = kSegmentVersion;
  module.attr("MAX_HEADER_BYTES") = kMaxHeaderBytes;
  py::class_<SegmentLayout>(module, "SegmentLayout",
                            "Where the tables of a new segment lie in its file.")
      .def(py::init(&plan_segment), py::kw_only(), py::arg("tables"), py::arg("metadata"),
           py::arg("slot_bytes"), py::arg("max_chunk_bytes") = 0, py::arg("block_bytes") = 0,
           "Set where each table lies, whose chunks go through slots of so many bytes.\n\n"
           "metadata: a JSON object. block_bytes: 0: the small one where padding would count.")
      .def_property_readonly("header_bytes", &SegmentLayout::header_bytes, "Size of the header.")
      .def_property_readonly("file_bytes", &SegmentLayout::file_bytes, "Size of the file.");
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
      .def_property_readonly(
          "state", [](const Job& job) { return state_name(job.job->state()); },
          "capturing, captured, written, committed or failed.")
      .def_property_readonly(
          "captured_bytes", [](const Job& job) { return job.job->captured_bytes(); },
          "Bytes that all captured chunks took in slots.")
      .def("wait", &wait_for, py::arg("state"), py::arg("timeout_seconds") = py::none(),
           "Return True once `state` is reached, False at the time-out. Raises the job's first\n"
           "error.")
      .def(
          "chunks", [](const Job& job) { return to_tuples(job.job->chunks()); },
          "Return the captured chunks with their checksums; UsageError before all are written.")
      .def(
          "header",
          [](const Job& job, const SegmentLayout& layout) {
            return py::bytes(layout.header(job.job->chunks()));
          },
          py::arg("layout"),
          "Return the header for finish(); UsageError before all rows are written.")
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
      .def(py::init([](int num_slots, int64_t slot_bytes, std::shared_ptr<ThreadPool> pool,
                       std::vector<std::shared_ptr<DeviceStager>> stagers) {
             return std::shared_ptr<SnapshotPipeline>(
                 new SnapshotPipeline(num_slots, slot_bytes, std::move(pool), std::move(stagers)),
                 DeleteInCreator());
           }),
           py::kw_only(), py::arg("num_slots"), py::arg("slot_bytes"), py::arg("pool") = nullptr,
           py::arg("stagers") = std::vector<std::shared_ptr<DeviceStager>>())
      .def("start", &start, py::kw_only(), py::arg("path"), py::arg("header_bytes"),
           py::arg("file_bytes"), py::arg("tables"), py::arg("direct_io") = true,
           py::arg("refuse_nan") = true, py::arg("max_chunk_bytes") = 0,
           py::arg("hashes") = std::vector<TableHashes>(), py::arg("captured") = nullptr,
           "Start a segment. Raises UsageError if the tables do not fit the slots or the file.\n\n"
           "hashes: of each table (hashes, n). Captured rows are recorded in `hashes`, of their\n"
           "first n arrays; it may be None.\n"
           "captured: whose trackers forget rows as they are captured; None: no tracker does.")
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
