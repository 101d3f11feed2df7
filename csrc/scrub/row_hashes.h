// Two bytes per row of one table: a hash of its bytes as they were last saved. Rows that count as
// clean must still have it. So a change that nothing counted is found, whatever made it.
//
// One bit of the hash is the parity of all the row's bits: a change of an odd number of bits is
// always found. The other 15 depend on all bytes and their places: any other change of a row is
// missed with a probability of about 2^-15.
//
// A row whose hash is not known yet gets it when it is first compared.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "core/huge_pages.h"
#include "core/thread_pool.h"
#include "staging/row_array.h"
#include "tracking/row_tracker.h"

namespace cpr_ext {

struct RowComparison {
  int64_t changed_row = -1;  // the first that differs; -1: none
  int64_t num_compared = 0;
  int64_t num_recorded = 0;  // clean rows whose hash was not known
};

// Any thread may call it; one call waits for another. The public calls throw UsageError for rows
// that the table or an array does not have.
class RowHashes {
 public:
  RowHashes(std::string name, int64_t num_rows);

  const std::string& name() const { return name_; }
  int64_t num_rows() const { return static_cast<int64_t>(hashes_.size()); }
  int64_t memory_bytes() const { return num_rows() * static_cast<int64_t>(sizeof(uint16_t)); }

  void forget();  // no hash is known any more

  // Records rows as they are now. `arrays`: all that belongs to a row, always in one order.
  void record(const std::vector<RowArray>& arrays, RowIds row_ids, ThreadPool* pool);
  void record_range(const std::vector<RowArray>& arrays, RowRange range, ThreadPool* pool);

  // Compares the rows that `tracker` calls clean; stops at the first that differs.
  RowComparison compare(const std::vector<RowArray>& arrays, const RowTracker& tracker,
                        RowIds row_ids);
  RowComparison compare_range(const std::vector<RowArray>& arrays, const RowTracker& tracker,
                              RowRange range);

  // The hashes of rows, 0 where it is not known.
  std::vector<uint16_t> values(RowIds row_ids) const;
  std::vector<uint16_t> range_values(RowRange range) const;

  void check_arrays(const std::vector<RowArray>& arrays) const;

 private:
  void check_rows(RowIds row_ids) const;
  void check_range(RowRange range) const;
  bool is_same_locked(const std::vector<RowArray>& arrays, int64_t row_id, RowComparison* found);

  std::string name_;
  mutable std::mutex mutex_;
  HugeZeros<uint16_t> hashes_;  // guarded by mutex_; 0: not known
};

}  // namespace cpr_ext
