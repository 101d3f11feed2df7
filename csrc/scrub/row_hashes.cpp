#include "scrub/row_hashes.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "core/error.h"
#include "scrub/row_hash.h"
#include "staging/row_blocks.h"

namespace cpr_ext {

namespace {

constexpr int64_t kRowsOfATask = 65536;
constexpr uint64_t kStep = kHashStep;

// So many rows are hashed at a time, array by array: what is the same for all is done once.
constexpr int64_t kRowsOfABlock = 128;

// Rows that are about to change are in any order: training waits for each that is not in a cache.
constexpr int64_t kHashesAhead = 16;
constexpr int64_t kRowsToShare = 1024;  // below it, waking a thread costs more than it saves

// Of the words of a row so far: the sum of their products, and the XOR of them.
struct RowWords {
  uint64_t sum = 0;
  uint64_t bits = 0;

  void add(uint64_t word, uint64_t key) {
    sum += hash_product(word, key);
    bits ^= word;
  }
};

// The last words of a row: `bytes` of them from `data` on, less than two.
template <class Tail>
inline void add_tail(const std::byte* data, Tail bytes, uint64_t key, RowWords* words) {
  if (bytes >= 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    words->add(word, key += kStep);
  }
  if (const int64_t rest = bytes % 8; rest > 0) {
    uint64_t word = 0;
    std::memcpy(&word, data + (bytes - rest), static_cast<size_t>(rest));
    words->add(word, key + kStep);
  }
}

#ifdef __SSE2__
inline uint64_t sum_of(__m128i lanes) {
  return static_cast<uint64_t>(_mm_cvtsi128_si64(lanes)) +
         static_cast<uint64_t>(_mm_cvtsi128_si64(_mm_unpackhi_epi64(lanes, lanes)));
}

inline uint64_t xor_of(__m128i lanes) {
  return static_cast<uint64_t>(
      _mm_cvtsi128_si64(_mm_xor_si128(lanes, _mm_unpackhi_epi64(lanes, lanes))));
}

// RowWords of a row, two at a time.
inline void add_pairs(const std::byte* data, int64_t num_pairs, uint64_t key, RowWords* words) {
  __m128i keys =
      _mm_set_epi64x(static_cast<int64_t>(key + 2 * kStep), static_cast<int64_t>(key + kStep));
  const __m128i step = _mm_set1_epi64x(static_cast<int64_t>(2 * kStep));
  __m128i sums = _mm_setzero_si128(), bits = _mm_setzero_si128();
  for (int64_t i = 0; i < num_pairs; ++i) {
    const __m128i pair = _mm_loadu_si128(reinterpret_cast<const __m128i*>(data + 16 * i));
    const __m128i mixed = _mm_add_epi32(pair, keys);
    sums = _mm_add_epi64(sums, _mm_mul_epu32(mixed, _mm_srli_epi64(mixed, 32)));
    bits = _mm_xor_si128(bits, pair);
    keys = _mm_add_epi64(keys, step);
  }
  words->sum += sum_of(sums);
  words->bits ^= xor_of(bits);
}
#else
inline void add_pairs(const std::byte* data, int64_t num_pairs, uint64_t key, RowWords* words) {
  for (int64_t i = 0; i < 2 * num_pairs; ++i) {
    uint64_t word;
    std::memcpy(&word, data + 8 * i, 8);
    words->add(word, key += kStep);
  }
}
#endif

// Adds an array of rows row_at(0), row_at(1), ...; `tail`: its bytes after the pairs.
template <class RowAt, class Tail>
void add_array(const RowArray& array, const RowAt& row_at, int64_t count, int64_t num_pairs,
               Tail tail, uint64_t key, RowWords* words) {
  for (int64_t i = 0; i < count; ++i) {
    const std::byte* const data = array.row(row_at(i));
    if (num_pairs > 0) add_pairs(data, num_pairs, key, &words[i]);
    add_tail(data + 16 * num_pairs, tail, key + 2 * num_pairs * kStep, &words[i]);
  }
}

template <int64_t kBytes>
using Bytes = std::integral_constant<int64_t, kBytes>;

// Calls body(i, hash of row row_at(i)) of rows [0, count).
template <class RowAt, class Body>
void hash_each(const std::vector<RowArray>& arrays, int64_t count, const RowAt& row_at,
               const Body& body) {
  for (int64_t first = 0; first < count; first += kRowsOfABlock) {
    const int64_t size = std::min(kRowsOfABlock, count - first);
    RowWords words[kRowsOfABlock];
    uint64_t key = 0;
    for (const RowArray& array : arrays) {
      const int64_t num_pairs = array.row_bytes / 16, tail = array.row_bytes % 16;
      const auto add = [&](auto bytes) {
        add_array(
            array, [&](int64_t i) { return row_at(first + i); }, size, num_pairs, bytes, key,
            words);
      };
      const auto add_one_of = [&](auto... sizes) {  // a copy of known size is no call
        if (!((tail == sizes && (add(sizes), true)) || ...)) add(tail);
      };
      add_one_of(Bytes<0>(), Bytes<4>(), Bytes<8>(), Bytes<12>());
      key += static_cast<uint64_t>((array.row_bytes + 7) / 8) * kStep;
    }
    for (int64_t i = 0; i < size; ++i) {
      body(first + i, hash_value(words[i].sum, __builtin_parityll(words[i].bits) != 0));
    }
  }
}

template <class Body>
void for_each_task(int64_t count, ThreadPool* pool, Body&& body) {
  const int64_t num_tasks = (count + kRowsOfATask - 1) / kRowsOfATask;
  const auto run = [&](int64_t task) {
    body(task * kRowsOfATask, std::min(count, (task + 1) * kRowsOfATask));
  };
  if (pool == nullptr || num_tasks < 2) {
    for (int64_t task = 0; task < num_tasks; ++task) run(task);
  } else {
    pool->parallel_for(num_tasks, run);
  }
}

}  // namespace

RowHashes::RowHashes(std::string name, int64_t num_rows)
    : name_(std::move(name)), num_rows_(num_rows) {
  if (num_rows < 1) {
    throw UsageError("a table without rows: num_rows of '" + name_ + "' is " +
                     std::to_string(num_rows) + "; it must be at least 1");
  }
}

void RowHashes::record(const Arrays& arrays, RowIds row_ids, ThreadPool* pool) {
  check_arrays(arrays);
  check_rows(row_ids);
  hash_rows(arrays, row_ids, pool);
}

void RowHashes::record_range(const Arrays& arrays, RowRange range, ThreadPool* pool) {
  check_arrays(arrays);
  check_range(range);
  hash_range(arrays, range, pool);
}

std::vector<uint16_t> RowHashes::range_values(RowRange range) const {
  check_range(range);
  return copy_range(range);
}

// Compares rows with their hashes, a block at a time, until one differs.
class HostRowHashes::ComparedRows {
 public:
  // REQUIRES: the mutex of `hashes` is held as long as this lives.
  ComparedRows(const HostRowHashes* hashes, const Arrays& arrays)
      : hashes_(hashes), arrays_(arrays) {}

