// How the sample of SSU is drawn, on every backend.
#pragma once

#include <cstdint>
#include <string>

#include "core/random.h"

namespace cpr_ext {

struct SamplerOptions {
  int64_t capacity = 1;  // most rows in the sample, >= 1
  int64_t period = 2;    // every period-th lookup of the table is sampled, >= 1; 1: all
  uint64_t seed = 0;

  // The options for a table, with a capacity of at most its rows. Throws UsageError.
  SamplerOptions checked(const std::string& table, int64_t num_rows) const;

  // Of the lots by which sampled rows are chosen: another one after every lookup.
  CPR_EXT_HOST_DEVICE uint64_t salt(uint64_t num_observed) const {
    return mix_bits(seed ^ mix_bits(num_observed));
  }
};

}  // namespace cpr_ext
