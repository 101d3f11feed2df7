// How the sample of SSU is drawn, on every backend.
#pragma once

#include <cstdint>
#include <string>

#include "core/random.h"

namespace cpr_ext {

struct SamplerOptions {
  int64_t capacity = 1;  // most rows in the sample, >= 1
  int64_t period = 2;    // one lookup in `period` of the table is sampled, >= 1; 1: all
  uint64_t seed = 0;

  // The options for a table, with a capacity of at most its rows and a period of at most more
  // lookups than there will be. Throws UsageError.
  SamplerOptions checked(const std::string& table, int64_t num_rows) const;

  // Lookups are numbered from 0 over the tracker's life. Of each `period` of them in a row one is
  // sampled: the one at a random place, which is drawn again after 32 periods. A place for good
  // would also be one column of all bags of a length that `period` divides. (A draw per period
  // would make counting a fifth slower.)
  static constexpr int64_t kPeriodsPerRun = 32;
  CPR_EXT_HOST_DEVICE int64_t run_size() const { return kPeriodsPerRun * period; }
  CPR_EXT_HOST_DEVICE int64_t place_in(uint64_t run) const {
    return static_cast<int64_t>(random_below(static_cast<uint64_t>(period), ~seed, run));
  }

  // Of the random scores that choose among sampled rows: another one after every lookup.
  CPR_EXT_HOST_DEVICE uint64_t salt(uint64_t num_observed) const {
    return mix_bits(seed ^ mix_bits(num_observed));
  }
};

}  // namespace cpr_ext
