#include "tracking/sampler_options.h"

#include <algorithm>

#include "core/error.h"

namespace cpr_ext {

namespace {

// So that run_size() is a number.
constexpr int64_t kHighestPeriod = (int64_t{1} << 61) / SamplerOptions::kPeriodsPerRun;

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

}  // namespace cpr_ext
