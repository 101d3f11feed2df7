#include <atomic>

#include "core/cuda/device.h"
#include "core/cuda/host_link.h"
#include "core/cuda/memory_pool.h"
#include "core/error.h"
#include "tracking/cuda/dirty_marks.h"
#include "tracking/cuda/grid.h"
#include "tracking/cuda/lookups.h"
#include "tracking/cuda/pending_rows.h"
#include "tracking/cuda/row_list.h"
#include "tracking/cuda/tracker.h"

namespace cpr_ext {

// Which rows were taken: the chosen ones, or else row_ids, or if that is empty those of the range.
struct RowNames {
  ChosenRows chosen;
  std::vector<int64_t> row_ids;
  RowRange range;

  int64_t size() const {
    if (chosen.all) return chosen.count;
    return row_ids.empty() ? range.size() : static_cast<int64_t>(row_ids.size());
  }
};

// One value per row that was taken, zero for a row that was not dirty.
class DeviceTakenRows final : public LateRows {
 public:
  DeviceTakenRows(int device, RowNames names, const TakenCodec& codec, cudaStream_t stream);

  uint32_t* values() { return values_.as<uint32_t>(); }  // (num_rows), for the kernel to fill
  void read(TakenRows* taken) override;

 private:
  int device_;
  RowNames names_;
  const TakenCodec& codec_;  // as long as the process
  cudaStream_t stream_;
  StreamMemory values_;
};

DeviceTakenRows::DeviceTakenRows(int device, RowNames names, const TakenCodec& codec,
                                 cudaStream_t stream)
    : device_(device),
      names_(std::move(names)),
      codec_(codec),
      stream_(stream),
      values_(names_.size() * static_cast<int64_t>(sizeof(uint32_t)), stream) {}

void DeviceTakenRows::read(TakenRows* taken) {
  const DeviceGuard guard(device_);
  HostLink& link = HostLink::of(device_);
  std::vector<uint32_t> values(static_cast<size_t>(names_.size()));
  link.download(values.data(), values_.as<uint32_t>(),
                names_.size() * static_cast<int64_t>(sizeof(uint32_t)), stream_);
  std::vector<int64_t> row_ids = names_.row_ids;
  if (names_.chosen.all) {
    row_ids.resize(values.size());
    link.download(row_ids.data(), names_.chosen.all->ids_on_device() + names_.chosen.first,
                  names_.chosen.count * static_cast<int64_t>(sizeof(int64_t)), stream_);
  }
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i] == 0) continue;
    taken->row_ids.push_back(row_ids.empty() ? names_.range.begin + static_cast<int64_t>(i)
                                             : row_ids[i]);
    codec_.decode(taken, values[i]);
  }
}

DeviceFault::DeviceFault(cudaStream_t stream)
    : is_claimed_(sizeof(unsigned)), fault_(sizeof(Fault)) {
  CPR_EXT_CUDA(cudaMemsetAsync(is_claimed_.data(), 0, sizeof(unsigned), stream));
  *reinterpret_cast<Fault*>(fault_.data()) = Fault{};
}

void DeviceFault::report(const std::string& table, int64_t num_rows, int device) const {
  auto* const fault = reinterpret_cast<volatile Fault*>(fault_.data());
  if (fault->is_set == 0) return;
  std::atomic_thread_fence(std::memory_order_acquire);  // with the fence of FaultNote::take()
  const int64_t index = fault->index;
  const int64_t position = fault->position;
  fault->is_set = 0;
  const DeviceGuard guard(device);
  CPR_EXT_CUDA(cudaMemsetAsync(is_claimed_.data(), 0, sizeof(unsigned), stream_of(device)));
  throw RowIndexError("table '" + table + "': index " + std::to_string(index) + " at position " +
                      std::to_string(position) + " of an earlier lookup on device " +
                      std::to_string(device) + "; allowed: 0 to " + std::to_string(num_rows - 1) +
                      " (num_rows is " + std::to_string(num_rows) +
                      "). Indices outside were not counted");
}

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
  return sums_on_device(device_, ranges.size(), [&](unsigned long long* sums, cudaStream_t stream) {
    for (const auto& [tracker, range] : ranges) {
      const auto& on_device = static_cast<const DeviceTracker&>(*tracker);
      launch_count(on_device.dirty_marks(), range, sums++, stream);
    }
  });
}

void DeviceTracker::observe_all(const std::vector<Observation>& observations) {
  const DeviceGuard guard(device_);
  for_each_launch(observations, [&](const LaunchOf& launch) {
    launch_lookups<DirtyTarget>(launch, stream_of(device_), [](const Observation& each) {
      return static_cast<const DeviceTracker&>(*each.tracker).dirty_marks().words;
    });
  });
}

RowIdVector DeviceTracker::list_dirty(RowRange range) const {
  const int64_t count = num_dirty(range);
  const DirtyMarks marks = dirty_marks();
  if (marks.are_counts) return begin_select(range, count, nullptr)->read();
  const DeviceGuard guard(device_);
  const SetBits bits{marks.words, range.begin};
  return DevicePendingRows(device_, bits, range, count).read();
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