  void add(int64_t row_id) {
    row_ids_[size_++] = row_id;
    if (size_ == kRowsOfABlock) compare();
  }
  bool have_changed() const { return found_.changed_row >= 0; }
  RowComparison finish() {
    compare();
    return found_;
  }

 private:
  void compare() {
    hash_each(
        arrays_, size_, [&](int64_t i) { return row_ids_[i]; },
        [&](int64_t i, uint16_t now) {
          if (have_changed()) return;
          const uint16_t known = hashes_->hashes_[row_ids_[i]];
          if (known == 0) {
            ++found_.num_unknown;
          } else {
            ++found_.num_compared;
            if (known != now) found_.changed_row = row_ids_[i];
          }
        });
    size_ = 0;
  }

  const HostRowHashes* const hashes_;
  const Arrays& arrays_;
  RowComparison found_;
  int64_t row_ids_[kRowsOfABlock];
  int64_t size_ = 0;
};

HostRowHashes::HostRowHashes(std::string name, int64_t num_rows)
    : RowHashes(std::move(name), num_rows), hashes_(static_cast<size_t>(num_rows)) {}

void HostRowHashes::forget() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::fill(hashes_.begin(), hashes_.begin() + hashes_.size(), 0);
}

void HostRowHashes::hash_rows(const Arrays& arrays, RowIds row_ids, ThreadPool* pool) {
  std::lock_guard<std::mutex> lock(mutex_);
  for_each_task(row_ids.size, pool, [&](int64_t begin, int64_t end) {
    const int64_t* const ids = row_ids.data + begin;
    hash_each(
        arrays, end - begin, [&](int64_t i) { return ids[i]; },
        [&](int64_t i, uint16_t hash) { hashes_[ids[i]] = hash; });
  });
}

void HostRowHashes::hash_range(const Arrays& arrays, RowRange range, ThreadPool* pool) {
  std::lock_guard<std::mutex> lock(mutex_);
  for_each_task(range.size(), pool, [&](int64_t begin, int64_t end) {
    const int64_t first = range.begin + begin;
    hash_each(
        arrays, end - begin, [&](int64_t i) { return first + i; },
        [&](int64_t i, uint16_t hash) { hashes_[first + i] = hash; });
  });
}

RowComparison HostRowHashes::compare(const Arrays& arrays, const RowTracker& tracker,
                                     RowIds row_ids) {
  check_arrays(arrays);
  check_rows(row_ids);
  std::lock_guard<std::mutex> lock(mutex_);
  ComparedRows rows(this, arrays);
  for (int64_t i = 0; i < row_ids.size && !rows.have_changed(); ++i) {
    const int64_t row_id = row_ids.data[i];
    if (tracker.is_clean({row_id, row_id + 1})) rows.add(row_id);
  }
  return rows.finish();
}

