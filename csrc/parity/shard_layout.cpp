#include "parity/shard_layout.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace cpr_ext {

namespace {

constexpr int64_t kLineBytes = 64;

}  // namespace

ShardLayout::ShardLayout(std::vector<std::vector<RowArray>> tables) {
  for (std::vector<RowArray>& arrays : tables) {
    RecordTable table;
    int64_t record_bytes = 0;
    for (const RowArray& array : arrays) record_bytes += array.row_bytes;
    table.num_rows = arrays.front().num_rows;
    table.record_words = (record_bytes + kWordBytes - 1) / kWordBytes;
    table.first_word = num_words_;
    table.arrays = std::move(arrays);
    num_words_ += table.num_rows * table.record_words;
    max_record_words_ = std::max(max_record_words_, table.record_words);
    tables_.push_back(std::move(table));
  }
}

// Calls visit(table, row_id, first, last, offset) for each record that has words in [begin, end):
// `first` and `last` bound them inside the record, `offset` is the first one's place behind begin.
template <typename Visit>
void ShardLayout::for_records(int64_t begin, int64_t end, const Visit& visit) const {
  const auto is_later = [](int64_t word, const RecordTable& table) {
    return word < table.first_word;
  };
  const auto after = std::upper_bound(tables_.begin(), tables_.end(), begin, is_later);
  for (auto it = after == tables_.begin() ? after : after - 1; it != tables_.end(); ++it) {
    const RecordTable& table = *it;
    if (table.first_word >= end) return;
    const int64_t words = table.record_words;
    const int64_t from = std::max(begin, table.first_word) - table.first_word;
    const int64_t to = std::min(end, table.first_word + table.num_rows * words) - table.first_word;
    for (int64_t at = from; at < to;) {
      const int64_t row_id = at / words;
      const int64_t first = at - row_id * words;
      const int64_t last = std::min(words, to - row_id * words);
      visit(table, row_id, first, last, table.first_word + at - begin);
      at += last - first;
    }
  }
}

void ShardLayout::read(int64_t begin, int64_t end, uint64_t* out) const {
  std::vector<uint64_t> scratch(max_record_words_);
  read(begin, end, out, scratch.data());
}

void ShardLayout::read(int64_t begin, int64_t end, uint64_t* out, uint64_t* scratch) const {
  for_records(
      begin, end,
      [&](const RecordTable& table, int64_t row_id, int64_t first, int64_t last, int64_t offset) {
        if (last - first == table.record_words) {
          return read_record(table, row_id, out + offset);
        }
        read_record(table, row_id, scratch);
        std::copy(scratch + first, scratch + last, out + offset);
      });
}

void ShardLayout::gather(const int64_t* places, int64_t count, int64_t width, int64_t end,
                         uint64_t* out) const {
  std::vector<uint64_t> scratch(max_record_words_);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t to = std::min(places[i] + width, end);
    if (places[i] < to) read(places[i], to, out + i * width, scratch.data());
  }
}

void ShardLayout::write(int64_t begin, int64_t end, const uint64_t* words) const {
  std::vector<uint64_t> scratch(max_record_words_);
  for_records(
      begin, end,
      [&](const RecordTable& table, int64_t row_id, int64_t first, int64_t last, int64_t offset) {
        if (last - first == table.record_words) {
          return write_record(table, row_id, words + offset);
        }
        read_record(table, row_id, scratch.data());
        std::copy(words + offset, words + offset + (last - first), scratch.data() + first);
        write_record(table, row_id, scratch.data());
      });
}

void read_record(const RecordTable& table, int64_t row_id, uint64_t* out) {
  out[table.record_words - 1] = 0;  // the padding
  auto* to = reinterpret_cast<std::byte*>(out);
  for (const RowArray& array : table.arrays) {
    std::memcpy(to, array.row(row_id), array.row_bytes);
    to += array.row_bytes;
  }
}

void write_record(const RecordTable& table, int64_t row_id, const uint64_t* words) {
  const auto* from = reinterpret_cast<const std::byte*>(words);
  for (const RowArray& array : table.arrays) {
    std::memcpy(array.row(row_id), from, array.row_bytes);
    from += array.row_bytes;
  }
}

void prefetch_record(const RecordTable& table, int64_t row_id) {
  for (const RowArray& array : table.arrays) {
    for (int64_t at = 0; at < array.row_bytes; at += kLineBytes) {
      __builtin_prefetch(array.row(row_id) + at);
    }
  }
}

void xor_words(uint64_t* to, const uint64_t* from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] ^= from[i];
}

}  // namespace cpr_ext
