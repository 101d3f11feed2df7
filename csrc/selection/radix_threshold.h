// The threshold of a selection, found by counting keys in bins; and the parts that threads work on.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "core/stop_flag.h"
#include "core/thread_pool.h"

namespace cpr_ext {

constexpr int kNumBins = 2048;
constexpr int kNumLanes = 8;  // neighbours often share a bin; counting them apart breaks the chain
constexpr int64_t kFewestRowsPerPart = 65536;
constexpr int64_t kMostRowsPerPart = int64_t{1} << 30;  // a bin is counted in 32 bits

using Bins = std::array<uint32_t, kNumBins>;

// The rows are divided into parts of equal size, each handled by one thread. A loop over them
// throws Stopped between two parts if the flag of the caller's StopScope is set.
struct Parts {
  int64_t num_rows;
  int64_t num_parts;
  ThreadPool* pool;
  const StopFlag* stop = StopScope::current();

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
    const auto run = [&](int64_t part) {
      if (stop != nullptr && stop->value.load(std::memory_order_relaxed)) throw Stopped();
      body(part);
    };
    if (pool != nullptr && num_parts > 1) {
      pool->parallel_for(num_parts, run);
    } else {
      for (int64_t part = 0; part < num_parts; ++part) run(part);
    }
  }
};

// Which rows are the best: all with a key above `last`, and of those equal to it the first
// `num_ties`. `above` and `equal` count both per part.
struct Threshold {
  explicit Threshold(const Parts& parts)
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

// Narrows the threshold to one bin. `wanted` of the rows counted in `bins` are to be taken; the
// highest bins are taken whole and counted in threshold.above.
struct OpenBin {
  uint32_t bin;
  int64_t size;
  int64_t wanted;  // of its rows: 1 to size
};

inline OpenBin open_bin(const std::vector<Bins>& bins, int64_t wanted, Threshold& threshold) {
  for (int bin = kNumBins - 1;; --bin) {
    int64_t size = 0;
    for (const Bins& part : bins) size += part[bin];
    if (size >= wanted) {
      for (size_t part = 0; part < bins.size(); ++part) threshold.equal[part] = bins[part][bin];
      return {static_cast<uint32_t>(bin), size, wanted};
    }
    for (size_t part = 0; part < bins.size(); ++part) threshold.above[part] += bins[part][bin];
    wanted -= size;
  }
}

// The open bin holds the keys from `lowest` on: either all of its rows are taken, or it is a single
// key and the first `wanted` are.
inline void close_bin(Threshold& threshold, const OpenBin& open, uint32_t lowest) {
  if (open.wanted < open.size) {
    threshold.last = lowest;
    threshold.num_ties = open.wanted;
    return;
  }
  threshold.last = lowest - 1;
  for (size_t part = 0; part < threshold.above.size(); ++part) {
    threshold.above[part] += threshold.equal[part];
    threshold.equal[part] = 0;
  }
}

// Radix selection: 10, 11 and 11 bits of the key, each pass counting the open bin only. `first`
// are the bins of the highest 10 bits.
// REQUIRES: 0 < wanted < number of rows with a key above zero.
constexpr int kFirstShift = 22;

template <class Keys>
Threshold radix_threshold(const Keys& keys, const Parts& parts, int64_t wanted,
                          const std::vector<Bins>& first) {
  Threshold threshold(parts);
  OpenBin open = open_bin(first, wanted, threshold);
  uint32_t prefix = open.bin;
  int shift = kFirstShift;
  while (open.wanted < open.size && shift > 0) {
    constexpr int kBits = 11;
    shift -= kBits;
    const auto bins = count_bins(keys, parts, [=](uint32_t key) {
      // Under another prefix the xor leaves a high bit set, and so exceeds every bin.
      return std::min<uint32_t>((key >> shift) ^ (prefix << kBits), kNumBins);
    });
    open = open_bin(bins, open.wanted, threshold);
    prefix = (prefix << kBits) | open.bin;
  }
  close_bin(threshold, open, prefix << shift);
  return threshold;
}

}  // namespace cpr_ext
