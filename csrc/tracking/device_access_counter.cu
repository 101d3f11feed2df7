#include <algorithm>
#include <limits>

#include "core/device.h"
#include "core/error.h"
#include "selection/device_rows.h"
#include "tracking/device_access_counter.h"

namespace cpr_ext {

namespace {

constexpr uint32_t kHighestCount = std::numeric_limits<uint32_t>::max();
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kThreads = 256;
constexpr int kLookupsPerThread = 4;  // independent loads that overlap
constexpr int kLookupsPerBlock = kThreads * kLookupsPerThread;
constexpr int64_t kMostBlocks = 2048;
// A launch's parameters are limited to 4 KB.
constexpr size_t kTablesPerLaunch = 64;

// The first bad index since faults were last reported, in memory of the host that devices write to.
struct Fault {
  int64_t index;
  int64_t position;
  uint32_t is_set;
};

struct TableLookups {
  const void* indices;
  int64_t num_indices;
  uint32_t* counts;
  int64_t num_rows;
  Fault* fault;
  unsigned* fault_is_claimed;  // in the device's memory
  int32_t first_block;
  int32_t item_bytes;
};

struct BatchLookups {
  TableLookups tables[kTablesPerLaunch];
  int32_t num_tables;
};
static_assert(sizeof(BatchLookups) <= 4096, "the parameters of a launch");

__device__ void note_fault(const TableLookups& table, int64_t index, int64_t position) {
  if (atomicCAS(table.fault_is_claimed, 0u, 1u) != 0) return;
  auto* const fault = static_cast<volatile Fault*>(table.fault);
  fault->index = index;
  fault->position = position;
  __threadfence_system();
  fault->is_set = 1;
}

template <bool kSaturates>
__device__ void add(uint32_t* count, uint32_t lookups) {
  if (!kSaturates) {
    atomicAdd(count, lookups);
    return;
  }
  // Whoever carries it past the limit sets it there. Nothing reads it before the kernel has ended.
  const uint32_t old = atomicAdd(count, lookups);
  if (old > kHighestCount - lookups) atomicExch(count, kHighestCount);
}

// Counts the lookups of all tables of a batch. The lanes of a warp that look up the same row add it
// once: skewed lookups meet at few rows, whose additions would queue up.
template <bool kSaturates>
__global__ void __launch_bounds__(kThreads)
    count_lookups_kernel(const __grid_constant__ BatchLookups batch) {
  int number = 0;
  while (number + 1 < batch.num_tables &&
         static_cast<int32_t>(blockIdx.x) >= batch.tables[number + 1].first_block) {
    ++number;
  }
  const TableLookups& table = batch.tables[number];
  const int64_t begin = (blockIdx.x - static_cast<int64_t>(table.first_block)) * kLookupsPerBlock;
  int64_t indices[kLookupsPerThread];
  for (int i = 0; i < kLookupsPerThread; ++i) {
    const int64_t position = begin + i * kThreads + threadIdx.x;
    int64_t index = -1;
    if (position < table.num_indices) {
      index = table.item_bytes == 4 ? static_cast<const int32_t*>(table.indices)[position]
                                    : static_cast<const int64_t*>(table.indices)[position];
      if (index < 0 || index >= table.num_rows) {
        note_fault(table, index, position);
        index = -1;
      }
    }
    indices[i] = index;
  }
  const unsigned lane = threadIdx.x % 32;
  for (int i = 0; i < kLookupsPerThread; ++i) {
    const unsigned same = __match_any_sync(kAllLanes, static_cast<unsigned long long>(indices[i]));
    const bool is_first = __ffs(static_cast<int>(same)) - 1 == static_cast<int>(lane);
    if (is_first && indices[i] >= 0) {
      add<kSaturates>(table.counts + indices[i], static_cast<uint32_t>(__popc(same)));
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    count_dirty_kernel(const uint32_t* counts, int64_t num_rows, unsigned long long* num_dirty) {
  unsigned mine = 0;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; row < num_rows;
       row += static_cast<int64_t>(gridDim.x) * kThreads) {
    mine += counts[row] != 0;
  }
  for (int delta = 16; delta > 0; delta /= 2) mine += __shfl_down_sync(kAllLanes, mine, delta);
  if (threadIdx.x % 32 == 0 && mine != 0) {
    atomicAdd(num_dirty, static_cast<unsigned long long>(mine));
  }
}

// Row ids are distinct: no two threads have the same count.
__global__ void __launch_bounds__(kThreads)
    take_rows_kernel(uint32_t* counts, const int64_t* row_ids, int64_t num_rows, uint32_t* taken) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= num_rows) return;
  taken[i] = counts[row_ids[i]];
  counts[row_ids[i]] = 0;
}

__global__ void __launch_bounds__(kThreads)
    put_back_kernel(uint32_t* counts, const int64_t* row_ids, int64_t num_rows,
                    const uint32_t* taken) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= num_rows) return;
  uint32_t& count = counts[row_ids[i]];
  count += taken[i] < kHighestCount - count ? taken[i] : kHighestCount - count;
}

