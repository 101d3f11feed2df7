// The specification of a tracker: it watches which rows of one table are looked up, and says which
// are dirty and which of them matter most. One suite of tests holds for every tracker and backend.
//
// "Dirty" means observed since last taken; it is known exactly, whatever the score.
// A tracker is used by one thread at a time; it may spread one call over the pool it is given
// (nullptr: no other threads). No result depends on the number of threads.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/row_id_vector.h"
#include "core/thread_pool.h"
#include "tracking/lookup.h"
#include "tracking/weight_view.h"

namespace cpr_ext {

struct RowRange {
  int64_t begin = 0;
  int64_t end = 0;  // exclusive

  int64_t size() const { return end - begin; }
  bool contains(int64_t row_id) const { return begin <= row_id && row_id < end; }
};

// Lookups that are given to a tracker and not yet counted.
class CountBacklog {
 public:
  virtual ~CountBacklog() = default;
  virtual void wait() = 0;  // returns once there are none
};

struct TakenRows;

// Rows that a device still holds; reading them waits for it.
class LateRows {
 public:
  virtual ~LateRows() = default;
  virtual void read(TakenRows* taken) = 0;  // fills row_ids and what belongs to them
};

// Where the last selection of a range began before rows of it were taken; see rotation.h.
struct RotationMark {
  int64_t range_begin;
  int64_t range_end;
  int64_t position;
};

// Invariant: of `counts` and `changes` the one the tracker uses has row_ids.size() entries, the
// other none. While there is `late`, these three are empty; see settle().
struct TakenRows {
  std::string tracker;           // name of the table it was taken from
  std::string kind;              // class of the tracker
  RowIdVector row_ids;           // ascending; only rows that were dirty
  std::vector<uint32_t> counts;  // AccessCounter: access count; RowSampler: 1 if it was sampled
  std::vector<float> changes;    // ChangeMeter: L2 change
  std::shared_ptr<LateRows> late;
  std::vector<RotationMark> marks;  // DirtyRows

  // Reads what is late; if it throws, nothing has changed.
  void settle() {
    if (!late) return;
    late->read(this);
    late.reset();
  }

  int64_t num_rows() const { return static_cast<int64_t>(row_ids.size()); }
};

class RowTracker;

// Rows that a device is choosing, and where it has them.
class PendingRows {
 public:
  virtual ~PendingRows() = default;

  const RowTracker* chooser = nullptr;  // whose rows they are

  virtual bool is_ready() = 0;     // does not wait; throws CudaError
  virtual RowIdVector read() = 0;  // waits

  virtual int64_t num_rows() const = 0;              // those that read() returned; 0 before
  virtual const int64_t* ids_on_device() const = 0;  // (num_rows), as long as this lives
};

struct RowIds {
  const int64_t* data = nullptr;  // strictly ascending
  int64_t size = 0;
};

// Rows [first, first + count) of those that a device has chosen.
struct ChosenRows {
  std::shared_ptr<const PendingRows> all;
  int64_t first = 0;
  int64_t count = 0;
};

struct Observation {
  RowTracker* tracker;
  Lookup lookup;
};

struct TrackedRange {
  const RowTracker* tracker;
  RowRange range;
};

// The public calls check their arguments and throw UsageError with nothing changed; the private
// virtual ones may rely on that.
class RowTracker {
 public:
  RowTracker(std::string name, int64_t num_rows);
  virtual ~RowTracker() = default;
  RowTracker(const RowTracker&) = delete;
  RowTracker& operator=(const RowTracker&) = delete;

  const std::string& name() const { return name_; }
  int64_t num_rows() const { return num_rows_; }
  virtual const char* kind() const = 0;
  virtual int64_t memory_bytes() const = 0;
  // Has the system make memory that it else makes when rows are first counted. REQUIRES: no other
  // call runs.
  virtual void make_memory() {}
  virtual int device() const { return kHostMemory; }   // where lookups and weight must lie, too
  virtual bool needs_weight() const { return false; }  // to select and to take

  // Throws RowIndexError for the first index that is negative or not below num_rows; of a lookup on
  // a device report_faults() does, later.
  void check(const Lookup& lookup) const;

