#include "selection/top_rows.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <string>

#include "core/error.h"
#include "selection/score_keys.h"
#include "selection/write_above.h"

namespace cpr_ext {

namespace {

constexpr int kNumBins = 2048;
constexpr int kNumLanes = 8;  // neighbours often share a bin; counting them apart breaks the chain
constexpr int64_t kFewestRowsPerPart = 65536;
constexpr int64_t kMostRowsPerPart = int64_t{1} << 30;  // a bin is counted in 32 bits
constexpr int64_t kBlockRows = 1024;

using Bins = std::array<uint32_t, kNumBins>;

// The rows are cut into parts of equal size, each handled by one thread.
struct Parts {
  int64_t num_rows;
  int64_t num_parts;
  ThreadPool* pool;

  Parts(int64_t num_rows, ThreadPool* pool) : num_rows(num_rows), pool(pool) {
    const int64_t wanted =
        pool == nullptr || pool->num_threads() == 1 ? 1 : 4 * pool->num_threads();
    const int64_t most = std::max<int64_t>(1, num_rows / kFewestRowsPerPart);
    const int64_t fewest = num_rows / kMostRowsPerPart + 1;
    num_parts = std::max(fewest, std::min(wanted, most));
  }

  int64_t begin(int64_t part) const { return num_rows / num_parts * part; }
  int64_t end(int64_t part) const { return part + 1 == num_parts ? num_rows : begin(part + 1); }

  template <class Body>
  void for_each(const Body& body) const {
    if (pool != nullptr && num_parts > 1) {
      pool->parallel_for(num_parts, body);
    } else {
      for (int64_t part = 0; part < num_parts; ++part) body(part);
    }
  }
};

// Which rows are the best: all with a key above `last`, and of those equal to it the first
// `num_ties`. `above` and `equal` count both per part.
struct Cut {
  explicit Cut(const Parts& parts)
      : above(static_cast<size_t>(parts.num_parts)), equal(static_cast<size_t>(parts.num_parts)) {}

