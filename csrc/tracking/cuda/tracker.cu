#include "core/cuda/device.h"
#include "core/cuda/host_link.h"
#include "core/cuda/memory_pool.h"
#include "core/error.h"
#include "tracking/cuda/fault.h"
#include "tracking/cuda/row_list.h"
#include "tracking/cuda/sum.h"
#include "tracking/cuda/taken_rows.h"
#include "tracking/cuda/tracker.h"

namespace cpr_ext {

DeviceTracker::DeviceTracker(std::string name, int64_t num_rows, int device)
    : RowTracker(std::move(name), num_rows), device_(checked_device(device)) {
  const DeviceGuard guard(device);
  // Now, not in a step: the first use makes them, which waits for the device and ends a capture.
  MemoryPool::of(device);
  HostLink::of(device);
  fault_ = std::make_unique<DeviceFault>(stream_of(device));
}

DeviceTracker::~DeviceTracker() = default;

void DeviceTracker::report_faults() { fault_->report(name(), num_rows(), device_); }

std::vector<int64_t> DeviceTracker::count_dirty_of(const std::vector<TrackedRange>& ranges) const {
  return sums_on_device(device_, ranges.size(), [&](unsigned long long* sums, cudaStream_t) {
    for (const auto& [tracker, range] : ranges) {
      static_cast<const DeviceTracker&>(*tracker).launch_count_dirty(range, sums++);
    }
  });
}

RowIdVector DeviceTracker::list_dirty(RowRange range) const {
  return begin_list_dirty(range, num_dirty(range))->read();
}

RowIdVector DeviceTracker::select_best(RowRange range, int64_t k, const WeightView* weight,
                                       ThreadPool*) const {
  return begin_select(range, k, weight)->read();
}

TakenRows DeviceTracker::clear_rows(RowIds row_ids, const WeightView* weight, ThreadPool*) {
  const DeviceGuard guard(device_);
  if (row_ids.size == 0) return take_list({}, {}, weight);
  const Uploaded<int64_t> ids(row_ids.data, row_ids.size, device_, stream_of(device_));
  RowNames names{{}, {row_ids.data, row_ids.data + row_ids.size}, {}};
  return take_list({ids.get(), 0, row_ids.size}, std::move(names), weight);
}

TakenRows DeviceTracker::clear_chosen(const ChosenRows& chosen, RowIds, const WeightView* weight) {
  const DeviceGuard guard(device_);
  const int64_t* const ids = chosen.all->ids_on_device() + chosen.first;
  return take_list({ids, 0, chosen.count}, {chosen, {}, {}}, weight);
}

TakenRows DeviceTracker::clear_range(RowRange range, const WeightView* weight, ThreadPool*) {
  const DeviceGuard guard(device_);
  return take_list({nullptr, range.begin, range.size()}, {{}, {}, range}, weight);
}

// REQUIRES: the device is current.
TakenRows DeviceTracker::take_list(const RowList& rows, RowNames names, const WeightView* weight) {
  TakenRows taken = nothing_taken();
  auto late =
      std::make_shared<DeviceTakenRows>(device_, std::move(names), codec(), stream_of(device_));
  launch_take(rows, weight, late->values());
  if (rows.size > 0) taken.late = std::move(late);
  return taken;
}

void DeviceTracker::restore(const TakenRows& taken) {
  const DeviceGuard guard(device_);
  const cudaStream_t stream = stream_of(device_);
  std::vector<uint32_t> values(taken.row_ids.size());
  for (size_t i = 0; i < values.size(); ++i) values[i] = codec().encode(taken, i);
  const Uploaded<int64_t> ids(taken.row_ids.data(), taken.num_rows(), device_, stream);
  const Uploaded<uint32_t> uploaded(values.data(), taken.num_rows(), device_, stream);
  launch_put_back({ids.get(), 0, taken.num_rows()}, uploaded.get());
}

}  // namespace cpr_ext