int64_t blocks_for(int64_t size, int64_t per_block) { return (size + per_block - 1) / per_block; }

int64_t bytes_of_counts(int64_t num_rows) {
  return num_rows * static_cast<int64_t>(sizeof(uint32_t));
}

// Counts as they were taken; their rows are `row_ids`, or if it is empty all from `begin` on.
class TakenOnDevice final : public LateRows {
 public:
  TakenOnDevice(int device, int64_t begin, std::vector<int64_t> row_ids, int64_t size,
                cudaStream_t stream)
      : device_(device),
        begin_(begin),
        row_ids_(std::move(row_ids)),
        size_(size),
        stream_(stream),
        counts_(bytes_of_counts(size), stream) {}

  uint32_t* counts() { return counts_.as<uint32_t>(); }

  void read(TakenRows* taken) override {
    const DeviceGuard guard(device_);
    std::vector<uint32_t> counts(static_cast<size_t>(size_));
    HostLink::of(device_).download(counts.data(), counts_.as<uint32_t>(), bytes_of_counts(size_),
                                   stream_);
    for (int64_t i = 0; i < size_; ++i) {
      if (counts[i] == 0) continue;
      taken->row_ids.push_back(row_ids_.empty() ? begin_ + i : row_ids_[i]);
      taken->counts.push_back(counts[i]);
    }
  }

 private:
  int device_;
  int64_t begin_;
  std::vector<int64_t> row_ids_;
  int64_t size_;
  cudaStream_t stream_;
  StreamMemory counts_;
};

class RowsOfDevice final : public PendingRows {
 public:
  RowsOfDevice(int device, const uint32_t* counts, RowRange range, int64_t k)
      : device_(device), rows_(counts, range.size(), k, range.begin, stream_of(device)) {}

  bool is_ready() override {
    const DeviceGuard guard(device_);
    return rows_.is_ready();
  }

  RowIdVector read() override {
    const DeviceGuard guard(device_);
    return rows_.read(device_);
  }

 private:
  int device_;
  DeviceRows rows_;
};

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  CPR_EXT_CUDA(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

int checked_device(int device) {
  if (device >= 0 && device < num_devices()) return device;
  throw UsageError("device is " + std::to_string(device) + "; there are " +
                   std::to_string(num_devices()) + " CUDA devices");
}

}  // namespace

struct DeviceAccessCounter::OnDevice {
  OnDevice(int device, int64_t num_rows)
      : counts(bytes_of_counts(num_rows)),
        fault_is_claimed(sizeof(unsigned)),
        fault(sizeof(Fault)) {
    const cudaStream_t stream = stream_of(device);
    CPR_EXT_CUDA(cudaMemsetAsync(counts.data(), 0, bytes_of_counts(num_rows), stream));
    CPR_EXT_CUDA(cudaMemsetAsync(fault_is_claimed.data(), 0, sizeof(unsigned), stream));
    host_fault() = Fault{};
  }

