#include "scrub/row_hashes.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "scrub/row_hash.h"

namespace cpr_ext {

namespace {

constexpr int64_t kRowsOfATask = 65536;
constexpr uint64_t kStep = kHashStep;

class RowHash {
 public:
  void add(const std::byte* data, int64_t bytes) {
    int64_t at = add_pairs(data, bytes);
    for (; at + 8 <= bytes; at += 8) {
      uint64_t word;
      std::memcpy(&word, data + at, sizeof(word));
      add_word(word);
    }
    if (at == bytes) return;
    uint64_t word = 0;
    if (bytes - at == 4) {  // as a row-wise state has; of another size the copy is a call
      std::memcpy(&word, data + at, 4);
    } else {
      std::memcpy(&word, data + at, static_cast<size_t>(bytes - at));
    }
    add_word(word);
  }

  uint16_t value() const { return hash_value(sum_, __builtin_parityll(bits_) != 0); }

 private:
  // Adds as many pairs of words as there are, two at a time; returns their bytes.
  int64_t add_pairs(const std::byte* data, int64_t bytes) {
    int64_t at = 0;
#ifdef __SSE2__
    __m128i keys =
        _mm_set_epi64x(static_cast<int64_t>(key_ + 2 * kStep), static_cast<int64_t>(key_ + kStep));
    const __m128i step = _mm_set1_epi64x(static_cast<int64_t>(2 * kStep));
    __m128i sums = _mm_setzero_si128(), bits = _mm_setzero_si128();
    for (; at + 16 <= bytes; at += 16) {
      const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(data + at));
      const __m128i mixed = _mm_add_epi32(words, keys);
      sums = _mm_add_epi64(sums, _mm_mul_epu32(mixed, _mm_srli_epi64(mixed, 32)));
      bits = _mm_xor_si128(bits, words);
      keys = _mm_add_epi64(keys, step);
      key_ += 2 * kStep;
    }
    uint64_t lanes[2];
    std::memcpy(lanes, &sums, sizeof(lanes));
    sum_ += lanes[0] + lanes[1];
    std::memcpy(lanes, &bits, sizeof(lanes));
    bits_ ^= lanes[0] ^ lanes[1];
#else
    static_cast<void>(data);
    static_cast<void>(bytes);
#endif
    return at;
  }

  void add_word(uint64_t word) {
    key_ += kStep;
    sum_ += hash_product(word, key_);
    bits_ ^= word;
  }

  uint64_t key_ = 0;
  uint64_t sum_ = 0;
  uint64_t bits_ = 0;
};

uint16_t hash_of(const std::vector<RowArray>& arrays, int64_t row_id) {
  RowHash hash;
  for (const RowArray& array : arrays) hash.add(array.row(row_id), array.row_bytes);
  return hash.value();
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

HostRowHashes::HostRowHashes(std::string name, int64_t num_rows)
    : RowHashes(std::move(name), num_rows), hashes_(static_cast<size_t>(num_rows)) {}

void HostRowHashes::forget() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::fill(hashes_.begin(), hashes_.begin() + hashes_.size(), 0);
}

void HostRowHashes::hash_rows(const Arrays& arrays, RowIds row_ids, ThreadPool* pool) {
  std::lock_guard<std::mutex> lock(mutex_);
  for_each_task(row_ids.size, pool, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      hashes_[row_ids.data[i]] = hash_of(arrays, row_ids.data[i]);
    }
  });
}

void HostRowHashes::hash_range(const Arrays& arrays, RowRange range, ThreadPool* pool) {
  std::lock_guard<std::mutex> lock(mutex_);
  for_each_task(range.size(), pool, [&](int64_t begin, int64_t end) {
    for (int64_t row_id = range.begin + begin; row_id < range.begin + end; ++row_id) {
      hashes_[row_id] = hash_of(arrays, row_id);
    }
  });
}

void HostRowHashes::record_as(const Arrays& packed, RowIds row_ids) {
  check_rows(row_ids);
  std::lock_guard<std::mutex> lock(mutex_);
  for (int64_t i = 0; i < row_ids.size; ++i) hashes_[row_ids.data[i]] = hash_of(packed, i);
}

void HostRowHashes::assign(const std::vector<uint16_t>& values, int64_t begin) {
  const auto count = static_cast<int64_t>(values.size());
  check_range({begin, begin + count});
  std::lock_guard<std::mutex> lock(mutex_);
  std::copy(values.begin(), values.end(), hashes_.begin() + begin);
}

RowComparison HostRowHashes::compare(const Arrays& arrays, const RowTracker& tracker,
                                     RowIds row_ids) {
  check_arrays(arrays);
  check_rows(row_ids);
  std::lock_guard<std::mutex> lock(mutex_);
  RowComparison found;
  for (int64_t i = 0; i < row_ids.size; ++i) {
    const int64_t row_id = row_ids.data[i];
    if (tracker.is_clean({row_id, row_id + 1}) && !is_same_locked(arrays, row_id, &found)) break;
  }
  return found;
}

RowComparison HostRowHashes::compare_range(const Arrays& arrays, const RowTracker& tracker,
                                           RowRange range) {
  check_arrays(arrays);
  check_range(range);
  RowComparison found;
  const RowIdVector dirty = tracker.dirty_rows(range);
  std::lock_guard<std::mutex> lock(mutex_);
  auto next = dirty.begin();
  for (int64_t row_id = range.begin; row_id < range.end; ++row_id) {
    if (next != dirty.end() && *next == row_id) {
      ++next;
    } else if (!is_same_locked(arrays, row_id, &found)) {
      break;
    }
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

bool HostRowHashes::is_same_locked(const Arrays& arrays, int64_t row_id, RowComparison* found) {
  const uint16_t now = hash_of(arrays, row_id);
  if (hashes_[row_id] == 0) {
    hashes_[row_id] = now;
    ++found->num_recorded;
    return true;
  }
  ++found->num_compared;
  if (hashes_[row_id] == now) return true;
  found->changed_row = row_id;
  return false;
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
