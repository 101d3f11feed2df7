#include "selection/sampled_threshold.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <vector>

#include "selection/score_passes.h"

namespace cpr_ext {

namespace {

constexpr int64_t kSampleRows = 16384;
constexpr int64_t kFewestRows = 32 * kSampleRows;
constexpr double kDeviations = 5;  // of the sample's: wrong less than once in a million

// Keys of rows drawn from all, the same ones each time (SplitMix64 of their numbers).
std::vector<uint32_t> draw_sample(const CountKeys& keys, int64_t num_rows) {
  std::vector<uint32_t> sample(kSampleRows);
  for (int64_t i = 0; i < kSampleRows; ++i) {
    uint64_t bits = static_cast<uint64_t>(i + 1) * 0x9e3779b97f4a7c15;
    bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9;
    bits = (bits ^ (bits >> 27)) * 0x94d049bb133111eb;
    bits ^= bits >> 31;
    sample[i] = keys[static_cast<int64_t>(bits % static_cast<uint64_t>(num_rows))];
  }
  return sample;
}

// The threshold is a key from `low` to `high`.
struct Bracket {
  uint32_t low;
  uint32_t high;
};

std::optional<Bracket> find_bracket(std::vector<uint32_t> sample, double share, uint32_t lowest) {
  const auto size = static_cast<double>(kSampleRows);
  const double spread = kDeviations * std::sqrt(size * share * (1 - share)) + 1;
  const auto first = static_cast<int64_t>(size * share - spread);
  const auto last = static_cast<int64_t>(size * share + spread);
  if (last >= kSampleRows) return std::nullopt;
  const auto key_at = [&](int64_t rank) {
    std::nth_element(sample.begin(), sample.begin() + rank, sample.end(), std::greater<>());
    return sample[rank];
  };
  const Bracket bracket{key_at(last), first < 0 ? UINT32_MAX : key_at(first)};
  if (bracket.low < lowest) return std::nullopt;
  const auto within = std::count_if(sample.begin(), sample.end(), [&](uint32_t key) {
    return key >= bracket.low && key <= bracket.high;
  });
  if (within > kSampleRows / 8) return std::nullopt;
  return bracket;
}

}  // namespace

std::optional<Threshold> sampled_threshold(const CountKeys& keys, const Parts& parts,
                                           int64_t wanted, uint32_t lowest) {
  if (parts.num_rows < kFewestRows || wanted >= parts.num_rows) return std::nullopt;
  const double share = static_cast<double>(wanted) / static_cast<double>(parts.num_rows);
  const auto bracket = find_bracket(draw_sample(keys, parts.num_rows), share, lowest);
  if (!bracket) return std::nullopt;

  Threshold threshold(parts);
  std::vector<std::vector<uint32_t>> near(static_cast<size_t>(parts.num_parts));
  parts.for_each([&](int64_t part) {
    threshold.above[part] = collect_between(keys, parts.begin(part), parts.end(part), bracket->low,
                                            bracket->high, &near[part]);
  });
  std::vector<uint32_t> all_near;
  for (const auto& some : near) all_near.insert(all_near.end(), some.begin(), some.end());
  wanted -= std::accumulate(threshold.above.begin(), threshold.above.end(), int64_t{0});
  if (wanted <= 0 || wanted >= static_cast<int64_t>(all_near.size())) return std::nullopt;

  const CountKeys near_keys{all_near.data()};
  const Parts near_parts(static_cast<int64_t>(all_near.size()), parts.pool);
  const auto first =
      count_bins(near_keys, near_parts, [](uint32_t key) { return key >> kFirstShift; });
  const Threshold near_threshold = radix_threshold(near_keys, near_parts, wanted, first);
  threshold.last = near_threshold.last;
  threshold.num_ties = near_threshold.num_ties;
  for (size_t part = 0; part < near.size(); ++part) {
    for (const uint32_t key : near[part]) {
      threshold.above[part] += key > threshold.last;
      threshold.equal[part] += key == threshold.last;
    }
  }
  return threshold;
}

}  // namespace cpr_ext
