#include "tracking/background_counter.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "tracking/count_lookups.h"

namespace cpr_ext {

namespace {

// Fewer are counted before a thread would be awake.
constexpr int64_t kFewest = 512;
// More are counted in place, so that their copy takes little memory (32 MiB).
constexpr int64_t kMost = 1 << 22;

template <class Index>
void append(const Index* indices, int64_t num_indices, int64_t* to) {
  std::copy(indices, indices + num_indices, to);
}

}  // namespace

BackgroundCounter::BackgroundCounter(std::shared_ptr<ThreadPool> pool)
    : creator_(::getpid()), pool_(std::move(pool)), thread_([this] { work(); }) {}

BackgroundCounter::~BackgroundCounter() {
  stop();
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

void BackgroundCounter::count(const std::vector<RowTracker*>& trackers,
                              const std::vector<Lookup>& lookups) {
  int64_t num_indices = 0;
  for (size_t i = 0; i < lookups.size(); ++i) {
    trackers[i]->check(lookups[i]);
    num_indices += lookups[i].num_indices;
  }
  wait();
  if (num_indices < kFewest || num_indices > kMost || ::getpid() != creator_) {
    return count_lookups(trackers, lookups, pool_.get());
  }
  for (RowTracker* tracker : trackers) {
    const auto place = std::lower_bound(known_.begin(), known_.end(), tracker);
    if (place != known_.end() && *place == tracker) continue;
    known_.insert(place, tracker);
    tracker->set_backlog(this);
  }
  indices_.resize(static_cast<size_t>(num_indices));  // before lookups point into it
  trackers_ = trackers;
  lookups_ = lookups;
  int64_t* to = indices_.data();
  for (size_t i = 0; i < lookups.size(); ++i) {
    const bool is_repeated = i > 0 && lookups[i].indices == lookups[i - 1].indices &&
                             lookups[i].num_indices == lookups[i - 1].num_indices &&
                             lookups[i].dtype == lookups[i - 1].dtype;
    if (is_repeated) {  // another tracker of the same table
      lookups_[i] = lookups_[i - 1];
      continue;
    }
    visit_indices(lookups[i],
                  [&](const auto* indices, int64_t size) { append(indices, size, to); });
    lookups_[i].indices = to;
    lookups_[i].dtype = DType::kInt64;
    to += lookups[i].num_indices;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_busy_ = true;
  }
  wake_.notify_one();
}

void BackgroundCounter::wait() {
  if (::getpid() != creator_) return;
  std::unique_lock<std::mutex> lock(mutex_);
  idle_.wait(lock, [&] { return !is_busy_; });
  if (error_) std::rethrow_exception(error_);
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
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    wake_.wait(lock, [&] { return is_busy_ || is_stopping_; });
    if (!is_busy_) return;
    lock.unlock();
    std::exception_ptr error;
    try {
      count_lookups(trackers_, lookups_, pool_.get());
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
