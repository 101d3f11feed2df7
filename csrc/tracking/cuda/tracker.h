// What the trackers of tables on a device have in common.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tracking/row_tracker.h"

namespace cpr_ext {

class DeviceFault;
struct DirtyMarks;
struct RowList;
struct RowNames;

// How a tracker's forgotten score crosses to the host: as one value per row, zero for a row that
// was not dirty.
struct TakenCodec {
  void (*decode)(TakenRows* taken, uint32_t value);          // appends what belongs to one row
  uint32_t (*encode)(const TakenRows& taken, size_t index);  // its inverse
};

// Each gives the answers of its kind on the CPU. What differs is when:
//  - All work goes to the stream that core/device_stream.h names at the time of the call, so that
//    it is ordered with training's. observe() and take() only submit it; what asks for a result
//    waits for that stream, which goes on meanwhile. So lookups, and the weight where one is given,
//    stay where they are until the stream has passed.
//  - An index outside the table is not observed, the others are; report_faults() tells.
//  - observe() allocates nothing, so that it may be captured in a CUDA graph; capture graphs while
//    no rows are being taken.
class DeviceTracker : public RowTracker {
 public:
  ~DeviceTracker() override;

  int device() const final { return device_; }
  void observe(const Lookup& lookup) final { observe_all({{this, lookup}}); }
  void observe_all(const std::vector<Observation>& observations) override;  // sets their marks
  void report_faults() final;

  const DeviceFault& fault() const { return *fault_; }
  virtual DirtyMarks dirty_marks() const = 0;  // as they are in the order of the stream

 protected:
  // Throws UsageError if there is no such device, CudaError if its memory is full.
  DeviceTracker(std::string name, int64_t num_rows, int device);

  TakenRows clear_rows(RowIds row_ids, const WeightView* weight, ThreadPool* pool) override;
  TakenRows clear_chosen(const ChosenRows& chosen, RowIds row_ids,
                         const WeightView* weight) override;
  void restore(const TakenRows& taken) override;

 private:
  int64_t count_dirty(RowRange range) const final { return count_dirty_of({{this, range}})[0]; }
  std::vector<int64_t> count_dirty_of(const std::vector<TrackedRange>& ranges) const final;
  bool has_no_dirty(RowRange range) const final { return num_dirty(range) == 0; }
  RowIdVector list_dirty(RowRange range) const final;
  RowIdVector select_best(RowRange range, int64_t k, const WeightView* weight,
                          ThreadPool* pool) const final;
  TakenRows clear_range(RowRange range, const WeightView* weight, ThreadPool* pool) final;

  virtual const TakenCodec& codec() const = 0;
  // Clears score and dirtiness of the rows and writes a value for each. One launch, so that if it
  // throws, nothing has changed.
  virtual void launch_take(const RowList& rows, const WeightView* weight, uint32_t* values) = 0;
  // The rows are dirty again, and what their values say is added to their score.
  virtual void launch_put_back(const RowList& rows, const uint32_t* values) = 0;

  TakenRows take_list(const RowList& rows, RowNames names, const WeightView* weight);

  const int device_;
  std::unique_ptr<DeviceFault> fault_;
};

}  // namespace cpr_ext
