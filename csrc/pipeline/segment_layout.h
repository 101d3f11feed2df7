// Where each table of a new segment lies in its file, and the header that says so; see
// docs/snapshot_format.md. Python reads headers; this writes them, as it takes part in every save.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "pipeline/segment_plan.h"

namespace cpr_ext {

constexpr int kSegmentVersion = 1;
constexpr int64_t kMaxHeaderBytes = 64 << 20;

// An array as a header names it.
struct ArrayText {
  std::string name;       // a JSON text
  std::string dtype;      // in safetensors
  std::string row_shape;  // ",2,3" of rows of that shape
};

// What a header says of a table, but for its rows; the same for all segments of a snapshot.
struct TableText {
  std::string name;               // a JSON text
  std::string arrays;             // what its rows are made of; a JSON text
  std::string shape;              // "2,3" of a tensor of that shape, which is no table
  bool is_tensor = false;         // it has a shape, perhaps an empty one
  std::vector<ArrayText> stored;  // row ids first; a range does without
};

// A table of a segment to come.
struct PlannedTable {
  SegmentTable* rows;  // the layout sets its offsets
  std::shared_ptr<const TableText> text;
};

class SegmentLayout {
 public:
  // Places the tables, which are captured in slots. metadata: a JSON object with at least one
  // entry. block_bytes: kAlignment, kSmallBlock, or 0: the small one where padding would count, for
  // then arrays follow each other closely, and go through the page cache. Throws UsageError for a
  // header that no reader takes, or a row that does not fit a slot.
  SegmentLayout(const std::vector<PlannedTable>& tables, std::string metadata, int64_t slot_bytes,
                int64_t max_chunk_bytes, int64_t block_bytes);

  int64_t header_bytes() const { return header_bytes_; }
  int64_t file_bytes() const { return file_bytes_; }

  // The header block of these chunks, which are all.
  std::string header(const std::vector<Chunk>& chunks) const;

 private:
  struct Placed {
    SegmentTable rows;  // without memory
    std::shared_ptr<const TableText> text;
  };
  void place_at(int64_t start);
  std::vector<Chunk> widest_chunks(int64_t slot_bytes, int64_t max_chunk_bytes) const;
  std::string text(const std::vector<Chunk>& chunks) const;
  std::string metadata_text(const std::vector<Chunk>& chunks) const;
  std::string entries_text() const;

  std::vector<Placed> tables_;
  const std::string metadata_;
  int64_t block_bytes_ = 0;
  int64_t header_bytes_ = 0;
  int64_t file_bytes_ = 0;
};

}  // namespace cpr_ext
