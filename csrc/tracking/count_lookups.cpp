#include "tracking/count_lookups.h"

#include <algorithm>
#include <numeric>

namespace cpr_ext {

namespace {

// Measured on two cores: with fewer lookups than this, waking the pool and moving counters from one
// core's cache to another's cost as much as the second thread saves.
constexpr int64_t kFewestShared = 1 << 18;

}  // namespace

void count_lookups(const std::vector<RowTracker*>& trackers, const std::vector<Lookup>& lookups,
                   ThreadPool* pool) {
  int64_t num_indices = 0;
  for (size_t i = 0; i < lookups.size(); ++i) {
    trackers[i]->check(lookups[i]);
    num_indices += lookups[i].num_indices;
  }
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

}  // namespace cpr_ext
