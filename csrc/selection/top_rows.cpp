#include "selection/top_rows.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "core/error.h"
#include "selection/radix_threshold.h"
#include "selection/sampled_threshold.h"
#include "selection/score_keys.h"
#include "selection/score_passes.h"

namespace cpr_ext {

namespace {

// Writes a part's rows: those above the threshold and its first `num_ties` ties.
template <class Keys>
void write_part(const Keys& keys, int64_t begin, int64_t end, uint32_t last, int64_t num_ties,
                int64_t* out) {
  while (begin < end && num_ties > 0) {
    const int64_t stop = std::min(end, begin + kBlockRows);
    int64_t ties = 0;
    for (int64_t row_id = begin; row_id < stop; ++row_id) ties += keys[row_id] == last;
    if (ties <= num_ties) {
      out = write_above(keys, begin, stop, last - 1, out);
      num_ties -= ties;
    } else {
      for (int64_t row_id = begin; row_id < stop; ++row_id) {
        const bool tie = keys[row_id] == last && num_ties > 0;
        num_ties -= tie;
        if (tie || keys[row_id] > last) *out++ = row_id;
      }
    }
    begin = stop;
  }
  write_above(keys, begin, end, last, out);
}

template <class Keys>
RowIdVector rows_of(const Keys& keys, const Parts& parts, const Threshold& threshold) {
  const auto num_parts = static_cast<size_t>(parts.num_parts);
  std::vector<int64_t> first(num_parts + 1);  // where each part's rows go in the result
  std::vector<int64_t> ties(num_parts);
  int64_t ties_left = threshold.num_ties;
  for (size_t part = 0; part < num_parts; ++part) {
    ties[part] = std::min(ties_left, threshold.equal[part]);
    ties_left -= ties[part];
    first[part + 1] = first[part] + threshold.above[part] + ties[part];
  }
  if (first[num_parts] == 0) return {};
  RowIdVector row_ids(static_cast<size_t>(first[num_parts]));
  parts.for_each([&](int64_t part) {
    write_part(keys, parts.begin(part), parts.end(part), threshold.last, ties[part],
               row_ids.data() + first[part]);
  });
  return row_ids;
}

// Rows counted in the bins from `first` on.
int64_t count_from(const std::vector<Bins>& bins, int first) {
  int64_t count = 0;
  for (const Bins& part : bins) {
    count = std::accumulate(part.begin() + first, part.end(), count);
  }
  return count;
}

// Throws UsageError for the first row whose score is NaN or negative.
void check_scores(const FloatKeys& keys, int64_t num_rows) {
  for (int64_t row_id = 0; row_id < num_rows; ++row_id) {
    if (keys.is_score(row_id)) continue;
    throw UsageError("the score of row " + std::to_string(row_id) + " is " +
                     std::to_string(keys.scores[row_id]) + "; scores must be numbers from 0 on");
  }
}

// Every row whose score is not zero.
Threshold nonzero_threshold(const FloatKeys& keys, const Parts& parts) {
  Threshold threshold(parts);
  parts.for_each([&](int64_t part) {
    int64_t count = 0;
    for (int64_t row_id = parts.begin(part); row_id < parts.end(part); ++row_id) {
      count += keys[row_id] != 0;
    }
    threshold.above[part] = count;
  });
  return threshold;
}

// For so few rows that to count them in bins takes longer.
RowIdVector top_of_few(const uint32_t* scores, int64_t num_rows, int64_t k) {
  RowIdVector row_ids;
  for (int64_t row_id = 0; row_id < num_rows; ++row_id) {
    if (scores[row_id] != 0) row_ids.push_back(row_id);
  }
  if (static_cast<int64_t>(row_ids.size()) <= k) return row_ids;
  std::nth_element(row_ids.begin(), row_ids.begin() + k, row_ids.end(),
                   [scores](int64_t a, int64_t b) {
                     return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
                   });
  row_ids.resize(static_cast<size_t>(k));
  std::sort(row_ids.begin(), row_ids.end());
  return row_ids;
}

}  // namespace

RowIdVector top_rows(const uint32_t* scores, int64_t num_rows, int64_t k, ThreadPool* pool) {
  if (k <= 0 || num_rows <= 0) return {};
  if (num_rows <= kNumBins) return top_of_few(scores, num_rows, k);
  const CountKeys keys{scores};
  const Parts parts(num_rows, pool);
  if (const auto threshold = sampled_threshold(keys, parts, k, kNumBins))
    return rows_of(keys, parts, *threshold);
  // Counts are mostly small: with one bin per count, this pass usually is the only one.
  const auto bins =
      count_bins(keys, parts, [](uint32_t key) { return std::min<uint32_t>(key, kNumBins - 1); });
  const int64_t num_nonzero = count_from(bins, 1);
  if (num_nonzero == 0) return {};
  Threshold threshold(parts);
  const OpenBin open = open_bin(bins, std::min(k, num_nonzero), threshold);
  if (open.bin == kNumBins - 1 && open.wanted < open.size) {
    const auto first = count_bins(keys, parts, [](uint32_t key) { return key >> kFirstShift; });
    return rows_of(keys, parts, radix_threshold(keys, parts, k, first));
  }
  close_bin(threshold, open, open.bin);
  return rows_of(keys, parts, threshold);
}

RowIdVector top_rows(const float* scores, int64_t num_rows, int64_t k, ThreadPool* pool) {
  if (k <= 0 || num_rows <= 0) return {};
  const FloatKeys keys{scores};
  const Parts parts(num_rows, pool);
  // The bins of the key's highest bits, and above them those of everything with a sign. Only
  // infinity's bin and those above it can hold what is no score, so the usual case needs no check.
  constexpr int kInfinityBin = FloatKeys::kInfinityBits >> (kFirstShift - 1);
  auto first =
      count_bins(FloatBits{keys}, parts, [](uint32_t bits) { return bits >> (kFirstShift - 1); });
  if (count_from(first, kInfinityBin) > 0) {
    check_scores(keys, num_rows);
    first = count_bins(keys, parts, [](uint32_t key) { return key >> kFirstShift; });
  }
  if (k >= count_from(first, 1)) {  // the lowest bin has zeros among its subnormals
    const Threshold all = nonzero_threshold(keys, parts);
    const int64_t num_nonzero = std::accumulate(all.above.begin(), all.above.end(), int64_t{0});
    if (k >= num_nonzero) return rows_of(keys, parts, all);
  }
  return rows_of(keys, parts, radix_threshold(keys, parts, k, first));
}

}  // namespace cpr_ext
