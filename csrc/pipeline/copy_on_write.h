// Copy on write, at row granularity: rows of a segment that are about to change before their
// capture are copied first. The capture of their chunk takes the copies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "core/row_id_vector.h"
#include "pipeline/exact_rows.h"
#include "pipeline/segment_plan.h"

namespace cpr_ext {

// Memory for copied rows, shared by the tables and segments of a pipeline. It is taken from the
// system when first used, or by make_memory(), and never grows.
class CopyArena {
 public:
  explicit CopyArena(int64_t size_bytes) : size_bytes_(size_bytes) {}

  int64_t size_bytes() const { return size_bytes_; }
  int64_t used_bytes() const;
  void make_memory();  // now, instead of page by page while training waits

 private:
  friend class CopyOnWrite;
  // All REQUIRE mutex_ held. nullptr: full.
  std::byte* data();
  std::byte* allocate(int64_t entry_bytes);
  void free(std::byte* entry, int64_t entry_bytes);

  struct FreePages {
    void operator()(std::byte* data) const;
  };
  const int64_t size_bytes_;
  mutable std::mutex mutex_;  // guards all below
  std::unique_ptr<std::byte, FreePages> data_;
  int64_t begun_bytes_ = 0;                           // handed out at least once
  int64_t free_bytes_ = 0;                            // of those, given back
  std::map<int64_t, std::vector<std::byte*>> freed_;  // by entry size
};

// The copied rows of one table of one segment. Its calls may come from several threads; one of them
// at a time captures.
class CopyOnWrite {
 public:
  // `row_ids` (num_rows,) ascending, or null for a range. They, the table and the arena outlive
  // this object.
  CopyOnWrite(const SegmentTable& table, const RowIdVector* row_ids, int64_t rows_per_chunk,
              CopyArena& arena);
  ~CopyOnWrite() { release(); }
  CopyOnWrite(const CopyOnWrite&) = delete;
  CopyOnWrite& operator=(const CopyOnWrite&) = delete;

  // Copies each of the `count` rows that the segment holds, that was not copied before and whose
  // chunk is none of the first `captured_chunks`. Other row ids, those outside the table included,
  // are ignored. Returns how many row ids were done: less than `count` if the arena
  // is full. Appends the ids of copied rows to `copied`.
  template <class Index>
  int64_t copy_before_write(const Index* row_ids, int64_t count, int64_t captured_chunks,
                            RowIdVector* copied);

  // Whether rows of the chunk that begins at this position have been copied and wait for it.
  bool has_copies(int64_t first) const;

  // Appends the ids of the rows of a chunk that were never copied, ascending.
  void list_waiting(int64_t first, int64_t count, RowIdVector* row_ids) const;

  // Overwrites rows of the chunk [first, first + count), gathered into `out` as in a slot, with
  // their copies, and frees these. Of rounded ones, `overlaid` has what broke the bound.
  void overlay(int64_t first, int64_t count, std::byte* out, OverlaidRows* overlaid);

  // Forgets all.
  void release();

 private:
  struct CopiedRow;
  int64_t chunk_of(int64_t row_id) const;
  int64_t position_in_chunk(int64_t row_id, int64_t first, int64_t count) const;
  void put(const std::byte* from, int64_t position, int64_t count, std::byte* to,
           OverlaidRows* overlaid);

  const SegmentTable& table_;
  const RowIdVector* const row_ids_;
  const int64_t rows_per_chunk_;
  CopyArena& arena_;
  int64_t first_row_id_ = 0;  // of the bitmap
  int64_t entry_bytes_ = 0;
  std::vector<float> row_;             // one that is being rounded
  std::vector<int64_t> chunk_begins_;  // (num_chunks,) first row id of each chunk
  // Guarded by the arena's mutex:
  std::vector<uint64_t> waiting_;  // one bit per row id: in the segment and not copied
  std::vector<CopiedRow*> heads_;  // (num_chunks,) copied rows of each chunk, a linked list
};

}  // namespace cpr_ext
