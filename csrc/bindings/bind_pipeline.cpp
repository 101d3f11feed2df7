#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <chrono>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/index_view.h"
#include "bindings/register.h"
#include "bindings/row_array_view.h"
#include "bindings/tensor_view.h"
#include "core/error.h"
#include "core/process.h"
#include "pipeline/segment_restore.h"
#include "pipeline/snapshot_pipeline.h"

namespace py = pybind11;

namespace cpr_ext {
namespace {

// A table of a segment as Python describes it, with the tensors it points into.
struct TableSpec {
  SegmentTable table;
  std::vector<int64_t> row_ids;
  std::string read_only;  // name of an array that cannot be restored into
  py::list owners;

  TableSpec(std::string name, int64_t num_rows, int64_t row_ids_offset, int64_t range_begin,
            const py::object& ids) {
    table.name = std::move(name);
    table.num_rows = num_rows;
    table.row_ids_offset = row_ids_offset;
    table.range_begin = range_begin;
    check_table(table);
    if (!ids.is_none()) {
      const TensorView view = view_contiguous(ids, "row_ids", 1, {DType::kInt64});
      const auto* begin = static_cast<const int64_t*>(view.data);
      row_ids.assign(begin, begin + view.shape[0]);
      if (static_cast<int64_t>(row_ids.size()) != num_rows || table.is_range()) {
        throw UsageError("table '" + table.name + "': " + std::to_string(row_ids.size()) +
                         " row_ids for " + std::to_string(num_rows) + " rows");
      }
    }
  }

  void add(SegmentArray array, const py::object& tensor) {
    const DeviceStager* stager = array.rows.stager;
    const int device = stager == nullptr ? kHostMemory : stager->device();
    if (!view_tensor(tensor, array.name.c_str(), device).writable) read_only = array.name;
    table.arrays.push_back(std::move(array));
    try {
      check_table(table);
    } catch (...) {
      table.arrays.pop_back();
      throw;
    }
    owners.append(tensor);
  }

  void add_rows(std::string name, const py::object& tensor, int64_t file_offset,
                int64_t first_row_id, const std::shared_ptr<DeviceStager>& stager) {
    if (first_row_id < 0) throw UsageError(name + ": first_row_id must not be negative");
    const int device = stager == nullptr ? kHostMemory : stager->device();
    RowArray rows = view_rows(tensor, name.c_str(), first_row_id, device);
    rows.stager = stager.get();
    add({name, rows, file_offset}, tensor);
    owners.append(py::cast(stager));
  }

  // A tensor that is not made of rows (the dense part): one row per byte.
  void add_bytes(std::string name, const py::object& tensor, int64_t file_offset, bool check_nan) {
    const TensorView view = view_tensor(tensor, name.c_str());
    if (!view.is_contiguous()) throw UsageError(name + " is not contiguous");
    RowArray rows;
    rows.data = static_cast<std::byte*>(view.data);
    rows.num_rows = view.numel() * view.item_bytes;
    rows.row_bytes = 1;
    rows.row_stride_bytes = 1;
    rows.dtype = check_nan ? view.dtype : DType::kOther;
    add({name, rows, file_offset}, tensor);
  }

