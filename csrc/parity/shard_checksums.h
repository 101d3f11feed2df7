// Checksums of a shard's rows, by blocks of rows: kept up to date by what optimizers change, so
// that a row which something else changed is found.
//
// The checksum of a block is the XOR of a hash of each of its records and their place.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/thread_pool.h"
#include "parity/shard_layout.h"

namespace cpr_ext {

// The rows [begin, end) of a table.
struct RowBlock {
  int64_t table;
  int64_t begin;
  int64_t end;
};

class ShardChecksums {
 public:
  // At most `max_blocks` blocks of about as many words, and one more for each table; all zero.
  // REQUIRES: max_blocks > 0.
  ShardChecksums(std::shared_ptr<const ShardLayout> layout, int64_t max_blocks);

  const std::vector<uint64_t>& values() const { return values_; }

  // REQUIRES: as many values as there are.
  void restore(std::vector<uint64_t> values);

  // Takes the rows as they are.
  void read(ThreadPool& pool);

  // A record changed. REQUIRES: it is one of the shard; `old_words` and `new_words` (record_words).
  void replace(int64_t table, int64_t row_id, const uint64_t* old_words, const uint64_t* new_words);

  // Blocks, ascending, with a row that is not what read() and replace() saw of it last; of those
  // that end after the word `begin` of the shard, and not after `end`.
  std::vector<RowBlock> find_wrong(ThreadPool& pool, int64_t begin, int64_t end) const;

 private:
  // Of the blocks from `first` on.
  std::vector<uint64_t> hash_rows(ThreadPool& pool, int64_t first, int64_t count) const;

  std::shared_ptr<const ShardLayout> layout_;
  std::vector<int64_t> rows_per_block_;  // by table
  std::vector<int64_t> first_block_;     // by table
  std::vector<RowBlock> blocks_;
  std::vector<uint64_t> values_;  // by block
};

// The hash of a record at word `place` of its shard.
uint64_t hash_record(uint64_t place, const uint64_t* words, int64_t count);

}  // namespace cpr_ext
