// Two bytes per row of one table: a hash of its bytes as they were last saved. Rows that count as
// clean must still have it. So a change that nothing counted is found, whatever made it.
//
// One bit of the hash is the parity of all the row's bits: a change of an odd number of bits is
// always found. The other 15 depend on all bytes and their places: any other change of a row is
// missed with a probability of about 2^-15.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "core/device_stream.h"
#include "core/huge_pages.h"
#include "core/thread_pool.h"
#include "staging/row_array.h"
#include "tracking/row_tracker.h"

namespace cpr_ext {

struct RowComparison {
  int64_t changed_row = -1;  // the first that differs; -1: none
  int64_t num_compared = 0;
  int64_t num_unknown = 0;  // clean rows whose hash is not known
};

// Any thread may call it; one call waits for another. The public calls throw UsageError for rows
// that the table or an array does not have. `arrays`: what is hashed of a row, always in one order.
class RowHashes {
 public:
  using Arrays = std::vector<RowArray>;

  RowHashes(std::string name, int64_t num_rows);
  virtual ~RowHashes() = default;
  RowHashes(const RowHashes&) = delete;
  RowHashes& operator=(const RowHashes&) = delete;

  const std::string& name() const { return name_; }
  int64_t num_rows() const { return num_rows_; }
  int64_t memory_bytes() const { return num_rows_ * static_cast<int64_t>(sizeof(uint16_t)); }
  virtual int device() const { return kHostMemory; }  // where it is, and the arrays must be

  virtual void make_memory() {}  // as RowTracker::make_memory()
  virtual void forget() = 0;     // no hash is known any more

  // Records rows as they are now.
  void record(const Arrays& arrays, RowIds row_ids, ThreadPool* pool);
  void record_range(const Arrays& arrays, RowRange range, ThreadPool* pool);

  std::vector<uint16_t> range_values(RowRange range) const;  // 0 where it is not known

  void check_arrays(const Arrays& arrays) const;

 protected:
  void check_rows(RowIds row_ids) const;
  void check_range(RowRange range) const;

 private:
  virtual void hash_rows(const Arrays& arrays, RowIds row_ids, ThreadPool* pool) = 0;
  virtual void hash_range(const Arrays& arrays, RowRange range, ThreadPool* pool) = 0;
  virtual std::vector<uint16_t> copy_range(RowRange range) const = 0;

  std::string name_;
  int64_t num_rows_;
};

class HostRowHashes;

// Rows of a table that are about to change, in any order, some repeated.
struct ChangingRows {
  HostRowHashes* hashes;
  RowHashes::Arrays arrays;
  const RowTracker* tracker;
  RowIds row_ids;
};

class HostRowHashes final : public RowHashes {
 public:
  HostRowHashes(std::string name, int64_t num_rows);

  void make_memory() override { hashes_.make_pages(); }
  void forget() override;

  // Compares the rows that `tracker` calls clean; stops at the first that differs.
  RowComparison compare(const Arrays& arrays, const RowTracker& tracker, RowIds row_ids);
  RowComparison compare_range(const Arrays& arrays, const RowTracker& tracker, RowRange range);
  std::vector<uint16_t> values(RowIds row_ids) const;  // 0 where it is not known

 private:
  class ComparedRows;
  friend std::vector<RowComparison> compare_changing(const std::vector<ChangingRows>& tables,
                                                     ThreadPool* pool);

  RowComparison compare_each(const ChangingRows& rows);
  void hash_rows(const Arrays& arrays, RowIds row_ids, ThreadPool* pool) override;
  void hash_range(const Arrays& arrays, RowRange range, ThreadPool* pool) override;
  std::vector<uint16_t> copy_range(RowRange range) const override;

  mutable std::mutex mutex_;
  HugeZeros<uint16_t> hashes_;  // guarded by mutex_; 0: not known
};

// Compares those that the tables' trackers call clean; their hashes are not known any more. Returns
// what was found of each table.
std::vector<RowComparison> compare_changing(const std::vector<ChangingRows>& tables,
                                            ThreadPool* pool);

}  // namespace cpr_ext