  // Waits for the lookups that others count for this tracker. All calls below up to put_back() do
  // so by themselves; observe() does not, since those that count call it.
  void settle() const {
    if (backlog_ != nullptr) backlog_->wait();
  }
  // Nullptr: there are none. Waits for those of an earlier backlog.
  void set_backlog(CountBacklog* backlog) {
    if (backlog != nullptr && backlog != backlog_) settle();
    backlog_ = backlog;
  }

  // Marks the rows dirty and adds to their score. REQUIRES: check(lookup) has passed.
  virtual void observe(const Lookup& lookup) = 0;

  // As observe() of each, at once. REQUIRES: the trackers are of this one's class and device.
  virtual void observe_all(const std::vector<Observation>& observations) {
    for (const Observation& each : observations) each.tracker->observe(each.lookup);
  }

  // Throws RowIndexError, once, if a device has found an index outside the table since last asked.
  // Does not wait for the device.
  virtual void report_faults() {}

  int64_t num_dirty(RowRange range) const;
  bool is_clean(RowRange range) const;  // none is dirty; stops at the first that is
  // The same of many, each device being waited for once, not once per tracker.
  static std::vector<int64_t> num_dirty_of(const std::vector<TrackedRange>& ranges);
  static bool are_clean(const std::vector<TrackedRange>& ranges);
  RowIdVector dirty_rows(RowRange range) const;  // ascending

  // At most `k` dirty rows of the range, those with the highest score, ties by lowest row id;
  // ascending. `weight`: the table's, as it is now, if needs_weight().
  RowIdVector select(RowRange range, int64_t k, const WeightView* weight, ThreadPool* pool) const;

  // As select(), which on a device waits for training's stream: here the caller may go on, and asks
  // later. Null on the host.
  std::unique_ptr<PendingRows> begin_select(RowRange range, int64_t k,
                                            const WeightView* weight) const;

  // The rows have just been captured: clears their score and dirtiness. If it throws, nothing has
  // changed.
  TakenRows take(RowIds row_ids, const WeightView* weight, ThreadPool* pool);
  // As take() of rows that this tracker has chosen, without copying their ids to the device again.
  // REQUIRES: row_ids are those rows.
  TakenRows take_chosen(const ChosenRows& chosen, RowIds row_ids, const WeightView* weight);
  TakenRows take_range(RowRange range, const WeightView* weight, ThreadPool* pool);

  // The save failed: the rows are dirty again, and their scores are added to what they have
  // gathered since. Leaves `taken` empty, so that giving back twice does no more than once.
  void put_back(TakenRows& taken);

 protected:
  TakenRows nothing_taken() const { return {name_, kind(), {}, {}, {}, nullptr, {}}; }
  void check_range(RowRange range) const;  // throws UsageError

 private:
  virtual int64_t count_dirty(RowRange range) const = 0;
  // REQUIRES: all trackers are on this one's device, which is not the host.
  virtual std::vector<int64_t> count_dirty_of(const std::vector<TrackedRange>&) const { return {}; }
  virtual bool has_no_dirty(RowRange range) const = 0;
  virtual RowIdVector list_dirty(RowRange range) const = 0;
  virtual RowIdVector select_best(RowRange range, int64_t k, const WeightView* weight,
                                  ThreadPool* pool) const = 0;
  virtual std::unique_ptr<PendingRows> begin_select_best(RowRange, int64_t,
                                                         const WeightView*) const {
    return nullptr;
  }
  virtual TakenRows clear_rows(RowIds row_ids, const WeightView* weight, ThreadPool* pool) = 0;
  virtual TakenRows clear_chosen(const ChosenRows&, RowIds row_ids, const WeightView* weight) {
    return clear_rows(row_ids, weight, nullptr);
  }
  virtual TakenRows clear_range(RowRange range, const WeightView* weight, ThreadPool* pool) = 0;
  virtual void restore(const TakenRows& taken) = 0;

  std::string name_;
  int64_t num_rows_;
  CountBacklog* backlog_ = nullptr;
};

}  // namespace cpr_ext