  uint32_t* row(int64_t row_id) const { return counts.as<uint32_t>() + row_id; }
  volatile Fault* read_fault() const { return reinterpret_cast<volatile Fault*>(fault.data()); }
  Fault& host_fault() const { return *reinterpret_cast<Fault*>(fault.data()); }

  DeviceMemory counts;  // (num_rows) uint32
  DeviceMemory fault_is_claimed;
  PinnedMemory fault;
};

DeviceAccessCounter::DeviceAccessCounter(std::string name, int64_t num_rows, int device)
    : RowTracker(std::move(name), num_rows), device_(checked_device(device)) {
  const DeviceGuard guard(device);
  on_device_ = std::make_unique<OnDevice>(device, num_rows);
}

DeviceAccessCounter::~DeviceAccessCounter() = default;

int64_t DeviceAccessCounter::memory_bytes() const { return bytes_of_counts(num_rows()); }

void DeviceAccessCounter::observe(const Lookup& lookup) { observe_all({{this, lookup}}); }

void DeviceAccessCounter::observe_all(const std::vector<Observation>& observations) {
  const DeviceGuard guard(device_);
  const cudaStream_t stream = stream_of(device_);
  const bool captures = is_capturing(stream);
  for (size_t begin = 0; begin < observations.size(); begin += kTablesPerLaunch) {
    const size_t end = std::min(observations.size(), begin + kTablesPerLaunch);
    BatchLookups batch{};
    int64_t num_blocks = 0;
    bool saturates = false;
    for (size_t i = begin; i < end; ++i) {
      auto& counter = static_cast<DeviceAccessCounter&>(*observations[i].tracker);
      const Lookup& lookup = observations[i].lookup;
      const OnDevice& memory = *counter.on_device_;
      if (lookup.num_indices == 0) continue;
      batch.tables[batch.num_tables++] = {lookup.indices,
                                          lookup.num_indices,
                                          memory.row(0),
                                          counter.num_rows(),
                                          memory.fault.on_device<Fault>(),
                                          memory.fault_is_claimed.as<unsigned>(),
                                          static_cast<int32_t>(num_blocks),
                                          item_size(lookup.dtype)};
      num_blocks += blocks_for(lookup.num_indices, kLookupsPerBlock);
      counter.is_in_graph_ = counter.is_in_graph_ || captures;
      saturates = saturates || counter.is_in_graph_ || lookup.num_indices > counter.headroom_;
      counter.headroom_ = std::max<int64_t>(0, counter.headroom_ - lookup.num_indices);
    }
    CPR_EXT_LAUNCH(saturates ? count_lookups_kernel<true> : count_lookups_kernel<false>, num_blocks,
                   kThreads, stream, batch);
  }
}

void DeviceAccessCounter::report_faults() {
  volatile Fault* const fault = on_device_->read_fault();
  if (fault->is_set == 0) return;
  const int64_t index = fault->index;
  const int64_t position = fault->position;
  fault->is_set = 0;
  const DeviceGuard guard(device_);
  CPR_EXT_CUDA(cudaMemsetAsync(on_device_->fault_is_claimed.data(), 0, sizeof(unsigned),
                               stream_of(device_)));
  throw RowIndexError("table '" + name() + "': index " + std::to_string(index) + " at position " +
                      std::to_string(position) + " of an earlier lookup on device " +
                      std::to_string(device_) + "; allowed: 0 to " +
                      std::to_string(num_rows() - 1) + " (num_rows is " +
                      std::to_string(num_rows()) + "). Indices outside were not counted");
}

std::vector<uint32_t> DeviceAccessCounter::counts() const {
  const DeviceGuard guard(device_);
  std::vector<uint32_t> counts(static_cast<size_t>(num_rows()));
  HostLink::of(device_).download(counts.data(), on_device_->row(0), memory_bytes(),
                                 stream_of(device_));
  return counts;
}

