// Copy on write, at row granularity: rows of a segment that are about to change before their
// capture are copied first. The capture of their chunk takes the copies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "core/row_id_vector.h"
#include "pipeline/exact_rows.h"
#include "pipeline/segment_plan.h"

namespace cpr_ext {

// Memory for copied rows, shared by the tables and segments of a pipeline. It is taken from the
// system when first used, or by make_memory(), and never grows. Any thread may call it.
class CopyArena {
 public:
  explicit CopyArena(int64_t size_bytes) : size_bytes_(size_bytes) {}

  int64_t size_bytes() const { return size_bytes_; }
  int64_t used_bytes() const;
  void make_memory();  // now, instead of page by page while training waits

  // Appends up to `count` entries, fewer if it is full. They are aligned to 64 bytes.
  void allocate(int64_t entry_bytes, int64_t count, std::vector<std::byte*>* entries);
  void free(const std::vector<std::byte*>& entries, int64_t entry_bytes);

 private:
  std::byte* data();                             // REQUIRES: mutex_ held
  std::byte* allocate_one(int64_t entry_bytes);  // REQUIRES: mutex_ held. nullptr: full

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

// Copies of rows of one table: the i-th of array j is arrays[j].row(positions[i]), unaligned.
struct CopiedRows {
  std::vector<RowArray> arrays;
  RowIdVector positions, row_ids;
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
  int64_t copy_before_write(const int64_t* row_ids, int64_t count, int64_t captured_chunks,
                            RowIdVector* copied);

  // Whether rows of the chunk that begins at this position have been copied and wait for it.
  bool has_copies(int64_t first) const;

  // Appends the ids of the rows of a chunk that were never copied, ascending.
  void list_waiting(int64_t first, int64_t count, RowIdVector* row_ids) const;

  // Overwrites rows of the chunk [first, first + count), gathered into `out` as in a slot, with
  // their copies, which `observe` gets if there are any, and frees these. Of rounded ones,
  // `overlaid` has what broke the bound.
  void overlay(int64_t first, int64_t count, std::byte* out, OverlaidRows* overlaid,
               const std::function<void(const CopiedRows&)>& observe);

  // Forgets all.
  void release();

 private:
  struct CopiedRow;
  void copy(int64_t row_id, int64_t chunk, std::byte* memory);
  CopiedRows copies_at(std::byte* base) const;
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
  mutable std::mutex mutex_;           // guards all below; taken before the arena's
  std::vector<uint64_t> waiting_;      // one bit per row id: in the segment and not copied
  std::vector<CopiedRow*> heads_;      // (num_chunks,) copied rows of each chunk, a linked list
};

}  // namespace cpr_ext