RowComparison HostRowHashes::compare_range(const Arrays& arrays, const RowTracker& tracker,
                                           RowRange range) {
  check_arrays(arrays);
  check_range(range);
  const RowIdVector dirty = tracker.dirty_rows(range);
  std::lock_guard<std::mutex> lock(mutex_);
  ComparedRows rows(this, arrays);
  auto next = dirty.begin();
  for (int64_t row_id = range.begin; row_id < range.end && !rows.have_changed(); ++row_id) {
    if (next != dirty.end() && *next == row_id) {
      ++next;
    } else {
      rows.add(row_id);
    }
  }
  return rows.finish();
}

RowComparison HostRowHashes::compare_each(const ChangingRows& rows) {
  const Arrays& arrays = rows.arrays;
  const RowIds row_ids = rows.row_ids;
  check_arrays(arrays);
  check_rows(row_ids);
  std::lock_guard<std::mutex> lock(mutex_);
  RowComparison found;
  int64_t ids[kRowsOfABlock];
  uint16_t known[kRowsOfABlock];
  int64_t size = 0;
  const auto compare = [&] {
    hash_each(
        arrays, size, [&](int64_t i) { return ids[i]; },
        [&](int64_t i, uint16_t now) {
          ++found.num_compared;
          if (known[i] != now && found.changed_row < 0) found.changed_row = ids[i];
        });
    size = 0;
  };
  for (int64_t i = 0; i < row_ids.size; ++i) {
    const int64_t row_id = row_ids.data[i];
    if (i + kHashesAhead < row_ids.size) {
      __builtin_prefetch(&hashes_[row_ids.data[i + kHashesAhead]]);
    }
    uint16_t& hash = hashes_[row_id];
    if (hash == 0) continue;  // it was compared before, or changed
    if (rows.tracker->is_clean({row_id, row_id + 1})) {
      for (const RowArray& array : arrays) prefetch_row(array.row(row_id), array.row_bytes);
      ids[size] = row_id;
      known[size++] = hash;
    }
    hash = 0;
    if (size == kRowsOfABlock) compare();
  }
  compare();
  return found;
}

std::vector<RowComparison> compare_changing(const std::vector<ChangingRows>& tables,
                                            ThreadPool* pool) {
  std::vector<RowComparison> found(tables.size());
  int64_t num_rows = 0;
  for (const ChangingRows& each : tables) {
    num_rows += each.row_ids.size;
    each.tracker->settle();  // here: what is counted may itself need the pool
  }
  const auto compare = [&](int64_t i) { found[i] = tables[i].hashes->compare_each(tables[i]); };
  const auto num_tables = static_cast<int64_t>(tables.size());
  if (pool == nullptr || num_rows < kRowsToShare) {
    for (int64_t i = 0; i < num_tables; ++i) compare(i);
  } else {
    pool->parallel_for(num_tables, compare);
  }
  return found;
}

std::vector<uint16_t> HostRowHashes::values(RowIds row_ids) const {
  check_rows(row_ids);
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<uint16_t> found;
  found.reserve(static_cast<size_t>(row_ids.size));
  for (int64_t i = 0; i < row_ids.size; ++i) found.push_back(hashes_[row_ids.data[i]]);
  return found;
}

std::vector<uint16_t> HostRowHashes::copy_range(RowRange range) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return {hashes_.begin() + range.begin, hashes_.begin() + range.end};
}

void RowHashes::check_arrays(const std::vector<RowArray>& arrays) const {
  if (arrays.empty()) throw UsageError("table '" + name_ + "': no arrays are given");
  for (const RowArray& array : arrays) {
    if (array.num_rows != num_rows()) {
      throw UsageError("table '" + name_ + "': an array has " + std::to_string(array.num_rows) +
                       " rows; the table has " + std::to_string(num_rows()));
    }
  }
}

void RowHashes::check_rows(RowIds row_ids) const {
  for (int64_t i = 0; i < row_ids.size; ++i) {
    if (row_ids.data[i] >= 0 && row_ids.data[i] < num_rows()) continue;
    throw RowIndexError("table '" + name_ + "': row_ids[" + std::to_string(i) + "] is " +
                        std::to_string(row_ids.data[i]) + "; the table has " +
                        std::to_string(num_rows()) + " rows");
  }
}

void RowHashes::check_range(RowRange range) const {
  if (range.begin < 0 || range.begin > range.end || range.end > num_rows()) {
    throw UsageError("table '" + name_ + "': the range [" + std::to_string(range.begin) + ", " +
                     std::to_string(range.end) + ") is not inside its rows [0, " +
                     std::to_string(num_rows()) + ")");
  }
}

}  // namespace cpr_ext
