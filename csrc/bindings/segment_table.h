// A table of a segment as Python describes it, for capturing it and for restoring it.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/annotations.h"
#include "core/row_id_vector.h"
#include "pipeline/segment_plan.h"
#include "staging/device_stager.h"

namespace cpr_ext {

// (table, first, count, step, checksums): a Chunk
using ChunkTuple = std::tuple<int, int64_t, int64_t, int64_t, std::vector<uint32_t>>;

// The table, with the tensors it points into.
struct TableSpec {
  SegmentTable table;
  SharedRowIds row_ids;   // null: none were given
  std::string read_only;  // name of an array that cannot be restored into
  pybind11::list owners;

  TableSpec(std::string name, int64_t num_rows, int64_t row_ids_offset, int64_t range_begin,
            const ArrayLike& ids, bool is_packed, int64_t block_bytes);

  void add_rows(std::string name, const ArrayLike& tensor, int64_t file_offset,
                int64_t first_row_id, const std::shared_ptr<DeviceStager>& stager,
                const std::string& precision);

  // A tensor that is not made of rows (the dense part): one row per byte.
  void add_bytes(std::string name, const ArrayLike& tensor, int64_t file_offset, bool check_nan);

  // Where the row ids (-1: a range) and the arrays, in their order, begin in the file.
  void place(int64_t row_ids_offset, const std::vector<int64_t>& array_offsets);

  // The runs (count, first, last) of the row ids of each chunk, which are packed in the file, from
  // where the row ids begin.
  void pack_row_ids(const std::vector<std::tuple<int64_t, int64_t, int64_t>>& runs);

  // Of chunks of a file to read: (first, exact rows, where they are in the file).
  void keep_exact(const std::vector<std::tuple<int64_t, int64_t, int64_t>>& exact);

  // Lets a restore note what it writes to rows, in (n,) uint8 from row `first_row_id` on.
  void mark_rows(const ArrayLike& marks, int64_t first_row_id, uint8_t of_row, uint8_t of_exact);

  // Of the chunk at `first`; none if nothing is known of any.
  ExactRows exact_rows_at(int64_t first) const;

  // Checks that every row of the segment in [begin, end) is in memory. A restore of row ids checks
  // them when they are read from the file.
  void require_rows_in_memory(int64_t begin = INT64_MIN, int64_t end = INT64_MAX) const;

 private:
  void add(SegmentArray array, const pybind11::object& tensor);
};

}  // namespace cpr_ext
