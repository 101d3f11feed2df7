// The shard of one worker as a sequence of 64-bit words: table after table, record after record.
//
// A record is a row of the weight followed by its per-row optimizer state, padded with zeros to
// whole words. Parity is the XOR of such sequences of several workers.
#pragma once

#include <cstdint>
#include <vector>

#include "staging/row_array.h"

namespace cpr_ext {

constexpr int64_t kWordBytes = sizeof(uint64_t);

struct RecordTable {
  std::vector<RowArray> arrays;  // of as many rows each
  int64_t num_rows = 0;
  int64_t record_words = 0;
  int64_t first_word = 0;  // of row 0, in the sequence
};

class ShardLayout {
 public:
  // REQUIRES: each table has an array; the arrays of a table have as many rows.
  explicit ShardLayout(std::vector<std::vector<RowArray>> tables);

  const std::vector<RecordTable>& tables() const { return tables_; }
  int64_t num_words() const { return num_words_; }
  int64_t max_record_words() const { return max_record_words_; }

  // Copies the words [begin, end) of the sequence to `out` (end - begin).
  // REQUIRES: 0 <= begin <= end <= num_words(), here and below.
  void read(int64_t begin, int64_t end, uint64_t* out) const;

  // Copies to `out` (count, width) the words from each of `places` on, as far as they are below
  // `end`; the rest of `out` stays. REQUIRES: 0 <= places[i]; end <= num_words().
  void gather(const int64_t* places, int64_t count, int64_t width, int64_t end,
              uint64_t* out) const;

  // Overwrites the rows' bytes in the words [begin, end); padding is ignored.
  void write(int64_t begin, int64_t end, const uint64_t* words) const;

 private:
  template <typename Visit>
  void for_records(int64_t begin, int64_t end, const Visit& visit) const;
  void read(int64_t begin, int64_t end, uint64_t* out, uint64_t* scratch) const;

  std::vector<RecordTable> tables_;
  int64_t num_words_ = 0;
  int64_t max_record_words_ = 0;
};

// One record out of a table and back. REQUIRES: 0 <= row_id < table.num_rows.
void read_record(const RecordTable& table, int64_t row_id, uint64_t* out);
void write_record(const RecordTable& table, int64_t row_id, const uint64_t* words);

// Brings a record that is read soon into the cache. REQUIRES: 0 <= row_id < table.num_rows.
void prefetch_record(const RecordTable& table, int64_t row_id);

// to[i] ^= from[i]; the two do not overlap.
void xor_words(uint64_t* to, const uint64_t* from, int64_t count);

}  // namespace cpr_ext
