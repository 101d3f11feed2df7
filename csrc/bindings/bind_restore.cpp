#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <vector>

#include "bindings/annotations.h"
#include "bindings/path_view.h"
#include "bindings/register.h"
#include "bindings/segment_table.h"
#include "core/error.h"
#include "pipeline/segment_restore.h"

namespace py = pybind11;

namespace cpr_ext {
namespace {

using Report = py::typing::Dict<py::str, py::object>;

// A source with the tensors of its tables, which it needs.
struct BoundSource {
  RestoreSource source;
  py::list owners;
};

BoundSource make_source(const std::filesystem::path& path, const std::vector<TableSpec*>& tables,
                        const std::vector<std::pair<int64_t, int64_t>>& wanted,
                        const std::vector<ChunkTuple>& chunk_tuples) {
  if (wanted.size() != tables.size()) throw UsageError("one wanted range per table is needed");
  BoundSource bound;
  bound.source.path = path.string();
  for (size_t i = 0; i < tables.size(); ++i) {
    if (tables[i] == nullptr) throw UsageError("a table is None");
    if (!tables[i]->read_only.empty()) {
      throw UsageError("table '" + tables[i]->table.name + "', " + tables[i]->read_only +
                       " is read-only");
    }
    if (tables[i]->table.is_range()) {
      tables[i]->require_rows_in_memory(wanted[i].first, wanted[i].second);
    }
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

Report report_of(const RestoreResult& result) {
  py::list damaged;
  for (const DamagedChunk& chunk : result.damaged) {
    py::object row_ids = py::none();
    if (chunk.row_ids_known) {
      row_ids = py::array_t<int64_t>(chunk.row_ids.size(), chunk.row_ids.data());
    }
    damaged.append(
        py::make_tuple(chunk.table, chunk.first, chunk.count, text_of(chunk.reason), row_ids));
  }
  Report report;
  report["rows_restored"] = result.rows_restored;
  report["damaged"] = damaged;
  report["bytes_read"] = result.bytes_read;
  return report;
}

using OnProgress = py::typing::Optional<py::typing::Callable<void(int64_t)>>;

// Lets Ctrl-C through and says how many bytes are read, every 200 ms.
class SignalPoll {
 public:
  explicit SignalPoll(const OnProgress& on_progress) : on_progress_(&on_progress) {}

  void operator()(int64_t bytes_read) {
    const auto now = std::chrono::steady_clock::now();
    if (now - last_ < std::chrono::milliseconds(200)) return;
    last_ = now;
    py::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (!on_progress_->is_none()) (*on_progress_)(bytes_read);
  }

 private:
  const OnProgress* on_progress_;  // lives longer: copies of this need no GIL
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

py::typing::List<Report> restore_all(const std::vector<BoundSource*>& bound, SlotPool& slots,
                                     ThreadPool* pool, bool direct_io,
                                     const std::vector<double>& pauses_seconds,
                                     const OnProgress& on_progress) {
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
    results =
        restore_segments(sources, direct_io, slots, pool, SignalPoll(on_progress), pauses_seconds);
  }
  py::typing::List<Report> reports;
  for (const RestoreResult& result : results) reports.append(report_of(result));
  return reports;
}

Report restore_one(const std::filesystem::path& path, const std::vector<TableSpec*>& tables,
                   const std::vector<std::pair<int64_t, int64_t>>& wanted,
                   const std::vector<ChunkTuple>& chunks, SlotPool& slots, ThreadPool* pool,
                   bool direct_io, const std::vector<double>& pauses_seconds) {
  BoundSource source = make_source(path, tables, wanted, chunks);
  return restore_all({&source}, slots, pool, direct_io, pauses_seconds, py::none())[0];
}

}  // namespace

void register_restore(py::module_& module) {
  py::class_<BoundSource>(module, "RestoreSource", "Chunks of a segment file, and their tables.")
      .def(py::init(&make_source), py::kw_only(), py::arg("path"), py::arg("tables"),
           py::arg("wanted"), py::arg("chunks"))
      .def_property_readonly(
          "path", [](const BoundSource& bound) { return text_of(bound.source.path); },
          "Path of the file.")
      .def_property_readonly(
          "slot_bytes",
          [](const BoundSource& bound) {
            int64_t most = 0;
            for (const Chunk& chunk : bound.source.chunks) {
              const SegmentTable& table = bound.source.tables[chunk.table].table;
              check_chunk(table, chunk, std::numeric_limits<int64_t>::max());
              most = std::max(most, chunk_bytes(table, chunk.count));
            }
            return most;
          },
          "Bytes that the largest of the chunks takes in a slot.");
  module.def("restore_segments", &restore_all, py::arg("sources"), py::kw_only(), py::arg("slots"),
             py::arg("pool") = nullptr, py::arg("direct_io") = true,
             py::arg("pauses_seconds") = std::vector<double>{}, py::arg("on_progress") = py::none(),
             "Read, verify and scatter chunks, of a row the last.\n\n"
             "Returns per source rows_restored, damaged and bytes_read. Raises\n"
             "StorageError for chunks that could not be read, after the pauses. on_progress gets\n"
             "the bytes read so far, at most five times a second.");
  module.def("restore_segment", &restore_one, py::kw_only(), py::arg("path"), py::arg("tables"),
             py::arg("wanted"), py::arg("chunks"), py::arg("slots"), py::arg("pool") = nullptr,
             py::arg("direct_io") = true, py::arg("pauses_seconds") = std::vector<double>{},
             "Restore one source; see restore_segments.");
}

}  // namespace cpr_ext
