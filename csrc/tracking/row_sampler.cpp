#include "tracking/row_sampler.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/random.h"
#include "selection/random_scores.h"
#include "selection/top_rows.h"

namespace cpr_ext {

namespace {

// So that run_size() is a number.
constexpr int64_t kHighestPeriod = (int64_t{1} << 61) / SamplerOptions::kPeriodsPerRun;

RowIdVector best_of(const RowIdVector& row_ids, const std::vector<uint32_t>& scores, int64_t k,
                    ThreadPool* pool) {
  RowIdVector chosen = top_rows(scores.data(), static_cast<int64_t>(scores.size()), k, pool);
  for (int64_t& position : chosen) position = row_ids[position];
  return chosen;
}

}  // namespace

SamplerOptions SamplerOptions::checked(const std::string& table, int64_t num_rows) const {
  if (capacity < 1) {
    throw UsageError("table '" + table + "': capacity is " + std::to_string(capacity) +
                     "; the sample must hold at least 1 row");
  }
  if (period < 1) {
    throw UsageError("table '" + table + "': period is " + std::to_string(period) +
                     "; it must be at least 1 (1: every lookup is sampled)");
  }
  SamplerOptions options = *this;
  options.capacity = std::min(capacity, num_rows);
  options.period = std::min(period, kHighestPeriod);
  return options;
}

RowSampler::RowSampler(std::string name, int64_t num_rows, const SamplerOptions& options)
    : RowTracker(name, num_rows),
      options_(options.checked(name, num_rows)),
      dirty_(name, num_rows),
      sampled_(name, num_rows) {
  sample_.reserve(static_cast<size_t>(options_.capacity));
}

int64_t RowSampler::memory_bytes() const {
  return dirty_.memory_bytes() + sampled_.memory_bytes() +
         static_cast<int64_t>(sample_.capacity() * sizeof(int64_t));
}

// Inlined where lookups are counted: a call for each would cost a tenth of that.
__attribute__((always_inline)) inline void RowSampler::add_to_sample(int64_t row_id) {
  if (sampled_.is_dirty(row_id)) return;
  if (num_sampled() < options_.capacity) {
    sample_.push_back(row_id);
  } else {
    int64_t& victim = sample_[random_below(sample_.size(), options_.seed, num_drawn_++)];
    sampled_.clear(victim);
    victim = row_id;
  }
  sampled_.mark(row_id);
}

void RowSampler::observe(const Lookup& lookup) {
  dirty_.observe(lookup);
  const SamplerOptions options = options_;  // which the loops need not load again
  const uint64_t first = num_observed_;
  num_observed_ += static_cast<uint64_t>(lookup.num_indices);
  if (options.period == 1) {
    visit_indices(lookup, [&](const auto* indices, int64_t num_indices) {
      for (int64_t i = 0; i < num_indices; ++i) add_to_sample(indices[i]);
    });
    return;
  }
  const int64_t run_size = options.run_size();
  visit_indices(lookup, [&](const auto* indices, int64_t num_indices) {
    uint64_t run = first / static_cast<uint64_t>(run_size);
    int64_t begin = -static_cast<int64_t>(first % static_cast<uint64_t>(run_size));
    for (; begin < num_indices; begin += run_size, ++run) {
      const int64_t end = std::min(begin + run_size, num_indices);
      int64_t i = begin + options.place_in(run);
      while (i < 0) i += options.period;  // of the first run, sampled of earlier batches
      for (; i < end; i += options.period) add_to_sample(indices[i]);
    }
  });
}

int64_t RowSampler::count_dirty(RowRange range) const { return dirty_.num_dirty(range); }

bool RowSampler::has_no_dirty(RowRange range) const { return dirty_.is_clean(range); }

RowIdVector RowSampler::list_dirty(RowRange range) const { return dirty_.dirty_rows(range); }

RowIdVector RowSampler::select_best(RowRange range, int64_t k, const WeightView*,
                                    ThreadPool* pool) const {
  RowIdVector sampled = sampled_.dirty_rows(range);
  const int64_t left = k - static_cast<int64_t>(sampled.size());
  if (left == 0) return sampled;
  if (left < 0) {
    const uint64_t salt = options_.salt(num_observed_);
    std::vector<uint32_t> scores(sampled.size());
    for (size_t i = 0; i < scores.size(); ++i) scores[i] = random_score(salt, sampled[i], true);
    return best_of(sampled, scores, k, pool);
  }
  const RowIdVector others = select_unsampled(range, left, pool);
  RowIdVector both(sampled.size() + others.size());
  std::merge(sampled.begin(), sampled.end(), others.begin(), others.end(), both.begin());
  return both;
}

// Rows that are dirty and not in the sample. Needs memory for somewhat more than k rows, however
// many are dirty: most are passed over by their score.
RowIdVector RowSampler::select_unsampled(RowRange range, int64_t k, ThreadPool* pool) const {
  const int64_t in_range = dirty_.num_dirty_besides(sampled_, range);
  if (in_range <= k) {
    RowIdVector all(static_cast<size_t>(in_range));
    int64_t* next = all.data();
    dirty_.visit_besides(sampled_, range, [&](int64_t row_id) { *next++ = row_id; });
    return all;
  }
  const uint64_t salt = options_.salt(num_observed_);
  RowIdVector row_ids;
  std::vector<uint32_t> scores;
  // Scores are uniform: so many rows lie above the lowest one, but for one selection in millions.
  for (double wanted = k + 5 * std::sqrt(k) + 16;; wanted *= 2) {
    const double share = std::max(0.0, 1 - wanted / static_cast<double>(in_range));
    const auto lowest = static_cast<uint32_t>(share * kFirstScore);
    row_ids.clear();
    scores.clear();
    row_ids.reserve(static_cast<size_t>(std::min(wanted, static_cast<double>(in_range))));
    scores.reserve(row_ids.capacity());
    dirty_.visit_besides(sampled_, range, [&](int64_t row_id) {
      const uint32_t score = random_score(salt, row_id, false);
      if (score < lowest) return;
      row_ids.push_back(row_id);
      scores.push_back(score);
    });
    if (lowest == 0 || static_cast<int64_t>(row_ids.size()) >= k) break;
  }
  return best_of(row_ids, scores, k, pool);
}

// Removes the rows of `taken`, already clean, from the sample, and notes which were in it.
void RowSampler::forget(TakenRows& taken) {
  taken.counts.reserve(taken.row_ids.size());
  bool any = false;
  for (const int64_t row_id : taken.row_ids) {
    taken.counts.push_back(sampled_.is_dirty(row_id) ? 1 : 0);
    any |= taken.counts.back() != 0;
    sampled_.clear(row_id);
  }
  if (!any) return;
  const auto gone = std::remove_if(sample_.begin(), sample_.end(),
                                   [&](int64_t row_id) { return !sampled_.is_dirty(row_id); });
  sample_.erase(gone, sample_.end());
}

TakenRows RowSampler::clear_rows(RowIds row_ids, const WeightView*, ThreadPool*) {
  TakenRows taken = dirty_.take(row_ids, nullptr, nullptr);
  taken.kind = kind();
  forget(taken);
  return taken;
}

TakenRows RowSampler::clear_range(RowRange range, const WeightView*, ThreadPool*) {
  TakenRows taken = dirty_.take_range(range, nullptr, nullptr);
  taken.kind = kind();
  forget(taken);
  return taken;
}

void RowSampler::restore(const TakenRows& taken) {
  for (size_t i = 0; i < taken.row_ids.size(); ++i) {
    dirty_.mark(taken.row_ids[i]);
    if (taken.counts[i] != 0) add_to_sample(taken.row_ids[i]);
  }
}

}  // namespace cpr_ext
