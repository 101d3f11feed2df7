// What one training step changed in a shard: old rows XOR new rows, in a bounded arena.
//
// XORed into the shard it takes the step back; XORed into parity it brings that up to date.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "parity/shard_checksums.h"
#include "parity/shard_layout.h"

namespace cpr_ext {

class RowDelta {
 public:
  RowDelta(std::shared_ptr<const ShardLayout> layout, int64_t max_bytes);

  // Keeps the rows `row_ids` (count,) of a table as they are, before they change. A row that is
  // kept already keeps its first value. Raises RowIndexError for a row that the table lacks, and
  // UsageError where the step's rows exceed max_bytes; then nothing was added.
  // REQUIRES: !is_finished(); 0 <= table < number of tables.
  void note(int64_t table, const int64_t* row_ids, int64_t count);

  // The step is done: keeps old XOR new in place of the old rows, and brings the checksums of the
  // same shard up to date, if given. REQUIRES: !is_finished().
  void finish(ShardChecksums* checksums = nullptr);

  // As ShardLayout::gather(), but of the rows as they were before the step, finished or not: rows
  // that were noted may be changing meanwhile. REQUIRES: `places` are ascending, and at least
  // `width` apart.
  void gather_before(const int64_t* places, int64_t count, int64_t width, int64_t end,
                     uint64_t* out) const;

  // Leads the rows from before the step to after it, or back; the delta is kept.
  // REQUIRES: is_finished(), and they are those of one or the other.
  void toggle();

  // Puts the rows back to what they were before the step, finished or not, and forgets it.
  void undo();

  // Forgets all rows, and begins a step.
  void clear();

  // The rows whose records begin in the words [begin, end) of the shard, as a message for
  // apply_message(); places count from `begin`. REQUIRES: is_finished().
  std::vector<uint64_t> pack(int64_t begin, int64_t end) const;

  bool is_finished() const { return is_finished_; }
  int64_t num_rows() const;
  int64_t num_bytes() const { return num_bytes_; }

 private:
  struct Kept {
    std::vector<int64_t> row_ids;
    std::vector<uint64_t> words;  // (row_ids.size(), record_words)
    std::vector<bool> is_kept;    // by row
  };

  std::shared_ptr<const ShardLayout> layout_;
  int64_t max_bytes_;
  int64_t num_bytes_ = 0;
  bool is_finished_ = false;
  std::vector<Kept> kept_;  // by table
  mutable std::vector<uint64_t> scratch_;
};

// XORs a message of RowDelta::pack() into parity (num_words,); returns the number of rows.
// Applied again it takes itself back. Raises UsageError for anything else than such a message, or
// one for a longer parity; then nothing was changed.
int64_t apply_message(const uint64_t* message, int64_t message_words, uint64_t* parity,
                      int64_t num_words);

}  // namespace cpr_ext
