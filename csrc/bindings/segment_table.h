// A table of a segment as Python describes it, for capturing it and for restoring it.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/annotations.h"
#include "core/row_id_vector.h"
#include "pipeline/segment_layout.h"
#include "pipeline/segment_plan.h"
#include "staging/device_stager.h"

namespace cpr_ext {

// (table, first, count, step, checksums): a Chunk
using ChunkTuple = std::tuple<int, int64_t, int64_t, int64_t, std::vector<uint32_t>>;

// The table, with the tensors it points into.
struct TableSpec {
  SegmentTable table;
  SharedRowIds row_ids;                   // null: none were given
  std::shared_ptr<const TableText> text;  // null: it was not described
  std::string read_only;                  // name of an array that cannot be restored into
  pybind11::list owners;

  TableSpec(std::string name, int64_t num_rows, int64_t row_ids_offset, int64_t range_begin,
            const ArrayLike& ids, bool is_packed, int64_t block_bytes);

  void add_rows(std::string name, const ArrayLike& tensor, int64_t file_offset,
                int64_t first_row_id, const std::shared_ptr<DeviceStager>& stager,
                const std::string& precision);

  // What the header of a segment says of it.
  void describe(std::string name, std::string arrays,
                const std::vector<std::tuple<std::string, std::string, std::string>>& stored,
                const std::optional<std::string>& shape);

  // The same table with other rows: row_ids (n,) int64, or the range of num_rows rows from
  // range_begin on.
  TableSpec with_row_ids(const ArrayLike& ids) const;
  TableSpec with_range(int64_t begin, int64_t num_rows) const;

  // The same table as a file has it; place() comes next.
  TableSpec in_file(int64_t num_rows, std::optional<int64_t> range_begin,
                    int64_t block_bytes) const;

  // Where the row ids (-1: a range) and the arrays, in their order, begin in the file.
  void place(int64_t row_ids_offset, const std::vector<int64_t>& array_offsets);

  // Checks that every row of the segment in [begin, end) is in memory. A restore of row ids checks
  // them when they are read from the file.
  void require_rows_in_memory(int64_t begin = INT64_MIN, int64_t end = INT64_MAX) const;

 private:
  void add(SegmentArray array, const pybind11::object& tensor);
};

}  // namespace cpr_ext
