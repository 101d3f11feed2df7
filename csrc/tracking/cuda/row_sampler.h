// SSU of a table on a device: RowSampler with its sample in the device's memory.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tracking/cuda/tracker.h"
#include "tracking/sampler_options.h"

namespace cpr_ext {

// Which lookups are sampled, how many rows the sample holds and which of them are selected is as
// with RowSampler. While nothing is evicted, or batches sample one lookup each and no row is taken,
// so is the sample itself; else it is that of some order of each batch's lookups.
//
// The lookups of a CUDA graph are numbered anew at each of its launches.
class DeviceRowSampler final : public DeviceTracker {
 public:
  // Throws UsageError, also if the capacity is 2^32 or more, and CudaError if the memory is full.
  DeviceRowSampler(std::string name, int64_t num_rows, const SamplerOptions& options, int device);
  ~DeviceRowSampler() override;

  const char* kind() const override { return "DeviceRowSampler"; }
  int64_t memory_bytes() const override;
  void observe_all(const std::vector<Observation>& observations) override;
  DirtyMarks dirty_marks() const override;

  int64_t num_sampled() const;  // waits for the device
  const SamplerOptions& options() const { return options_; }

 private:
  std::unique_ptr<PendingRows> begin_select_best(RowRange range, int64_t k,
                                                 const WeightView* weight) const override;
  const TakenCodec& codec() const override;
  void launch_take(const RowList& rows, const WeightView* weight, uint32_t* values) override;
  void launch_put_back(const RowList& rows, const uint32_t* values) override;

  struct OnDevice;

  const SamplerOptions options_;
  std::unique_ptr<OnDevice> on_device_;
};

}  // namespace cpr_ext
