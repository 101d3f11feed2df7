// How the lookups of a batch reach a device: one launch for up to 64 tables, which its parameters
// describe, so that nothing is copied first and a CUDA graph can hold it; for *.cu only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/cuda/bits.h"
#include "core/cuda/device.h"
#include "tracking/cuda/fault.h"
#include "tracking/cuda/grid.h"
#include "tracking/cuda/tracker.h"

namespace cpr_ext {

constexpr int kLookupsPerThread = 4;  // independent loads that overlap
constexpr int kLookupsPerBlock = kThreads * kLookupsPerThread;
// A launch's parameters are limited to 4 KB.
constexpr int64_t kTablesPerLaunch = 64;

// Target: what a tracker on a device is to a kernel. Its observe(index, position) is called by all
// lanes of a warp at once; a lane without a lookup, or with a bad one, gives an index of -1.
template <class Target>
struct TableLookups {
  const void* indices;
  int64_t num_indices;
  int64_t num_rows;
  FaultNote fault;
  Target target;
  int32_t first_block;
  int32_t item_bytes;
};

template <class Target>
struct BatchLookups {
  TableLookups<Target> tables[kTablesPerLaunch];
  int32_t num_tables;
};

// No branch, so that all loads are on their way before the first is waited for.
template <class Index>
__device__ inline void load_lookups(const void* from, int64_t begin, int64_t num_indices,
                                    int64_t* indices) {
  const auto* const lookups = static_cast<const Index*>(from);
  Index loaded[kLookupsPerThread];
#pragma unroll
  for (int i = 0; i < kLookupsPerThread; ++i) {
    const int64_t position = begin + i * kThreads + threadIdx.x;
    loaded[i] = position < num_indices ? lookups[position] : Index{-1};
  }
#pragma unroll
  for (int i = 0; i < kLookupsPerThread; ++i) indices[i] = loaded[i];
}

template <class Target>
__global__ void __launch_bounds__(kThreads)
    lookups_kernel(const __grid_constant__ BatchLookups<Target> batch) {
  int number = 0;
  while (number + 1 < batch.num_tables &&
         static_cast<int32_t>(blockIdx.x) >= batch.tables[number + 1].first_block) {
    ++number;
  }
  const TableLookups<Target>& table = batch.tables[number];
  const int64_t begin = (blockIdx.x - static_cast<int64_t>(table.first_block)) * kLookupsPerBlock;
  int64_t indices[kLookupsPerThread];
  if (table.item_bytes == 4) {
    load_lookups<int32_t>(table.indices, begin, table.num_indices, indices);
  } else {
    load_lookups<int64_t>(table.indices, begin, table.num_indices, indices);
  }
  bool is_bad = false;  // or behind the end
  for (int i = 0; i < kLookupsPerThread; ++i) {
    is_bad |= static_cast<uint64_t>(indices[i]) >= static_cast<uint64_t>(table.num_rows);
  }
  if (is_bad) {
    for (int i = 0; i < kLookupsPerThread; ++i) {
      const int64_t position = begin + i * kThreads + threadIdx.x;
      if (static_cast<uint64_t>(indices[i]) < static_cast<uint64_t>(table.num_rows)) continue;
      if (position < table.num_indices) table.fault.take(indices[i], position);
      indices[i] = -1;
    }
  }
  for (int i = 0; i < kLookupsPerThread; ++i) {
    table.target.observe(indices[i], begin + i * kThreads + threadIdx.x);
  }
}

// Observations of one launch.
struct LaunchOf {
  const Observation* first;
  const Observation* last;

  const Observation* begin() const { return first; }
  const Observation* end() const { return last; }
};

// Calls body(LaunchOf) for all observations that look anything up, in order. A tracker is in no
// launch more than once.
template <class Body>
void for_each_launch(std::vector<Observation> observations, Body&& body) {
  const auto is_empty = [](const Observation& each) { return each.lookup.num_indices == 0; };
  observations.erase(std::remove_if(observations.begin(), observations.end(), is_empty),
                     observations.end());
  const Observation* first = observations.data();
  const Observation* const end = first + observations.size();
  while (first != end) {
    const Observation* last = first;
    const auto is_same = [&](const Observation& each) { return each.tracker == last->tracker; };
    while (last != end && last - first < kTablesPerLaunch && std::none_of(first, last, is_same)) {
      ++last;
    }
    body(LaunchOf{first, last});
    first = last;
  }
}

// target_of(observation): the Target of its tracker. REQUIRES: the device is current.
template <class Target, class TargetOf>
void launch_lookups(const LaunchOf& observations, cudaStream_t stream, TargetOf&& target_of) {
  static_assert(sizeof(BatchLookups<Target>) <= 4096, "the parameters of a launch");
  BatchLookups<Target> batch{};
  int64_t num_blocks = 0;
  for (const Observation& each : observations) {
    const Lookup& lookup = each.lookup;
    const auto& tracker = static_cast<const DeviceTracker&>(*each.tracker);
    batch.tables[batch.num_tables++] = {lookup.indices,          lookup.num_indices,
                                        tracker.num_rows(),      tracker.fault().note(),
                                        Target{target_of(each)}, static_cast<int32_t>(num_blocks),
                                        item_size(lookup.dtype)};
    num_blocks += blocks_for(lookup.num_indices, kLookupsPerBlock);
  }
  CPR_EXT_LAUNCH(lookups_kernel<Target>, num_blocks, kThreads, stream, batch);
}

// Marks the rows looked up.
struct DirtyTarget {
  uint32_t* dirty;  // bits

  __device__ void observe(int64_t index, int64_t) const {
    if (index >= 0) set_bit(dirty, index);
  }
};

}  // namespace cpr_ext
