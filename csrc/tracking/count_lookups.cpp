#include "tracking/count_lookups.h"

#include <algorithm>
#include <exception>
#include <map>
#include <numeric>
#include <string>
#include <utility>

#include "core/error.h"

namespace cpr_ext {

namespace {

// Measured on two cores: with fewer lookups than this, waking the pool and moving counters from one
// core's cache to another's cost as much as the second thread saves.
constexpr int64_t kFewestShared = 1 << 18;

// REQUIRES: all are checked.
void count_on_host(const std::vector<RowTracker*>& trackers, const std::vector<Lookup>& lookups,
                   ThreadPool* pool) {
  int64_t num_indices = 0;
  for (const Lookup& lookup : lookups) num_indices += lookup.num_indices;
  if (pool == nullptr || pool->num_threads() == 1 || num_indices < kFewestShared) {
    for (size_t i = 0; i < lookups.size(); ++i) trackers[i]->observe(lookups[i]);
    return;
  }
  std::vector<size_t> order(lookups.size());  // lookups of one tracker side by side
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return std::less<RowTracker*>()(trackers[a], trackers[b]);
  });
  std::vector<size_t> starts;  // of each tracker's run in `order`
  for (size_t i = 0; i < order.size(); ++i) {
    if (i == 0 || trackers[order[i]] != trackers[order[i - 1]]) starts.push_back(i);
  }
  pool->parallel_for(static_cast<int64_t>(starts.size()), [&](int64_t task) {
    const size_t run = static_cast<size_t>(task);
    const size_t end = run + 1 < starts.size() ? starts[run + 1] : order.size();
    for (size_t i = starts[run]; i < end; ++i) trackers[order[i]]->observe(lookups[order[i]]);
  });
}

}  // namespace

void count_lookups(const std::vector<RowTracker*>& trackers, const std::vector<Lookup>& lookups,
                   ThreadPool* pool) {
  // Trackers of one class on one device share their launches.
  std::map<std::pair<int, std::string>, std::vector<Observation>> on_devices;
  for (size_t i = 0; i < lookups.size(); ++i) {
    trackers[i]->check(lookups[i]);
    if (trackers[i]->device() == kHostMemory) continue;
    on_devices[{trackers[i]->device(), trackers[i]->kind()}].push_back({trackers[i], lookups[i]});
  }
  if (on_devices.empty()) return count_on_host(trackers, lookups, pool);
  std::exception_ptr fault;  // of an earlier batch: this one is counted nevertheless
  try {
    for (RowTracker* tracker : trackers) tracker->report_faults();
  } catch (const RowIndexError&) {
    fault = std::current_exception();
  }
  for (const auto& [_, observations] : on_devices) {
    observations.front().tracker->observe_all(observations);
  }
  std::vector<RowTracker*> host_trackers;
  std::vector<Lookup> host_lookups;
  for (size_t i = 0; i < lookups.size(); ++i) {
    if (trackers[i]->device() != kHostMemory) continue;
    host_trackers.push_back(trackers[i]);
    host_lookups.push_back(lookups[i]);
  }
  count_on_host(host_trackers, host_lookups, pool);
  if (fault) std::rethrow_exception(fault);
}

}  // namespace cpr_ext
