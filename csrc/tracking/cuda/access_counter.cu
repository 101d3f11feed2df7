#include <algorithm>
#include <limits>

#include "core/cuda/device.h"
#include "core/cuda/host_link.h"
#include "core/error.h"
#include "tracking/cuda/access_counter.h"
#include "tracking/cuda/dirty_marks.h"
#include "tracking/cuda/grid.h"
#include "tracking/cuda/lookups.h"
#include "tracking/cuda/pending_rows.h"
#include "tracking/cuda/row_list.h"

namespace cpr_ext {

namespace {

constexpr uint32_t kHighestCount = std::numeric_limits<uint32_t>::max();

// A row id in half a register pair, in which lanes compare theirs faster.
constexpr int64_t kMostRows = kHighestCount - 1;

// Lanes of a warp that look up the same row add it once: skewed lookups meet at few rows, whose
// additions would queue up.
template <bool kSaturates>
struct CountTarget {
  uint32_t* counts;

  __device__ void observe(int64_t index, int64_t) const {
    const unsigned lane = threadIdx.x % 32;
    const unsigned same = __match_any_sync(kAllLanes, static_cast<unsigned>(index));
    const bool is_first = __ffs(static_cast<int>(same)) - 1 == static_cast<int>(lane);
    if (is_first && index >= 0) add(counts + index, static_cast<uint32_t>(__popc(same)));
  }

  __device__ static void add(uint32_t* count, uint32_t lookups) {
    // Whoever carries it past the limit sets it there. Nothing reads it before the kernel has
    // ended.
    const uint32_t old = atomicAdd(count, lookups);
    if (kSaturates && old > kHighestCount - lookups) atomicExch(count, kHighestCount);
  }
};

__global__ void __launch_bounds__(kThreads)
    sum_counts_kernel(const uint32_t* counts, int64_t num_rows, unsigned long long* sum) {
  unsigned long long mine = 0;
  for (int64_t row = thread_of_grid(); row < num_rows;
       row += static_cast<int64_t>(gridDim.x) * kThreads) {
    mine += counts[row];
  }
  add_over_warps(mine, sum);
}

// Row ids are distinct: no two threads have the same count.
__global__ void __launch_bounds__(kThreads)
    take_counts_kernel(uint32_t* counts, RowList rows, uint32_t* taken) {
  const int64_t i = thread_of_grid();
  if (i >= rows.size) return;
  uint32_t& count = counts[rows.row(i)];
  taken[i] = count;
  count = 0;
}

__global__ void __launch_bounds__(kThreads)
    put_back_counts_kernel(uint32_t* counts, RowList rows, const uint32_t* taken) {
  const int64_t i = thread_of_grid();
  if (i >= rows.size) return;
  uint32_t& count = counts[rows.row(i)];
  count += taken[i] < kHighestCount - count ? taken[i] : kHighestCount - count;
}

int64_t bytes_of_counts(int64_t num_rows) {
  return num_rows * static_cast<int64_t>(sizeof(uint32_t));
}

int64_t checked_rows(const std::string& table, int64_t num_rows) {
  if (num_rows <= kMostRows) return num_rows;
  throw UsageError("table '" + table + "' has " + std::to_string(num_rows) +
                   " rows; lookups are counted on a device in at most " +
                   std::to_string(kMostRows));
}

}  // namespace

struct DeviceAccessCounter::OnDevice {
  OnDevice(int64_t num_rows, cudaStream_t stream)
      : counts(bytes_of_counts(num_rows)), last_cut(sizeof(uint32_t)) {
    const auto bytes = static_cast<size_t>(bytes_of_counts(num_rows));
    CPR_EXT_CUDA(cudaMemsetAsync(counts.data(), 0, bytes, stream));
    CPR_EXT_CUDA(cudaMemsetAsync(last_cut.data(), 0, sizeof(uint32_t), stream));
  }

  uint32_t* row(int64_t row_id) const { return counts.as<uint32_t>() + row_id; }

