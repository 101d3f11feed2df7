#include <algorithm>
#include <limits>

#include "core/cuda/device.h"
#include "core/cuda/host_link.h"
#include "core/error.h"
#include "tracking/cuda/dirty_marks.h"
#include "tracking/cuda/grid.h"
#include "tracking/cuda/lookups.h"
#include "tracking/cuda/pending_rows.h"
#include "tracking/cuda/row_list.h"
#include "tracking/cuda/row_sampler.h"
#include "tracking/cuda/sample.h"

namespace cpr_ext {

namespace {

constexpr int64_t kMostReleaseBlocks = 256;  // of a table

struct SampleTarget {
  DeviceSample* sample;

  __device__ void observe(int64_t index, int64_t position) const {
    if (index < 0) return;
    set_bit(sample->dirty, index);
    if (sample->is_due(position)) sample->enter(index);
  }
};

struct BatchSamples {
  DeviceSample* samples[kTablesPerLaunch];
  int64_t num_lookups[kTablesPerLaunch];
  int32_t num_tables;

  void add(DeviceSample* sample, int64_t lookups) {
    samples[num_tables] = sample;
    num_lookups[num_tables++] = lookups;
  }
};

// Makes samples ready for rows to enter: numbers a batch's lookups and frees the slots of rows that
// were taken, mostly none. grid: (blocks over the slots, tables).
__global__ void __launch_bounds__(kThreads)
    prepare_samples_kernel(const __grid_constant__ BatchSamples batch) {
  DeviceSample& sample = *batch.samples[blockIdx.y];
  if (thread_of_grid() == 0) sample.begin_batch(batch.num_lookups[blockIdx.y]);
  if (*static_cast<volatile SlotCount*>(&sample.num_stale) == 0)
    return;  // or others found them all
  for (int64_t slot = thread_of_grid(); slot < sample.options.capacity;
       slot += static_cast<int64_t>(gridDim.x) * kThreads) {
    sample.release(static_cast<SlotCount>(slot));
  }
}

__global__ void __launch_bounds__(kThreads) free_all_slots_kernel(DeviceSample* sample) {
  const int64_t i = thread_of_grid();
  const int64_t capacity = sample->options.capacity;
  if (i >= capacity) return;
  sample->rows[i] = kEmptySlot;
  sample->free_slots[i] = static_cast<uint32_t>(capacity - 1 - i);  // the first comes out first
}

// Values: 1, or 2 for a row that was in the sample.
__global__ void __launch_bounds__(kThreads)
    take_sampled_kernel(DeviceSample* sample, RowList rows, uint32_t* taken) {
  const int64_t i = thread_of_grid();
  if (i >= rows.size) return;
  const int64_t row = rows.row(i);
  taken[i] = 0;
  if (!is_bit_set(sample->dirty, row)) return;
  clear_bit(sample->dirty, row);
  taken[i] = sample->leave(row) ? 2 : 1;
}

__global__ void __launch_bounds__(kThreads)
    put_back_sampled_kernel(DeviceSample* sample, RowList rows, const uint32_t* taken) {
  const int64_t i = thread_of_grid();
  if (i >= rows.size) return;
  set_bit(sample->dirty, rows.row(i));
  if (taken[i] == 2) sample->enter(rows.row(i));
}

// REQUIRES: the device is current.
void prepare(const BatchSamples& batch, int64_t highest_capacity, cudaStream_t stream) {
  const int64_t num_blocks = std::min(kMostReleaseBlocks, blocks_for(highest_capacity));
  CPR_EXT_LAUNCH(prepare_samples_kernel, Grid(num_blocks, batch.num_tables), kThreads, stream,
                 batch);
}

SamplerOptions checked(const SamplerOptions& options, const std::string& table, int64_t num_rows) {
  const SamplerOptions checked = options.checked(table, num_rows);
  constexpr int64_t kMostSlots = std::numeric_limits<uint32_t>::max();
  if (checked.capacity <= kMostSlots) return checked;
  throw UsageError("table '" + table + "': capacity is " + std::to_string(checked.capacity) +
                   "; a sample on a device holds at most " + std::to_string(kMostSlots) +
                   " rows: choose a smaller fraction");
}

}  // namespace

struct DeviceRowSampler::OnDevice {
  OnDevice(int64_t num_rows, const SamplerOptions& options, int device, cudaStream_t stream)
      : dirty(num_rows, stream),
        sampled(num_rows, stream),
        rows(options.capacity * static_cast<int64_t>(sizeof(SlotCount))),
        free_slots(options.capacity * static_cast<int64_t>(sizeof(uint32_t))),
        state(sizeof(DeviceSample)) {
    DeviceSample sample{};
    sample.options = options;
    sample.dirty = dirty.words();
    sample.sampled = sampled.words();
    sample.rows = rows.as<SlotCount>();
    sample.free_slots = free_slots.as<uint32_t>();
    sample.num_free = static_cast<SlotCount>(options.capacity);
    sample.salt = options.salt(0);
    HostLink::of(device).upload(state.data(), &sample, sizeof(sample), stream);
    CPR_EXT_LAUNCH(free_all_slots_kernel, blocks_for(options.capacity), kThreads, stream, get());
  }