int64_t DeviceAccessCounter::count_dirty(RowRange range) const {
  const DeviceGuard guard(device_);
  const cudaStream_t stream = stream_of(device_);
  const StreamMemory sum(sizeof(unsigned long long), stream);
  CPR_EXT_CUDA(cudaMemsetAsync(sum.as<void>(), 0, sizeof(unsigned long long), stream));
  CPR_EXT_LAUNCH(count_dirty_kernel, std::min(kMostBlocks, blocks_for(range.size(), kThreads)),
                 kThreads, stream, on_device_->row(range.begin), range.size(),
                 sum.as<unsigned long long>());
  unsigned long long num_dirty = 0;
  HostLink::of(device_).download(&num_dirty, sum.as<void>(), sizeof(num_dirty), stream);
  return static_cast<int64_t>(num_dirty);
}

RowIdVector DeviceAccessCounter::list_dirty(RowRange range) const {
  return select_best(range, count_dirty(range), nullptr, nullptr);
}

RowIdVector DeviceAccessCounter::select_best(RowRange range, int64_t k, const WeightView*,
                                             ThreadPool*) const {
  return begin_select_best(range, k)->read();
}

std::unique_ptr<PendingRows> DeviceAccessCounter::begin_select_best(RowRange range,
                                                                    int64_t k) const {
  const DeviceGuard guard(device_);
  return std::make_unique<RowsOfDevice>(device_, on_device_->row(range.begin), range, k);
}

TakenRows DeviceAccessCounter::clear_rows(RowIds row_ids, const WeightView*, ThreadPool*) {
  const DeviceGuard guard(device_);
  const cudaStream_t stream = stream_of(device_);
  TakenRows taken = nothing_taken();
  if (row_ids.size == 0) return taken;
  auto late = std::make_shared<TakenOnDevice>(
      device_, 0, std::vector<int64_t>(row_ids.data, row_ids.data + row_ids.size), row_ids.size,
      stream);
  const int64_t bytes = row_ids.size * static_cast<int64_t>(sizeof(int64_t));
  const StreamMemory ids(bytes, stream);
  HostLink::of(device_).upload(ids.as<void>(), row_ids.data, bytes, stream);
  CPR_EXT_LAUNCH(take_rows_kernel, blocks_for(row_ids.size, kThreads), kThreads, stream,
                 on_device_->row(0), ids.as<int64_t>(), row_ids.size, late->counts());
  taken.late = std::move(late);
  return taken;
}

TakenRows DeviceAccessCounter::clear_range(RowRange range, const WeightView*, ThreadPool*) {
  const DeviceGuard guard(device_);
  const cudaStream_t stream = stream_of(device_);
  TakenRows taken = nothing_taken();
  if (range.size() == 0) return taken;
  const auto bytes = static_cast<size_t>(bytes_of_counts(range.size()));
  auto late = std::make_shared<TakenOnDevice>(device_, range.begin, std::vector<int64_t>(),
                                              range.size(), stream);
  uint32_t* const counts = on_device_->row(range.begin);
  CPR_EXT_CUDA(cudaMemcpyAsync(late->counts(), counts, bytes, cudaMemcpyDeviceToDevice, stream));
  CPR_EXT_CUDA(cudaMemsetAsync(counts, 0, bytes, stream));
  if (range.size() == num_rows()) headroom_ = kHighestCount;
  taken.late = std::move(late);
  return taken;
}

void DeviceAccessCounter::restore(const TakenRows& taken) {
  if (taken.row_ids.empty()) return;
  const DeviceGuard guard(device_);
  const cudaStream_t stream = stream_of(device_);
  const int64_t size = taken.num_rows();
  const int64_t id_bytes = size * static_cast<int64_t>(sizeof(int64_t));
  const StreamMemory ids(id_bytes, stream);
  const StreamMemory counts(bytes_of_counts(size), stream);
  HostLink& link = HostLink::of(device_);
  link.upload(ids.as<void>(), taken.row_ids.data(), id_bytes, stream);
  link.upload(counts.as<void>(), taken.counts.data(), bytes_of_counts(size), stream);
  CPR_EXT_LAUNCH(put_back_kernel, blocks_for(size, kThreads), kThreads, stream, on_device_->row(0),
                 ids.as<int64_t>(), size, counts.as<uint32_t>());
  headroom_ = 0;  // how high the counts are now only the device knows
}

}  // namespace cpr_ext