  DeviceMemory counts;    // (num_rows) uint32
  DeviceMemory last_cut;  // of selections; see StoredCounts
};

DeviceAccessCounter::DeviceAccessCounter(std::string name, int64_t num_rows, int device)
    : DeviceTracker(name, checked_rows(name, num_rows), device) {
  const DeviceGuard guard(device);
  on_device_ = std::make_unique<OnDevice>(num_rows, stream_of(device));
  load_kernel(lookups_kernel<CountTarget<true>>);
  load_kernel(lookups_kernel<CountTarget<false>>);
}

DeviceAccessCounter::~DeviceAccessCounter() = default;

int64_t DeviceAccessCounter::memory_bytes() const { return bytes_of_counts(num_rows()); }

DirtyMarks DeviceAccessCounter::dirty_marks() const { return {on_device_->row(0), true}; }

void DeviceAccessCounter::observe_all(const std::vector<Observation>& observations) {
  const DeviceGuard guard(device());
  const cudaStream_t stream = stream_of(device());
  const bool captures = is_capturing(stream);
  for_each_launch(observations, [&](const LaunchOf& launch) {
    bool saturates = false;
    for (const Observation& each : launch) {
      auto& counter = static_cast<DeviceAccessCounter&>(*each.tracker);
      const int64_t num_lookups = each.lookup.num_indices;
      counter.is_in_graph_ = counter.is_in_graph_ || captures;
      saturates = saturates || counter.is_in_graph_ || num_lookups > counter.headroom_;
      counter.headroom_ = std::max<int64_t>(0, counter.headroom_ - num_lookups);
    }
    const auto counts_of = [](const Observation& each) {
      return static_cast<DeviceAccessCounter&>(*each.tracker).on_device_->row(0);
    };
    if (saturates) {
      launch_lookups<CountTarget<true>>(launch, stream, counts_of);
    } else {
      launch_lookups<CountTarget<false>>(launch, stream, counts_of);
    }
  });
}

std::vector<uint32_t> DeviceAccessCounter::counts() const {
  const DeviceGuard guard(device());
  std::vector<uint32_t> counts(static_cast<size_t>(num_rows()));
  HostLink::of(device()).download(counts.data(), on_device_->row(0), memory_bytes(),
                                  stream_of(device()));
  return counts;
}

int64_t DeviceAccessCounter::sum_counts(RowRange range) const {
  check_range(range);
  return sums_on_device(device(), 1,
                        [&](unsigned long long* sum, cudaStream_t stream) {
                          CPR_EXT_LAUNCH(sum_counts_kernel,
                                         std::min(kMostBlocks, blocks_for(range.size())), kThreads,
                                         stream, on_device_->row(range.begin), range.size(), sum);
                        })
      .front();
}

std::unique_ptr<PendingRows> DeviceAccessCounter::begin_select_best(RowRange range, int64_t k,
                                                                    const WeightView*) const {
  const DeviceGuard guard(device());
  const StoredCounts counts(on_device_->row(range.begin), on_device_->last_cut.as<uint32_t>());
  return std::make_unique<DevicePendingRows>(device(), counts, range, k);
}

const TakenCodec& DeviceAccessCounter::codec() const {
  static const TakenCodec codec{
      [](TakenRows* taken, uint32_t count) { taken->counts.push_back(count); },
      [](const TakenRows& taken, size_t i) { return taken.counts[i]; }};
  return codec;
}

void DeviceAccessCounter::launch_take(const RowList& rows, const WeightView*, uint32_t* values) {
  CPR_EXT_LAUNCH(take_counts_kernel, blocks_for(rows.size), kThreads, stream_of(device()),
                 on_device_->row(0), rows, values);
  if (rows.size == num_rows()) headroom_ = kHighestCount;
}

void DeviceAccessCounter::launch_put_back(const RowList& rows, const uint32_t* values) {
  CPR_EXT_LAUNCH(put_back_counts_kernel, blocks_for(rows.size), kThreads, stream_of(device()),
                 on_device_->row(0), rows, values);
  if (rows.size > 0) headroom_ = 0;  // how high the counts are now only the device knows
}

}  // namespace cpr_ext
