#include "tracking/change_meter.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/error.h"
#include "selection/top_rows.h"
#include "tracking/row_change.h"

namespace cpr_ext {

namespace {

constexpr int64_t kRowsPerTask = 2048;
constexpr int64_t kPrefetchRows = 8;

template <class Body>
void in_blocks(int64_t size, ThreadPool* pool, const Body& body) {
  const int64_t num_tasks = (size + kRowsPerTask - 1) / kRowsPerTask;
  const auto task = [&](int64_t i) {
    body(i * kRowsPerTask, std::min(size, (i + 1) * kRowsPerTask));
  };
  if (pool != nullptr && num_tasks > 1) {
    pool->parallel_for(num_tasks, task);
  } else {
    for (int64_t i = 0; i < num_tasks; ++i) task(i);
  }
}

}  // namespace

MeasuredWeight::MeasuredWeight(std::string table, const WeightView& weight)
    : table_(std::move(table)),
      dtype_(weight.dtype),
      num_rows_(weight.num_rows),
      embedding_dim_(weight.embedding_dim) {
  if (!is_floating(weight.dtype) || weight.embedding_dim < 1) {
    throw UsageError("table '" + table_ + "': change is measured on a floating weight with at" +
                     " least one column");
  }
}

const WeightView& MeasuredWeight::checked(const WeightView* weight) const {
  if (weight == nullptr) {
    throw UsageError("table '" + table_ + "': a ChangeMeter measures the table; pass weight=");
  }
  if (weight->dtype != dtype_ || weight->num_rows != num_rows_ ||
      weight->embedding_dim != embedding_dim_) {
    throw UsageError("table '" + table_ + "': weight has another shape or dtype than the (" +
                     std::to_string(num_rows_) + ", " + std::to_string(embedding_dim_) +
                     ") one this ChangeMeter was made with");
  }
  return *weight;
}

void MeasuredWeight::refuse_nan(int64_t row_id) const {
  throw NanError("table '" + table_ + "': row " + std::to_string(row_id) +
                 " holds NaN; the model has diverged, its last good state is kept");
}

ChangeMeter::ChangeMeter(std::string name, const WeightView& weight)
    : RowTracker(name, weight.num_rows), weight_(name, weight), dirty_(name, weight.num_rows) {
  baseline_.reset(new std::byte[static_cast<size_t>(weight.num_rows * weight_.row_bytes())]);
  for (int64_t row_id = 0; row_id < weight.num_rows; ++row_id) rebase(row_id, weight);
}

int64_t ChangeMeter::memory_bytes() const {
  const size_t carried = carried_.size() * (sizeof(*carried_.begin()) + 2 * sizeof(void*));
  return num_rows() * weight_.row_bytes() + dirty_.memory_bytes() + static_cast<int64_t>(carried);
}

void ChangeMeter::observe(const Lookup& lookup) { dirty_.observe(lookup); }

int64_t ChangeMeter::count_dirty(RowRange range) const { return dirty_.num_dirty(range); }

bool ChangeMeter::has_no_dirty(RowRange range) const { return dirty_.is_clean(range); }

RowIdVector ChangeMeter::list_dirty(RowRange range) const { return dirty_.dirty_rows(range); }

RowIdVector ChangeMeter::select_best(RowRange range, int64_t k, const WeightView* weight,
                                     ThreadPool* pool) const {
  const RowIdVector row_ids = dirty_.dirty_rows(range);
  const std::vector<float> changes = measure(row_ids, weight_.checked(weight), pool);
  RowIdVector chosen = top_rows(changes.data(), static_cast<int64_t>(changes.size()), k, pool);
  for (int64_t& position : chosen) position = row_ids[position];
  return chosen;
}

TakenRows ChangeMeter::clear_rows(RowIds row_ids, const WeightView* weight, ThreadPool* pool) {
  const WeightView& now = weight_.checked(weight);
  TakenRows taken = nothing_taken();
  for (int64_t i = 0; i < row_ids.size; ++i) {
    if (dirty_.is_dirty(row_ids.data[i])) taken.row_ids.push_back(row_ids.data[i]);
  }
  taken.changes = measure(taken.row_ids, now, pool);
  in_blocks(row_ids.size, pool, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) rebase(row_ids.data[i], now);
  });
  for (const int64_t row_id : taken.row_ids) {
    dirty_.clear(row_id);
    if (!carried_.empty()) carried_.erase(row_id);
  }
  return taken;
}

TakenRows ChangeMeter::clear_range(RowRange range, const WeightView* weight, ThreadPool* pool) {
  const WeightView& now = weight_.checked(weight);
  TakenRows taken = nothing_taken();
  taken.row_ids = dirty_.dirty_rows(range);
  taken.changes = measure(taken.row_ids, now, pool);
  in_blocks(range.size(), pool, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) rebase(range.begin + i, now);
  });
  for (const int64_t row_id : taken.row_ids) {
    dirty_.clear(row_id);
    if (!carried_.empty()) carried_.erase(row_id);
  }
  return taken;
}

void ChangeMeter::restore(const TakenRows& taken) {
  for (size_t i = 0; i < taken.row_ids.size(); ++i) {
    dirty_.mark(taken.row_ids[i]);
    carried_[taken.row_ids[i]] += taken.changes[i];
  }
}

// (row_ids.size()) scores. Throws NanError for the lowest row that holds NaN.
std::vector<float> ChangeMeter::measure(const RowIdVector& row_ids, const WeightView& weight,
                                        ThreadPool* pool) const {
  std::vector<float> changes(row_ids.size());
  in_blocks(static_cast<int64_t>(row_ids.size()), pool, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (i + kPrefetchRows < end) {
        __builtin_prefetch(weight.row(row_ids[i + kPrefetchRows]));
        __builtin_prefetch(baseline_row(row_ids[i + kPrefetchRows]));
      }
      const int64_t row_id = row_ids[i];
      float change = row_change(weight_.dtype(), weight.row(row_id), baseline_row(row_id),
                                weight_.embedding_dim());
      if (!carried_.empty()) {
        const auto carried = carried_.find(row_id);
        if (carried != carried_.end()) change += carried->second;
      }
      changes[i] = change < kSmallestChange ? kSmallestChange : change;  // keeps NaN
    }
  });
  const auto nan =
      std::find_if(changes.begin(), changes.end(), [](float c) { return std::isnan(c); });
  if (nan != changes.end()) weight_.refuse_nan(row_ids[nan - changes.begin()]);
  return changes;
}

void ChangeMeter::rebase(int64_t row_id, const WeightView& weight) {
  std::memcpy(baseline_row(row_id), weight.row(row_id), static_cast<size_t>(weight_.row_bytes()));
}

}  // namespace cpr_ext