  DeviceSample* get() const { return state.as<DeviceSample>(); }

  DeviceBitmap dirty;
  DeviceBitmap sampled;
  DeviceMemory rows;
  DeviceMemory free_slots;
  DeviceMemory state;
};

DeviceRowSampler::DeviceRowSampler(std::string name, int64_t num_rows,
                                   const SamplerOptions& options, int device)
    : DeviceTracker(name, num_rows, device), options_(checked(options, name, num_rows)) {
  const DeviceGuard guard(device);
  on_device_ = std::make_unique<OnDevice>(num_rows, options_, device, stream_of(device));
  load_kernel(prepare_samples_kernel);
  load_kernel(lookups_kernel<SampleTarget>);
}

DeviceRowSampler::~DeviceRowSampler() = default;

int64_t DeviceRowSampler::memory_bytes() const {
  constexpr int64_t kSlotBytes = sizeof(SlotCount) + sizeof(uint32_t);
  return on_device_->dirty.num_bytes() + on_device_->sampled.num_bytes() +
         options_.capacity * kSlotBytes;
}

DirtyMarks DeviceRowSampler::dirty_marks() const { return {on_device_->dirty.words(), false}; }

void DeviceRowSampler::observe_all(const std::vector<Observation>& observations) {
  const DeviceGuard guard(device());
  const cudaStream_t stream = stream_of(device());
  for_each_launch(observations, [&](const LaunchOf& launch) {
    BatchSamples batch{};
    int64_t highest_capacity = 0;
    for (const Observation& each : launch) {
      const auto& sampler = static_cast<const DeviceRowSampler&>(*each.tracker);
      batch.add(sampler.on_device_->get(), each.lookup.num_indices);
      highest_capacity = std::max(highest_capacity, sampler.options_.capacity);
    }
    prepare(batch, highest_capacity, stream);
    launch_lookups<SampleTarget>(launch, stream, [](const Observation& each) {
      return static_cast<const DeviceRowSampler&>(*each.tracker).on_device_->get();
    });
  });
}

int64_t DeviceRowSampler::num_sampled() const {
  return sums_on_device(device(), 1, [&](unsigned long long* sum, cudaStream_t stream) {
    launch_count({on_device_->sampled.words(), false}, {0, num_rows()}, sum, stream);
  })[0];
}

std::unique_ptr<PendingRows> DeviceRowSampler::begin_select_best(RowRange range, int64_t k,
                                                                 const WeightView*) const {
  const DeviceGuard guard(device());
  const SetBits dirty{on_device_->dirty.words(), range.begin};
  const RandomScores scores{dirty, on_device_->sampled.words(), &on_device_->get()->salt};
  return std::make_unique<DevicePendingRows>(device(), scores, range, k);
}

const TakenCodec& DeviceRowSampler::codec() const {
  static const TakenCodec codec{
      [](TakenRows* taken, uint32_t value) { taken->counts.push_back(value - 1); },
      [](const TakenRows& taken, size_t i) { return taken.counts[i] + 1; }};
  return codec;
}

void DeviceRowSampler::launch_take(const RowList& rows, const WeightView*, uint32_t* values) {
  CPR_EXT_LAUNCH(take_sampled_kernel, blocks_for(rows.size), kThreads, stream_of(device()),
                 on_device_->get(), rows, values);
}

void DeviceRowSampler::launch_put_back(const RowList& rows, const uint32_t* values) {
  BatchSamples batch{};
  batch.add(on_device_->get(), 0);
  prepare(batch, options_.capacity, stream_of(device()));
  CPR_EXT_LAUNCH(put_back_sampled_kernel, blocks_for(rows.size), kThreads, stream_of(device()),
                 on_device_->get(), rows, values);
}

}  // namespace cpr_ext