  // Every row of the segment lies in memory; `restore` rows come from the file and are checked
  // there.
  void require_rows_in_memory() const {
    for (const SegmentArray& array : table.arrays) {
      const auto require = [&](int64_t row_id) {
        if (array.rows.holds(row_id)) return;
        throw RowIndexError("table '" + table.name + "', " + array.name + ": row " +
                            std::to_string(row_id) + " is not among the rows " +
                            std::to_string(array.rows.first_row_id) + " to " +
                            std::to_string(array.rows.first_row_id + array.rows.num_rows - 1));
      };
      if (table.is_range() && table.num_rows > 0) {
        require(table.range_begin);
        require(table.range_begin + table.num_rows - 1);
      }
      for (const int64_t row_id : row_ids) require(row_id);
    }
    for (size_t i = 1; i < row_ids.size(); ++i) {
      if (row_ids[i] > row_ids[i - 1]) continue;
      throw UsageError("table '" + table.name + "': row_ids must ascend");
    }
  }
};

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

using ChunkTuple = std::tuple<int, int64_t, int64_t, int64_t, std::vector<uint32_t>>;

std::vector<ChunkTuple> to_tuples(const std::vector<Chunk>& chunks) {
  std::vector<ChunkTuple> tuples;
  tuples.reserve(chunks.size());
  for (const Chunk& chunk : chunks) {
    tuples.emplace_back(chunk.table, chunk.first, chunk.count, chunk.step, chunk.checksums);
  }
  return tuples;
}

// A job together with the tensors it captures from.
struct Job {
  std::shared_ptr<SegmentJob> job;
  py::list owners;
};

struct StopFlag {
  std::atomic<bool> value{false};
};

int64_t keep(Job& job, int table, const py::object& row_ids, int64_t first) {
  const int num_tables = static_cast<int>(job.owners.size());
  if (table < 0 || table >= num_tables) {
    throw UsageError("table is " + std::to_string(table) + "; there are " +
                     std::to_string(num_tables));
  }
  const Lookup rows = view_indices(row_ids, std::to_string(table));
  if (first < 0 || first > rows.num_indices) {
    throw UsageError("first is " + std::to_string(first) + " of " +
                     std::to_string(rows.num_indices) + " row ids");
  }
  py::gil_scoped_release release;
  return first + visit_indices(rows, [&](const auto* indices, int64_t count) {
           return job.job->keep(table, indices + first, count - first);
         });
}

Job start(SnapshotPipeline& pipeline, const std::string& path, int64_t header_bytes,
          int64_t file_bytes, const std::vector<TableSpec*>& tables, bool direct_io,
          bool refuse_nan, int64_t max_chunk_bytes, bool copy_on_write) {
  CapturePlan plan;
  plan.path = path;
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
    if (!spec->table.is_range() &&
        static_cast<int64_t>(spec->row_ids.size()) != spec->table.num_rows) {
      throw UsageError("table '" + spec->table.name + "': row_ids are needed to capture its rows");
    }
    plan.tables.push_back(spec->table);
    plan.row_ids.push_back(spec->row_ids);
    owners.append(spec->owners);
  }
  check_layout(plan.tables, header_bytes, file_bytes);
  return Job{pipeline.start(std::move(plan)), owners};
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

// What must live as long as a source: the tensors of its tables.
struct BoundSource {
  RestoreSource source;
  py::list owners;
};

BoundSource make_source(const std::string& path, const std::vector<TableSpec*>& tables,
                        const std::vector<std::pair<int64_t, int64_t>>& wanted,
                        const std::vector<ChunkTuple>& chunk_tuples) {
  if (wanted.size() != tables.size()) throw UsageError("one wanted range per table is needed");
  BoundSource bound;
  bound.source.path = path;
  for (size_t i = 0; i < tables.size(); ++i) {
    if (tables[i] == nullptr) throw UsageError("a table is None");
    if (!tables[i]->read_only.empty()) {
      throw UsageError("table '" + tables[i]->table.name + "', " + tables[i]->read_only +
                       " is read-only");
    }
    if (tables[i]->table.is_range()) tables[i]->require_rows_in_memory();
    bound.source.tables.push_back({tables[i]->table, wanted[i].first, wanted[i].second});
    bound.owners.append(tables[i]->owners);
  }
  for (const auto& [table, first, count, step, checksums] : chunk_tuples) {
    if (table < 0 || table >= static_cast<int>(tables.size())) {
      throw UsageError("a chunk names table " + std::to_string(table) + "; there are " +
                       std::to_string(tables.size()));
    }
    bound.source.chunks.push_back({table, first, count, step, checksums});
  }
  return bound;
}

py::dict report_of(const RestoreResult& result) {
  py::list damaged;
  for (const DamagedChunk& chunk : result.damaged) {
    py::object row_ids = py::none();
    if (chunk.row_ids_known) {
      row_ids = py::array_t<int64_t>(chunk.row_ids.size(), chunk.row_ids.data());
    }
    damaged.append(py::make_tuple(chunk.table, chunk.first, chunk.count, chunk.reason, row_ids));
  }
  py::dict report;
  report["rows_restored"] = result.rows_restored;
  report["damaged"] = damaged;
  report["bytes_read"] = result.bytes_read;
  return report;
}

// Lets Ctrl-C through, now and then.
class SignalPoll {
 public:
  void operator()() {
    const auto now = std::chrono::steady_clock::now();
    if (now - last_ < std::chrono::milliseconds(200)) return;
    last_ = now;
    py::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

py::list restore_all(const std::vector<BoundSource*>& bound, SlotPool& slots, ThreadPool* pool,
                     bool direct_io) {
  std::vector<RestoreSource> sources;
  for (const BoundSource* each : bound) {
    if (each == nullptr) throw UsageError("a source is None");
    for (const Chunk& chunk : each->source.chunks) {
      check_chunk(each->source.tables[chunk.table].table, chunk, slots.slot_bytes());
    }
    sources.push_back(each->source);
  }
  std::vector<RestoreResult> results;
  {
    py::gil_scoped_release release;
    results = restore_segments(sources, direct_io, slots, pool, SignalPoll());
  }
  py::list reports;
  for (const RestoreResult& result : results) reports.append(report_of(result));
  return reports;
}

py::object restore_one(const std::string& path, const std::vector<TableSpec*>& tables,
                       const std::vector<std::pair<int64_t, int64_t>>& wanted,
                       const std::vector<ChunkTuple>& chunks, SlotPool& slots, ThreadPool* pool,
                       bool direct_io) {
  BoundSource source = make_source(path, tables, wanted, chunks);
  return restore_all({&source}, slots, pool, direct_io)[0];
}

}  // namespace

void register_pipeline(py::module_& module) {
  module.attr("ALIGNMENT") = kAlignment;
  py::class_<TableSpec>(module, "SegmentTable", "The rows of one table in a segment file.")
      .def(py::init<std::string, int64_t, int64_t, int64_t, py::object>(), py::kw_only(),
           py::arg("name"), py::arg("num_rows"), py::arg("row_ids_offset") = -1,
           py::arg("range_begin") = 0, py::arg("row_ids") = py::none())
      .def("add_rows", &TableSpec::add_rows, py::arg("name"), py::arg("tensor"),
           py::arg("file_offset"), py::arg("first_row_id") = 0, py::arg("stager") = nullptr,
           "`stager`: of the CUDA device that the tensor lies on; None: the CPU.")
      .def("add_bytes", &TableSpec::add_bytes, py::arg("name"), py::arg("tensor"),
           py::arg("file_offset"), py::arg("check_nan") = true)
      .def(
          "rows_per_chunk",
          [](const TableSpec& spec, int64_t slot_bytes, int64_t max_chunk_bytes) {
            return rows_per_chunk(spec.table, slot_bytes, max_chunk_bytes);
          },
          py::arg("slot_bytes"), py::arg("max_chunk_bytes") = 0)
      .def("chunk_bytes", [](const TableSpec& spec, int64_t count) {
        if (count < 0 || count > spec.table.num_rows) {
          throw UsageError("count is " + std::to_string(count) + "; the table has " +
                           std::to_string(spec.table.num_rows) + " rows");
        }
        return chunk_bytes(spec.table, count);
      });
  py::class_<StopFlag>(module, "StopFlag", "Asks a capture on another thread to come back.")
      .def(py::init<>())
      .def("set", [](StopFlag& flag) { flag.value = true; })
      .def("clear", [](StopFlag& flag) { flag.value = false; })
      .def("is_set", [](const StopFlag& flag) { return flag.value.load(); });
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
          py::arg("wait_for_slot") = false, py::arg("stop") = nullptr)
      .def("keep", &keep, py::arg("table"), py::arg("row_ids"), py::arg("first") = 0,
           "Copy aside those of row_ids[first:] that wait to be captured, before they change.\n\n"
           "Returns how many of all row_ids are done; fewer than there are if memory is full.")
      .def_property_readonly("state", [](const Job& job) { return state_name(job.job->state()); })
      .def("wait", &wait_for, py::arg("state"), py::arg("timeout_seconds") = py::none(),
           "True once `state` is reached, False at the time-out; raises the job's first error.")
      .def("chunks", [](const Job& job) { return to_tuples(job.job->chunks()); })
      .def(
          "finish",
          [](Job& job, const std::string& header) {
            py::gil_scoped_release release;
            job.job->finish(header);
          },
          py::arg("header"), "Write the header (bytes) and sync the file.")
      .def("mark_committed", [](Job& job) { job.job->mark_committed(); })
      .def(
          "cancel",
          [](Job& job, const std::string& reason) {
            py::gil_scoped_release release;
            job.job->cancel(reason);
          },
          py::arg("reason"),
          "Give the job up, from any thread; wait() tells when nothing is left.");
  py::class_<SnapshotPipeline, std::shared_ptr<SnapshotPipeline>>(
      module, "SnapshotPipeline", "Double-buffered writing of segments on a thread of its own.")
      .def(py::init([](int num_slots, int64_t slot_bytes, int64_t keep_bytes,
                       std::shared_ptr<ThreadPool> pool,
                       std::vector<std::shared_ptr<DeviceStager>> stagers) {
             return std::shared_ptr<SnapshotPipeline>(
                 new SnapshotPipeline(num_slots, slot_bytes, keep_bytes, std::move(pool),
                                      std::move(stagers)),
                 DeleteInCreator());
           }),
           py::kw_only(), py::arg("num_slots"), py::arg("slot_bytes"), py::arg("keep_bytes") = 0,
           py::arg("pool") = nullptr,
           py::arg("stagers") = std::vector<std::shared_ptr<DeviceStager>>())
      .def("start", &start, py::keep_alive<0, 1>(), py::kw_only(), py::arg("path"),
           py::arg("header_bytes"), py::arg("file_bytes"), py::arg("tables"),
           py::arg("direct_io") = true, py::arg("refuse_nan") = true,
           py::arg("max_chunk_bytes") = 0, py::arg("copy_on_write") = false)
      .def_property_readonly(
          "kept_bytes",
          [](SnapshotPipeline& pipeline) { return pipeline.keep_arena().used_bytes(); },
          "Memory that rows copied aside take now.")
      .def(
          "start_log", [](SnapshotPipeline& pipeline) { pipeline.log().start(); },
          "From here on note when the checker and the writer work on a slot.")
      .def(
          "stop_log",
          [](SnapshotPipeline& pipeline) {
            std::vector<std::tuple<std::string, int64_t, int64_t>> told;
            for (const WorkLog::Entry& entry : pipeline.log().stop()) {
              told.emplace_back(entry.what, entry.begin_ns, entry.end_ns);
            }
            return told;
          },
          "What was noted: (\"check\" or \"write\", begin, end) in nanoseconds of\n"
          "time.perf_counter_ns(), in the order of their ends.")
      .def_property_readonly("num_free_slots",
                             [](SnapshotPipeline& pipeline) { return pipeline.slots().num_free(); })
      .def_property_readonly(
          "slot_bytes", [](SnapshotPipeline& pipeline) { return pipeline.slots().slot_bytes(); });
  py::class_<BoundSource>(module, "RestoreSource", "Chunks of a segment file, and their tables.")
      .def(py::init(&make_source), py::kw_only(), py::arg("path"), py::arg("tables"),
           py::arg("wanted"), py::arg("chunks"))
      .def_property_readonly("path", [](const BoundSource& bound) { return bound.source.path; });
  module.def("restore_segments", &restore_all, py::arg("sources"), py::kw_only(), py::arg("slots"),
             py::arg("pool") = nullptr, py::arg("direct_io") = true,
             "Read, verify and scatter chunks, of a row the last; per source rows_restored, "
             "damaged, bytes_read.");
  module.def("restore_segment", &restore_one, py::kw_only(), py::arg("path"), py::arg("tables"),
             py::arg("wanted"), py::arg("chunks"), py::arg("slots"), py::arg("pool") = nullptr,
             py::arg("direct_io") = true, "As restore_segments, of one source.");
}

}  // namespace cpr_ext
