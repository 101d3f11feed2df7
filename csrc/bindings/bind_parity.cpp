#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
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
#include "core/thread_pool.h"
#include "parity/row_delta.h"
#include "parity/shard_checksums.h"
#include "parity/shard_layout.h"

namespace py = pybind11;

namespace cpr_ext {
namespace {

constexpr int64_t kLastPlace = int64_t{1} << 60;  // no shard has a word there

// The words of a tensor (n,) int64.
struct Words {
  uint64_t* data;
  int64_t count;
};

Words view_words(py::handle tensor, const char* name, bool for_write) {
  const TensorView view = view_contiguous(tensor, name, 1, {DType::kInt64});
  if (for_write && !view.writable) throw UsageError(std::string(name) + " is read-only");
  return {static_cast<uint64_t*>(view.data), view.shape[0]};
}

// A layout, and the tensors whose memory it describes.
struct BoundLayout {
  std::shared_ptr<const ShardLayout> layout;
  py::list owners;
};

BoundLayout make_layout(const std::vector<std::vector<Tensor>>& tables) {
  BoundLayout bound;
  std::vector<std::vector<RowArray>> arrays;
  for (const std::vector<Tensor>& tensors : tables) {
    if (tensors.empty()) throw UsageError("a table has no arrays");
    arrays.emplace_back();
    for (const Tensor& tensor : tensors) {
      arrays.back().push_back(view_rows(tensor, "table", 0));
      if (arrays.back().back().num_rows != arrays.back().front().num_rows) {
        throw UsageError("the arrays of a table have different numbers of rows");
      }
      bound.owners.append(tensor);
    }
  }
  bound.layout = std::make_shared<const ShardLayout>(std::move(arrays));
  return bound;
}

void check_range(const ShardLayout& layout, int64_t begin, int64_t end) {
  if (begin < 0 || begin > end || end > layout.num_words()) {
    throw UsageError("words [" + std::to_string(begin) + ", " + std::to_string(end) +
                     ") of a shard of " + std::to_string(layout.num_words()));
  }
}

// As `words` must hold the words [begin, begin + n) of the shard.
Words view_range(const BoundLayout& bound, int64_t begin, py::handle words, bool for_write) {
  const Words view = view_words(words, "words", for_write);
  check_range(*bound.layout, begin, begin + view.count);
  return view;
}

void scatter_words(const BoundLayout& bound, const Tensor& places, const Tensor& words) {
  const Words at = view_words(places, "places", false);
  const Words from = view_words(words, "words", false);
  if (at.count == 0 ? from.count != 0 : from.count % at.count != 0) {
    throw UsageError(std::to_string(from.count) + " words for " + std::to_string(at.count) +
                     " places");
  }
  const int64_t width = at.count == 0 ? 0 : from.count / at.count;
  const auto* first = reinterpret_cast<const int64_t*>(at.data);
  for (int64_t i = 0; i < at.count; ++i) {
    check_range(*bound.layout, first[i], std::min(first[i], kLastPlace) + width);
  }
  py::gil_scoped_release release;
  for (int64_t i = 0; i < at.count; ++i) {
    bound.layout->write(first[i], first[i] + width, from.data + i * width);
  }
}

struct BoundDelta {
  RowDelta delta;
  std::shared_ptr<const ShardLayout> layout;
  py::list owners;
};

struct BoundChecksums {
  ShardChecksums checksums;
  std::shared_ptr<const ShardLayout> layout;
  py::list owners;
  std::shared_ptr<ThreadPool> pool;
};

BoundChecksums make_checksums(const BoundLayout& bound, int64_t max_blocks,
                              std::shared_ptr<ThreadPool> pool) {
  if (max_blocks < 1) throw UsageError("max_blocks is " + std::to_string(max_blocks));
  return {ShardChecksums(bound.layout, max_blocks), bound.layout, bound.owners, std::move(pool)};
}

void restore_checksums(BoundChecksums& bound, const Tensor& values) {
  const Words given = view_words(values, "values", false);
  const size_t count = bound.checksums.values().size();
  if (given.count != static_cast<int64_t>(count)) {
    throw UsageError(std::to_string(given.count) + " checksums; there are " +
                     std::to_string(count));
  }
  bound.checksums.restore(std::vector<uint64_t>(given.data, given.data + given.count));
}

std::vector<std::tuple<int64_t, int64_t, int64_t>> find_wrong_rows(const BoundChecksums& bound,
                                                                   int64_t begin,
                                                                   std::optional<int64_t> end) {
  const int64_t stop = end.value_or(bound.layout->num_words());
  check_range(*bound.layout, begin, stop);
  py::gil_scoped_release release;
  std::vector<std::tuple<int64_t, int64_t, int64_t>> wrong;
  for (const RowBlock& block : bound.checksums.find_wrong(*bound.pool, begin, stop)) {
    wrong.emplace_back(block.table, block.begin, block.end);
  }
  return wrong;
}

void require_open(const RowDelta& delta) {
  if (delta.is_finished()) throw UsageError("the delta's step is finished; clear() it first");
}

void note_rows(BoundDelta& bound, int64_t table, const Tensor& row_ids) {
  require_open(bound.delta);
  if (table < 0 || table >= static_cast<int64_t>(bound.layout->tables().size())) {
    throw UsageError("no table " + std::to_string(table));
  }
  const TensorView ids = view_contiguous(row_ids, "row_ids", 1, {DType::kInt64});
  py::gil_scoped_release release;
  bound.delta.note(table, static_cast<const int64_t*>(ids.data), ids.shape[0]);
}

// Words from each place on, as they were before the step, (places.shape[0], width).
py::array_t<int64_t> gather_before(const BoundDelta& bound, const Tensor& places, int64_t width,
                                   int64_t end) {
  const Words at = view_words(places, "places", false);
  const auto* first = reinterpret_cast<const int64_t*>(at.data);
  check_range(*bound.layout, 0, end);
  if (width < 1) throw UsageError("width is " + std::to_string(width));
  for (int64_t i = 0; i < at.count; ++i) {
    const bool is_apart = i == 0 || first[i] - first[i - 1] >= width;
    if (first[i] < 0 || first[i] > kLastPlace || !is_apart) {
      throw UsageError("place " + std::to_string(first[i]) +
                       " is out of range, or less than width after the one before");
    }
  }
  std::vector<uint64_t> words(at.count * width);
  {
    py::gil_scoped_release release;
    bound.delta.gather_before(first, at.count, width, end, words.data());
  }
  return to_numpy(std::move(words)).view("int64");
}

py::array_t<int64_t> pack_range(const BoundDelta& bound, int64_t begin, int64_t end) {
  check_range(*bound.layout, begin, end);
  if (!bound.delta.is_finished()) throw UsageError("the delta's step is not finished");
  std::vector<uint64_t> message;
  {
    py::gil_scoped_release release;
    message = bound.delta.pack(begin, end);
  }
  return to_numpy(std::move(message)).view("int64");
}

int64_t apply(const ArrayLike& message, const ArrayLike& parity) {
  const Words from = view_words(message, "message", false);
  const Words to = view_words(parity, "parity", true);
  if (from.data < to.data + to.count && to.data < from.data + from.count) {
    throw UsageError("message shares memory with parity");
  }
  py::gil_scoped_release release;
  return apply_message(from.data, from.count, to.data, to.count);
}

}  // namespace

void register_parity(py::module_& module) {
  py::class_<BoundLayout>(module, "ShardLayout",
                          "The rows of a worker as 64-bit words, weight and state side by side.\n\n"
                          "tables: for each the weight and its per-row states, (num_rows, ...).")
      .def(py::init(&make_layout), py::arg("tables"))
      .def_property_readonly("num_words",
                             [](const BoundLayout& bound) { return bound.layout->num_words(); })
      .def_property_readonly("records",
                             [](const BoundLayout& bound) {
                               std::vector<std::pair<int64_t, int64_t>> records;
                               for (const RecordTable& table : bound.layout->tables()) {
                                 records.emplace_back(table.num_rows, table.record_words);
                               }
                               return records;
                             })
      .def(
          "read",
          [](const BoundLayout& bound, int64_t begin, const Tensor& words) {
            const Words to = view_range(bound, begin, words, true);
            py::gil_scoped_release release;
            bound.layout->read(begin, begin + to.count, to.data);
          },
          py::arg("begin"), py::arg("words"), "Copy the shard's words from begin to words (n,).")
      .def(
          "write",
          [](const BoundLayout& bound, int64_t begin, const Tensor& words) {
            const Words from = view_range(bound, begin, words, false);
            py::gil_scoped_release release;
            bound.layout->write(begin, begin + from.count, from.data);
          },
          py::arg("begin"), py::arg("words"), "Overwrite the shard's words from begin on.")
      .def("scatter", &scatter_words, py::arg("places"), py::arg("words"),
           "Overwrite the shard's words from each of places (n,) int64 on; words are those of all\n"
           "places, one after the other, as many for each.");
  py::class_<BoundChecksums>(module, "ShardChecksums",
                             "Checksums of a shard's rows by blocks of rows, of which there are at "
                             "most max_blocks\nand one more for each table. All zero at first.")
      .def(py::init(&make_checksums), py::arg("layout"), py::kw_only(), py::arg("max_blocks"),
           py::arg("pool"))
      .def(
          "read",
          [](BoundChecksums& bound) {
            py::gil_scoped_release release;
            bound.checksums.read(*bound.pool);
          },
          "Take the rows as they are.")
      .def(
          "values",
          [](const BoundChecksums& bound) {
            return to_numpy(std::vector<uint64_t>(bound.checksums.values())).view("int64");
          },
          "Return a copy (n,) int64, for restore().")
      .def("restore", &restore_checksums, py::arg("values"), "Take values() of an earlier moment.")
      .def(
          "find_wrong_rows", &find_wrong_rows, py::arg("begin") = 0, py::arg("end") = py::none(),
          "Return (table, begin, end) of blocks with a row that no finish() and no read() saw; of\n"
          "those that end after the word begin of the shard, and not after end.");
  py::class_<BoundDelta>(module, "RowDelta", "The rows that one step changes, before XOR after it.")
      .def(py::init([](const BoundLayout& bound, int64_t max_bytes) {
             return BoundDelta{RowDelta(bound.layout, max_bytes), bound.layout, bound.owners};
           }),
           py::arg("layout"), py::kw_only(), py::arg("max_bytes"))
      .def("note", &note_rows, py::arg("table"), py::arg("row_ids"),
           "Keep rows (n,) int64, some perhaps repeated, that are about to change.")
      .def(
          "finish",
          [](BoundDelta& bound, BoundChecksums* checksums) {
            require_open(bound.delta);
            if (checksums != nullptr && checksums->layout != bound.layout) {
              throw UsageError("the checksums are of another layout than the delta");
            }
            py::gil_scoped_release release;
            bound.delta.finish(checksums == nullptr ? nullptr : &checksums->checksums);
          },
          py::arg("checksums") = nullptr,
          "The step is done: keep what it changed, also in the checksums of the same layout.")
      .def("gather_before", &gather_before, py::arg("places"), py::arg("width"), py::arg("end"),
           "Return the width words from each of places (n,) int64 on, as they were before the\n"
           "step, one after the other; zeros from the word end on. The places are ascending, and\n"
           "at least width apart. Rows that were noted may be changing meanwhile.")
      .def(
          "toggle",
          [](BoundDelta& bound) {
            if (!bound.delta.is_finished()) throw UsageError("the delta's step is not finished");
            py::gil_scoped_release release;
            bound.delta.toggle();
          },
          "Lead the rows back to before the step, and by the next call to after it.")
      .def(
          "undo",
          [](BoundDelta& bound) {
            py::gil_scoped_release release;
            bound.delta.undo();
          },
          "Put the rows back to before the step, and clear().")
      .def(
          "clear", [](BoundDelta& bound) { bound.delta.clear(); }, "Forget all; begin a step.")
      .def("pack", &pack_range, py::arg("begin"), py::arg("end"),
           "The rows in the words [begin, end), as an int64 message for apply_delta().")
      .def_property_readonly("is_finished",
                             [](const BoundDelta& bound) { return bound.delta.is_finished(); })
      .def_property_readonly("num_rows",
                             [](const BoundDelta& bound) { return bound.delta.num_rows(); })
      .def_property_readonly("num_bytes",
                             [](const BoundDelta& bound) { return bound.delta.num_bytes(); });
  module.def("apply_delta", &apply, py::arg("message"), py::arg("parity"),
             "XOR a message of RowDelta.pack() into parity (n,) int64; returns its rows. Applied\n"
             "again it takes itself back. Raises UsageError for a malformed one.");
}

}  // namespace cpr_ext
