#include "parity/shard_checksums.h"

#include <algorithm>
#include <utility>

#include "core/random.h"

namespace cpr_ext {

namespace {

constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u;

uint64_t place_of(const RecordTable& table, int64_t row_id) {
  return static_cast<uint64_t>(table.first_word + row_id * table.record_words);
}

}  // namespace

uint64_t hash_record(uint64_t place, const uint64_t* words, int64_t count) {
  uint64_t sum = place * kGolden;
  uint64_t key = 0;
  // As XXH3: the product of a word's halves, and the word, so that a half of zero hides nothing.
  for (int64_t i = 0; i < count; ++i) {
    key += kGolden;
    const uint64_t bits = words[i] + key;
    sum += words[i] + (bits & 0xffffffffu) * (bits >> 32);
  }
  return mix_bits(sum);
}

ShardChecksums::ShardChecksums(std::shared_ptr<const ShardLayout> layout, int64_t max_blocks)
    : layout_(std::move(layout)) {
  const int64_t words = (layout_->num_words() + max_blocks - 1) / max_blocks;
  for (size_t t = 0; t < layout_->tables().size(); ++t) {
    const RecordTable& table = layout_->tables()[t];
    const int64_t rows = (words + table.record_words - 1) / table.record_words;
    rows_per_block_.push_back(rows);
    first_block_.push_back(static_cast<int64_t>(blocks_.size()));
    for (int64_t begin = 0; begin < table.num_rows; begin += rows) {
      const int64_t end = std::min(begin + rows, table.num_rows);
      blocks_.push_back({static_cast<int64_t>(t), begin, end});
    }
  }
  values_.resize(blocks_.size());
}

void ShardChecksums::restore(std::vector<uint64_t> values) { values_ = std::move(values); }

void ShardChecksums::read(ThreadPool& pool) {
  values_ = hash_rows(pool, 0, static_cast<int64_t>(blocks_.size()));
}

void ShardChecksums::replace(int64_t table, int64_t row_id, const uint64_t* old_words,
                             const uint64_t* new_words) {
  const RecordTable& known = layout_->tables()[table];
  const uint64_t place = place_of(known, row_id);
  values_[first_block_[table] + row_id / rows_per_block_[table]] ^=
      hash_record(place, old_words, known.record_words) ^
      hash_record(place, new_words, known.record_words);
}

std::vector<RowBlock> ShardChecksums::find_wrong(ThreadPool& pool, int64_t begin,
                                                 int64_t end) const {
  const auto word_of = [&](const RowBlock& block, int64_t row_id) {
    return static_cast<int64_t>(place_of(layout_->tables()[block.table], row_id));
  };
  const auto first = std::partition_point(
      blocks_.begin(), blocks_.end(),
      [&](const RowBlock& block) { return word_of(block, block.end) <= begin; });
  const auto last = std::partition_point(first, blocks_.end(), [&](const RowBlock& block) {
    return word_of(block, block.end) <= end;
  });
  const std::vector<uint64_t> found = hash_rows(pool, first - blocks_.begin(), last - first);
  std::vector<RowBlock> wrong;
  for (auto block = first; block != last; ++block) {
    if (found[block - first] != values_[block - blocks_.begin()]) wrong.push_back(*block);
  }
  return wrong;
}

std::vector<uint64_t> ShardChecksums::hash_rows(ThreadPool& pool, int64_t first,
                                                int64_t count) const {
  std::vector<uint64_t> hashes(count);
  pool.parallel_for(count, [&](int64_t i) {
    const RowBlock& block = blocks_[first + i];
    const RecordTable& table = layout_->tables()[block.table];
    std::vector<uint64_t> record(table.record_words);
    uint64_t hash = 0;
    for (int64_t row_id = block.begin; row_id < block.end; ++row_id) {
      read_record(table, row_id, record.data());
      hash ^= hash_record(place_of(table, row_id), record.data(), table.record_words);
    }
    hashes[i] = hash;
  });
  return hashes;
}

}  // namespace cpr_ext
