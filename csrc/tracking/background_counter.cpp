#include "tracking/background_counter.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "tracking/count_lookups.h"

namespace cpr_ext {

namespace {

// So many wake the thread. Until then whoever waits counts them, in some tens of microseconds.
constexpr int64_t kFewest = 1 << 14;
// More are counted in place, so that their copy takes little memory (32 MiB).
constexpr int64_t kMost = 1 << 22;

}  // namespace

BackgroundCounter::BackgroundCounter(std::shared_ptr<ThreadPool> pool)
    : creator_(::getpid()), pool_(std::move(pool)), thread_([this] { work(); }) {}

BackgroundCounter::~BackgroundCounter() {
  stop();
  try {
    if (!error_) count_gathered();
  } catch (...) {  // as of the thread: there is no later call to report it
  }
  for (RowTracker* tracker : known_) tracker->set_backlog(nullptr);
}

void BackgroundCounter::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_stopping_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

void BackgroundCounter::GatheredRows::add(const std::vector<RowTracker*>& trackers,
                                          const std::vector<Lookup>& lookups) {
  const size_t num_indices = indices.size(), num_parts = parts.size();
  try {
    for (size_t i = 0; i < lookups.size(); ++i) {
      const bool is_repeated = i > 0 && lookups[i].indices == lookups[i - 1].indices &&
                               lookups[i].num_indices == lookups[i - 1].num_indices &&
                               lookups[i].dtype == lookups[i - 1].dtype;
      if (is_repeated) {  // another tracker of the same table
        parts.push_back({trackers[i], parts.back().begin, parts.back().end});
        continue;
      }
      const auto begin = static_cast<int64_t>(indices.size());
      visit_indices(lookups[i], [&](const auto* first, int64_t size) {
        indices.insert(indices.end(), first, first + size);
      });
      parts.push_back({trackers[i], begin, static_cast<int64_t>(indices.size())});
    }
  } catch (...) {
    indices.resize(num_indices);
    parts.resize(num_parts);
    throw;
  }
}

void BackgroundCounter::GatheredRows::count(ThreadPool* pool) {
  std::vector<RowTracker*> trackers;
  std::vector<Lookup> lookups;
  trackers.reserve(parts.size());
  lookups.reserve(parts.size());
  for (const GatheredLookup& part : parts) {
    trackers.push_back(part.tracker);
    lookups.push_back(
        {indices.data() + part.begin, DType::kInt64, part.end - part.begin, kHostMemory});
  }
  parts.clear();
  count_lookups(trackers, lookups, pool);
  indices.clear();
}

void BackgroundCounter::know(const std::vector<RowTracker*>& trackers) {
  if (trackers == newest_) return;
  for (RowTracker* tracker : trackers) {
    const auto place = std::lower_bound(known_.begin(), known_.end(), tracker);
    if (place != known_.end() && *place == tracker) continue;
    known_.insert(place, tracker);
    tracker->set_backlog(this);
  }
  newest_ = trackers;
}

void BackgroundCounter::count(const std::vector<RowTracker*>& trackers,
                              const std::vector<Lookup>& lookups) {
  int64_t num_indices = 0;
  for (size_t i = 0; i < lookups.size(); ++i) {
    trackers[i]->check(lookups[i]);
    num_indices += lookups[i].num_indices;
  }
  if (::getpid() != creator_) return count_lookups(trackers, lookups, pool_.get());
  if (num_indices > kMost) {
    wait();
    return count_lookups(trackers, lookups, pool_.get());
  }
  Lock lock(mutex_);
  if (error_) std::rethrow_exception(error_);
  know(trackers);
  const auto size = static_cast<int64_t>(gathered_.indices.size()) + num_indices;
  if (size > kMost) wait_until_idle(lock);
  gathered_.add(trackers, lookups);
  if (is_busy_ || size < kFewest) return;
  std::swap(gathered_, counted_);
  is_busy_ = true;
  lock.unlock();
  wake_.notify_one();
}

// REQUIRES: the mutex is held, nothing is wrong, and the thread is idle.
void BackgroundCounter::count_gathered() {
  try {
    gathered_.count(pool_.get());
  } catch (...) {
    error_ = std::current_exception();
    throw;
  }
}

void BackgroundCounter::wait_until_idle(Lock& lock) {
  idle_.wait(lock, [&] { return !is_busy_; });
  if (error_) std::rethrow_exception(error_);
}

void BackgroundCounter::wait() {
  if (::getpid() != creator_) return;
  Lock lock(mutex_);
  wait_until_idle(lock);
  if (!gathered_.parts.empty()) count_gathered();
}

std::optional<std::string> BackgroundCounter::error() {
  if (::getpid() != creator_) return std::nullopt;  // the mutex may be locked for ever
  std::lock_guard<std::mutex> lock(mutex_);
  if (!error_) return std::nullopt;
  try {
    std::rethrow_exception(error_);
  } catch (const std::exception& error) {
    return error.what();
  }
}

void BackgroundCounter::work() {
  Lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [&] { return is_busy_ || is_stopping_; });
    if (!is_busy_) return;
    lock.unlock();
    std::exception_ptr error;
    try {
      counted_.count(pool_.get());
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    is_busy_ = false;
    if (error) error_ = error;
    idle_.notify_all();
  }
}

}  // namespace cpr_ext
