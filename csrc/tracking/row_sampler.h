// SSU: a bounded random sample of the lookups, for where four bytes per row are too many.
#pragma once

#include <string>
#include <vector>

#include "core/row_id_vector.h"
#include "tracking/dirty_rows.h"
#include "tracking/row_tracker.h"
#include "tracking/sampler_options.h"

namespace cpr_ext {

// Of each `period` lookups in a row, counted over the tracker's life, the one at a random place
// puts its row into the sample (SamplerOptions::place_in) unless it is there; a full sample first
// evicts a random member.
//
// The sample is the score: sampled rows are selected before all others that are dirty, which fill
// what is left of `k`. Among rows of one kind, those with the highest hash of (seed, lookups seen
// so far, row id) are: no row is favoured over time, and the same state gives the same answer.
class RowSampler final : public RowTracker {
 public:
  RowSampler(std::string name, int64_t num_rows, const SamplerOptions& options);

  const char* kind() const override { return "RowSampler"; }
  int64_t memory_bytes() const override;
  void observe(const Lookup& lookup) override;

  int64_t num_sampled() const { return static_cast<int64_t>(sample_.size()); }
  const SamplerOptions& options() const { return options_; }

 private:
  int64_t count_dirty(RowRange range) const override;
  bool has_no_dirty(RowRange range) const override;
  RowIdVector list_dirty(RowRange range) const override;
  RowIdVector select_best(RowRange range, int64_t k, const WeightView* weight,
                          ThreadPool* pool) const override;
  TakenRows clear_rows(RowIds row_ids, const WeightView* weight, ThreadPool* pool) override;
  TakenRows clear_range(RowRange range, const WeightView* weight, ThreadPool* pool) override;
  void restore(const TakenRows& taken) override;

  RowIdVector select_unsampled(RowRange range, int64_t k, ThreadPool* pool) const;
  void add_to_sample(int64_t row_id);
  void forget(TakenRows& taken);

  SamplerOptions options_;
  DirtyRows dirty_;
  DirtyRows sampled_;            // Invariant: the rows in sample_, a subset of dirty_
  std::vector<int64_t> sample_;  // in order of arrival; an arrival takes its victim's place
  uint64_t num_observed_ = 0;
  uint64_t num_drawn_ = 0;  // random numbers
};

}  // namespace cpr_ext
