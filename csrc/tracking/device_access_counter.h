// MFU of a table on a device: AccessCounter with its counts in the device's memory.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tracking/row_tracker.h"

namespace cpr_ext {

// The answers are AccessCounter's. What differs is when:
//  - All work goes to the stream that core/device_stream.h names at the time of the call, so that
//    it is ordered with training's. observe() and take() only submit it; what asks for a result
//    waits for that stream, which goes on meanwhile. So lookups stay unchanged until the stream has
//    passed.
//  - An index outside the table is not counted, the others are; report_faults() tells.
//  - observe() allocates nothing, so that it may be captured in a CUDA graph.
class DeviceAccessCounter final : public RowTracker {
 public:
  // Throws UsageError if there is no such device, CudaError if its memory is full.
  DeviceAccessCounter(std::string name, int64_t num_rows, int device);
  ~DeviceAccessCounter() override;

  const char* kind() const override { return "DeviceAccessCounter"; }
  int device() const override { return device_; }
  int64_t memory_bytes() const override;
  void observe(const Lookup& lookup) override;
  void observe_all(const std::vector<Observation>& observations) override;
  void report_faults() override;

  std::vector<uint32_t> counts() const;  // (num_rows), a copy

 private:
  int64_t count_dirty(RowRange range) const override;
  bool has_no_dirty(RowRange range) const override { return count_dirty(range) == 0; }
  RowIdVector list_dirty(RowRange range) const override;
  RowIdVector select_best(RowRange range, int64_t k, const WeightView* weight,
                          ThreadPool* pool) const override;
  std::unique_ptr<PendingRows> begin_select_best(RowRange range, int64_t k) const override;
  TakenRows clear_rows(RowIds row_ids, const WeightView* weight, ThreadPool* pool) override;
  TakenRows clear_range(RowRange range, const WeightView* weight, ThreadPool* pool) override;
  void restore(const TakenRows& taken) override;

  struct OnDevice;

  const int device_;
  std::unique_ptr<OnDevice> on_device_;
  // Invariant: no count can saturate within so many lookups, but for those of graphs.
  int64_t headroom_ = UINT32_MAX;
  bool is_in_graph_ = false;  // nobody counts how often a graph is launched
};

}  // namespace cpr_ext