  uint32_t last = 0;
  int64_t num_ties = 0;
  std::vector<int64_t> above;
  std::vector<int64_t> equal;
};

// Counts, per part, bin_of(key) of every row; a bin of kNumBins or more is not counted.
template <class Keys, class BinOf>
std::vector<Bins> count_bins(const Keys& keys, const Parts& parts, const BinOf& bin_of) {
  std::vector<Bins> result(static_cast<size_t>(parts.num_parts));
  parts.for_each([&](int64_t part) {
    std::array<std::array<uint32_t, kNumBins + 1>, kNumLanes> lanes{};
    int64_t row_id = parts.begin(part);
    const int64_t end = parts.end(part);
    for (; row_id + kNumLanes <= end; row_id += kNumLanes) {
      for (int lane = 0; lane < kNumLanes; ++lane) {
        ++lanes[lane][std::min<uint32_t>(bin_of(keys[row_id + lane]), kNumBins)];
      }
    }
    for (; row_id < end; ++row_id) ++lanes[0][std::min<uint32_t>(bin_of(keys[row_id]), kNumBins)];
    for (int bin = 0; bin < kNumBins; ++bin) {
      uint32_t sum = 0;
      for (const auto& lane : lanes) sum += lane[bin];
      result[part][bin] = sum;
    }
  });
  return result;
}

// Narrows a cut to one bin. `wanted` of the rows counted in `bins` are to be taken; the highest
// bins are taken whole and counted in cut.above.
struct OpenBin {
  uint32_t bin;
  int64_t size;
  int64_t wanted;  // of its rows: 1 to size
};

OpenBin open_bin(const std::vector<Bins>& bins, int64_t wanted, Cut& cut) {
  for (int bin = kNumBins - 1;; --bin) {
    int64_t size = 0;
    for (const Bins& part : bins) size += part[bin];
    if (size >= wanted) {
      for (size_t part = 0; part < bins.size(); ++part) cut.equal[part] = bins[part][bin];
      return {static_cast<uint32_t>(bin), size, wanted};
    }
    for (size_t part = 0; part < bins.size(); ++part) cut.above[part] += bins[part][bin];
    wanted -= size;
  }
}

// The open bin holds the keys from `lowest` on: either all of its rows are taken, or it is a single
// key and the first `wanted` are.
void close_bin(Cut& cut, const OpenBin& open, uint32_t lowest) {
  if (open.wanted < open.size) {
    cut.last = lowest;
    cut.num_ties = open.wanted;
    return;
  }
  cut.last = lowest - 1;
  for (size_t part = 0; part < cut.above.size(); ++part) {
    cut.above[part] += cut.equal[part];
    cut.equal[part] = 0;
  }
}

// Radix selection: 10, 11 and 11 bits of the key, each pass counting the open bin only. `first`
// are the bins of the highest 10 bits.
// REQUIRES: 0 < wanted < number of rows with a key above zero.
constexpr int kFirstShift = 22;

template <class Keys>
Cut radix_cut(const Keys& keys, const Parts& parts, int64_t wanted,
              const std::vector<Bins>& first) {
  Cut cut(parts);
  OpenBin open = open_bin(first, wanted, cut);
  uint32_t prefix = open.bin;
  int shift = kFirstShift;
  while (open.wanted < open.size && shift > 0) {
    constexpr int kBits = 11;
    shift -= kBits;
    const auto bins = count_bins(keys, parts, [=](uint32_t key) {
      // Under another prefix the xor leaves a high bit set, and so exceeds every bin.
      return std::min<uint32_t>((key >> shift) ^ (prefix << kBits), kNumBins);
    });
    open = open_bin(bins, open.wanted, cut);
    prefix = (prefix << kBits) | open.bin;
  }
  close_bin(cut, open, prefix << shift);
  return cut;
}

// Writes a part's rows: those above the cut and its first `num_ties` ties.
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
std::vector<int64_t> rows_of(const Keys& keys, const Parts& parts, const Cut& cut) {
  const auto num_parts = static_cast<size_t>(parts.num_parts);
  std::vector<int64_t> first(num_parts + 1);  // where each part's rows go in the result
  std::vector<int64_t> ties(num_parts);
  int64_t ties_left = cut.num_ties;
  for (size_t part = 0; part < num_parts; ++part) {
    ties[part] = std::min(ties_left, cut.equal[part]);
    ties_left -= ties[part];
    first[part + 1] = first[part] + cut.above[part] + ties[part];
  }
  if (first[num_parts] == 0) return {};
  std::vector<int64_t> row_ids(static_cast<size_t>(first[num_parts]));
  parts.for_each([&](int64_t part) {
    write_part(keys, parts.begin(part), parts.end(part), cut.last, ties[part],
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
Cut nonzero_cut(const FloatKeys& keys, const Parts& parts) {
  Cut cut(parts);
  parts.for_each([&](int64_t part) {
    int64_t count = 0;
    for (int64_t row_id = parts.begin(part); row_id < parts.end(part); ++row_id) {
      count += keys[row_id] != 0;
    }
    cut.above[part] = count;
  });
  return cut;
}

}  // namespace

std::vector<int64_t> top_rows(const uint32_t* scores, int64_t num_rows, int64_t k,
                              ThreadPool* pool) {
  if (k <= 0 || num_rows <= 0) return {};
  const CountKeys keys{scores};
  const Parts parts(num_rows, pool);
  // Counts are mostly small: with one bin per count, this pass usually is the only one.
  const auto bins =
      count_bins(keys, parts, [](uint32_t key) { return std::min<uint32_t>(key, kNumBins - 1); });
  const int64_t num_nonzero = count_from(bins, 1);
  if (num_nonzero == 0) return {};
  Cut cut(parts);
  const OpenBin open = open_bin(bins, std::min(k, num_nonzero), cut);
  if (open.bin == kNumBins - 1 && open.wanted < open.size) {
    const auto first = count_bins(keys, parts, [](uint32_t key) { return key >> kFirstShift; });
    return rows_of(keys, parts, radix_cut(keys, parts, k, first));
  }
  close_bin(cut, open, open.bin);
  return rows_of(keys, parts, cut);
}

std::vector<int64_t> top_rows(const float* scores, int64_t num_rows, int64_t k, ThreadPool* pool) {
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
    const Cut all = nonzero_cut(keys, parts);
    const int64_t num_nonzero = std::accumulate(all.above.begin(), all.above.end(), int64_t{0});
    if (k >= num_nonzero) return rows_of(keys, parts, all);
  }
  return rows_of(keys, parts, radix_cut(keys, parts, k, first));
}

}  // namespace cpr_ext
