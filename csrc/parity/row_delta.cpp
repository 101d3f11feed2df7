#include "parity/row_delta.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/error.h"

namespace cpr_ext {

namespace {

// Rows are at random places, and hashing one leaves the processor no room to look further ahead.
constexpr size_t kRowsAhead = 8;
constexpr int64_t kBlockHead = 2;  // words before the places of a block: rows, words of a record

// One table's rows in a message: their places in the parity, then their words.
struct DeltaBlock {
  int64_t num_rows;
  int64_t record_words;
  const uint64_t* places;
  const uint64_t* words;
};

// Calls visit(block) for each block; raises UsageError if the message is not made of blocks.
template <typename Visit>
void for_blocks(const uint64_t* message, int64_t message_words, const Visit& visit) {
  for (int64_t at = 0; at < message_words;) {
    const int64_t left = message_words - at - kBlockHead;
    if (left < 0) throw UsageError("the delta ends within the head of a block");
    const uint64_t rows = message[at];
    const uint64_t words = message[at + 1];
    const auto limit = static_cast<uint64_t>(left);
    if (words == 0 || words > limit || rows > limit / (words + 1)) {
      throw UsageError("the delta ends within a block of " + std::to_string(rows) + " rows of " +
                       std::to_string(words) + " words");
    }
    const uint64_t* places = message + at + kBlockHead;
    visit(
        DeltaBlock{static_cast<int64_t>(rows), static_cast<int64_t>(words), places, places + rows});
    at += kBlockHead + static_cast<int64_t>(rows * (words + 1));
  }
}

}  // namespace

RowDelta::RowDelta(std::shared_ptr<const ShardLayout> layout, int64_t max_bytes)
    : layout_(std::move(layout)), max_bytes_(max_bytes), kept_(layout_->tables().size()) {
  for (size_t i = 0; i < kept_.size(); ++i) {
    kept_[i].is_kept.assign(layout_->tables()[i].num_rows, false);
  }
  scratch_.resize(layout_->max_record_words());
}

void RowDelta::note(int64_t table_index, const int64_t* row_ids, int64_t count) {
  const RecordTable& table = layout_->tables()[table_index];
  Kept& kept = kept_[table_index];
  int64_t num_new = 0;
  const auto forget = [&](int64_t end) {  // of the rows marked by this call
    for (int64_t i = 0; i < end; ++i) kept.is_kept[row_ids[i]] = false;
    for (const int64_t row_id : kept.row_ids) kept.is_kept[row_id] = true;
  };
  for (int64_t i = 0; i < count; ++i) {
    if (row_ids[i] < 0 || row_ids[i] >= table.num_rows) {
      forget(i);
      throw RowIndexError("row " + std::to_string(row_ids[i]) + " is about to change; the table " +
                          "has " + std::to_string(table.num_rows) + " rows");
    }
    num_new += !kept.is_kept[row_ids[i]];
    kept.is_kept[row_ids[i]] = true;
  }
  const int64_t more_bytes = num_new * (table.record_words + 1) * kWordBytes;
  if (num_bytes_ + more_bytes > max_bytes_) {
    forget(count);
    throw UsageError("rows of at least " + std::to_string(num_bytes_ + more_bytes) +
                     " bytes, optimizer state included, change in one delta of parity; " +
                     "delta_bytes allows " + std::to_string(max_bytes_) +
                     ": raise Parity(delta_bytes=...), or lower every_steps");
  }
  forget(count);
  const auto first = kept.row_ids.size();
  kept.row_ids.reserve(first + num_new);
  for (int64_t i = 0; i < count; ++i) {
    if (kept.is_kept[row_ids[i]]) continue;
    kept.is_kept[row_ids[i]] = true;
    kept.row_ids.push_back(row_ids[i]);
  }
  kept.words.resize(kept.row_ids.size() * table.record_words);
  for (size_t i = first; i < kept.row_ids.size(); ++i) {
    if (i + kRowsAhead < kept.row_ids.size()) {
      prefetch_record(table, kept.row_ids[i + kRowsAhead]);
    }
    read_record(table, kept.row_ids[i], kept.words.data() + i * table.record_words);
  }
  num_bytes_ += more_bytes;
}

void RowDelta::finish(ShardChecksums* checksums) {
  for (size_t t = 0; t < kept_.size(); ++t) {
    const RecordTable& table = layout_->tables()[t];
    Kept& kept = kept_[t];
    for (size_t i = 0; i < kept.row_ids.size(); ++i) {
      if (i + kRowsAhead < kept.row_ids.size()) {
        prefetch_record(table, kept.row_ids[i + kRowsAhead]);
      }
      uint64_t* words = kept.words.data() + i * table.record_words;
      read_record(table, kept.row_ids[i], scratch_.data());
      if (checksums != nullptr) {
        checksums->replace(static_cast<int64_t>(t), kept.row_ids[i], words, scratch_.data());
      }
      xor_words(words, scratch_.data(), table.record_words);
    }
  }
  is_finished_ = true;
}

void RowDelta::gather_before(const int64_t* places, int64_t count, int64_t width, int64_t end,
                             uint64_t* out) const {
  layout_->gather(places, count, width, end, out);
  for (size_t t = 0; t < kept_.size(); ++t) {
    const RecordTable& table = layout_->tables()[t];
    const Kept& kept = kept_[t];
    for (size_t i = 0; i < kept.row_ids.size(); ++i) {
      const uint64_t* words = kept.words.data() + i * table.record_words;
      const int64_t first = table.first_word + kept.row_ids[i] * table.record_words;
      const int64_t last = std::min(first + table.record_words, end);
      const int64_t* place = std::upper_bound(places, places + count, first - width);
      for (; place < places + count && *place < last; ++place) {
        for (int64_t at = std::max(first, *place); at < std::min(last, *place + width); ++at) {
          uint64_t& to = out[(place - places) * width + at - *place];
          to = is_finished_ ? to ^ words[at - first] : words[at - first];
        }
      }
    }
  }
}

void RowDelta::toggle() {
  for (size_t t = 0; t < kept_.size(); ++t) {
    const RecordTable& table = layout_->tables()[t];
    const Kept& kept = kept_[t];
    for (size_t i = 0; i < kept.row_ids.size(); ++i) {
      read_record(table, kept.row_ids[i], scratch_.data());
      xor_words(scratch_.data(), kept.words.data() + i * table.record_words, table.record_words);
      write_record(table, kept.row_ids[i], scratch_.data());
    }
  }
}

void RowDelta::undo() {
  if (is_finished_) {
    toggle();
    return clear();
  }
  for (size_t t = 0; t < kept_.size(); ++t) {
    const RecordTable& table = layout_->tables()[t];
    const Kept& kept = kept_[t];
    for (size_t i = 0; i < kept.row_ids.size(); ++i) {
      write_record(table, kept.row_ids[i], kept.words.data() + i * table.record_words);
    }
  }
  clear();
}

void RowDelta::clear() {
  for (Kept& kept : kept_) {
    for (const int64_t row_id : kept.row_ids) kept.is_kept[row_id] = false;
    kept.row_ids.clear();
    kept.words.clear();
  }
  num_bytes_ = 0;
  is_finished_ = false;
}

int64_t RowDelta::num_rows() const {
  int64_t count = 0;
  for (const Kept& kept : kept_) count += static_cast<int64_t>(kept.row_ids.size());
  return count;
}

std::vector<uint64_t> RowDelta::pack(int64_t begin, int64_t end) const {
  std::vector<uint64_t> message;
  for (size_t t = 0; t < kept_.size(); ++t) {
    const RecordTable& table = layout_->tables()[t];
    const Kept& kept = kept_[t];
    const auto place_of = [&](int64_t row_id) {
      return table.first_word + row_id * table.record_words;
    };
    const auto is_inside = [&](int64_t row_id) {
      return place_of(row_id) >= begin && place_of(row_id) < end;
    };
    const auto rows = std::count_if(kept.row_ids.begin(), kept.row_ids.end(), is_inside);
    if (rows == 0) continue;
    const size_t head = message.size();
    message.resize(head + kBlockHead + rows * (table.record_words + 1));
    message[head] = rows;
    message[head + 1] = table.record_words;
    uint64_t* place = message.data() + head + kBlockHead;
    uint64_t* words = place + rows;
    for (size_t i = 0; i < kept.row_ids.size(); ++i) {
      if (!is_inside(kept.row_ids[i])) continue;
      *place++ = place_of(kept.row_ids[i]) - begin;
      words = std::copy_n(kept.words.data() + i * table.record_words, table.record_words, words);
    }
  }
  return message;
}

int64_t apply_message(const uint64_t* message, int64_t message_words, uint64_t* parity,
                      int64_t num_words) {
  int64_t num_rows = 0;
  for_blocks(message, message_words, [&](const DeltaBlock& block) {
    const auto words = static_cast<uint64_t>(block.record_words);
    for (int64_t i = 0; i < block.num_rows; ++i) {
      if (words > static_cast<uint64_t>(num_words) || block.places[i] > num_words - words) {
        throw UsageError("the delta has a record at word " + std::to_string(block.places[i]) +
                         "; the parity has " + std::to_string(num_words));
      }
    }
    num_rows += block.num_rows;
  });
  for_blocks(message, message_words, [&](const DeltaBlock& block) {
    for (int64_t i = 0; i < block.num_rows; ++i) {
      xor_words(parity + block.places[i], block.words + i * block.record_words, block.record_words);
    }
  });
  return num_rows;
}

}  // namespace cpr_ext
