#include "pipeline/copy_on_write.h"

#include <algorithm>
#include <cassert>
#include <cstdlib>
#include <cstring>
#include <new>

#include "core/huge_pages.h"
#include "staging/row_rounding.h"

namespace cpr_ext {

namespace {
constexpr int64_t kEntryAlignment = 64;  // a cache line; entries of close sizes share freed memory
constexpr int64_t kPageBytes = 4096;
constexpr int64_t kPrefetchRows = 8;
constexpr int64_t kEntriesAtOnce = 64;
}  // namespace

struct CopyOnWrite::CopiedRow {
  CopiedRow* next;
  int64_t row_id;
  std::byte* rows() { return reinterpret_cast<std::byte*>(this + 1); }  // each array's row, packed
};

void CopyArena::FreePages::operator()(std::byte* data) const { std::free(data); }

int64_t CopyArena::used_bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return begun_bytes_ - free_bytes_;
}

std::byte* CopyArena::data() {
  if (data_ == nullptr) {
    const int64_t bytes = (size_bytes_ + kPageBytes - 1) / kPageBytes * kPageBytes;
    data_.reset(static_cast<std::byte*>(std::aligned_alloc(kPageBytes, bytes)));
    if (data_ == nullptr) throw std::bad_alloc();
  }
  return data_.get();
}

void CopyArena::make_memory() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (size_bytes_ > 0) make_pages(data(), size_bytes_);
}

std::byte* CopyArena::allocate_one(int64_t entry_bytes) {
  const auto freed = freed_.find(entry_bytes);
  if (freed != freed_.end() && !freed->second.empty()) {
    std::byte* entry = freed->second.back();
    freed->second.pop_back();
    free_bytes_ -= entry_bytes;
    return entry;
  }
  if (free_bytes_ == begun_bytes_) {  // all is free: entries of other sizes may use it again
    freed_.clear();
    begun_bytes_ = free_bytes_ = 0;
  }
  if (entry_bytes > size_bytes_ - begun_bytes_) return nullptr;
  std::byte* entry = data() + begun_bytes_;
  begun_bytes_ += entry_bytes;
  return entry;
}

void CopyArena::allocate(int64_t entry_bytes, int64_t count, std::vector<std::byte*>* entries) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (; count > 0; --count) {
    std::byte* const entry = allocate_one(entry_bytes);
    if (entry == nullptr) return;
    entries->push_back(entry);
  }
}

void CopyArena::free(const std::vector<std::byte*>& entries, int64_t entry_bytes) {
  if (entries.empty()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::byte*>& freed = freed_[entry_bytes];
  freed.insert(freed.end(), entries.begin(), entries.end());
  free_bytes_ += entry_bytes * static_cast<int64_t>(entries.size());
}

CopyOnWrite::CopyOnWrite(const SegmentTable& table, const RowIdVector* row_ids,
                         int64_t rows_per_chunk, CopyArena& arena)
    : table_(table), row_ids_(row_ids), rows_per_chunk_(rows_per_chunk), arena_(arena) {
  entry_bytes_ = sizeof(CopiedRow);
  for (const SegmentArray& array : table.arrays) entry_bytes_ += array.rows.row_bytes;
  entry_bytes_ = (entry_bytes_ + kEntryAlignment - 1) / kEntryAlignment * kEntryAlignment;
  if (table.num_rows == 0) return;
  const auto row_id_at = [&](int64_t position) {
    return table_.is_range() ? table_.range_begin + position : (*row_ids_)[position];
  };
  for (int64_t first = 0; first < table.num_rows; first += rows_per_chunk) {
    chunk_begins_.push_back(row_id_at(first));
  }
  heads_.assign(chunk_begins_.size(), nullptr);
  first_row_id_ = row_id_at(0);
  const int64_t num_bits = row_id_at(table.num_rows - 1) - first_row_id_ + 1;
  waiting_.assign((num_bits + 63) / 64, table.is_range() ? ~uint64_t{0} : 0);
  if (table.is_range()) {
    if (num_bits % 64 != 0) waiting_.back() = (uint64_t{1} << (num_bits % 64)) - 1;
  } else {
    for (const int64_t row_id : *row_ids) {
      const int64_t bit = row_id - first_row_id_;
      waiting_[bit >> 6] |= uint64_t{1} << (bit & 63);
    }
  }
}

int64_t CopyOnWrite::chunk_of(int64_t row_id) const {
  if (table_.is_range()) return (row_id - table_.range_begin) / rows_per_chunk_;
  return std::upper_bound(chunk_begins_.begin(), chunk_begins_.end(), row_id) -
         chunk_begins_.begin() - 1;
}

int64_t CopyOnWrite::position_in_chunk(int64_t row_id, int64_t first, int64_t count) const {
  if (table_.is_range()) return row_id - table_.range_begin - first;
  const auto begin = row_ids_->begin() + first;
  return std::lower_bound(begin, begin + count, row_id) - begin;
}

int64_t CopyOnWrite::copy_before_write(const int64_t* row_ids, int64_t count,
                                       int64_t captured_chunks, RowIdVector* copied) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::byte*> memory;
  const uint64_t num_bits = waiting_.size() * 64;
  const auto bit_of = [&](int64_t row_id) { return static_cast<uint64_t>(row_id - first_row_id_); };
  for (int64_t i = 0; i < count; ++i) {
    if (i + 2 * kPrefetchRows < count) {
      const uint64_t ahead = bit_of(row_ids[i + 2 * kPrefetchRows]);
      if (ahead < num_bits) __builtin_prefetch(&waiting_[ahead >> 6], 1);
    }
    if (i + kPrefetchRows < count) {
      const int64_t next = row_ids[i + kPrefetchRows];
      const uint64_t ahead = bit_of(next);
      if (ahead < num_bits && (waiting_[ahead >> 6] >> (ahead & 63) & 1) != 0) {
        for (const SegmentArray& array : table_.arrays) __builtin_prefetch(array.rows.row(next));
      }
    }
    const int64_t row_id = row_ids[i];
    const uint64_t bit = bit_of(row_id);
    if (bit >= num_bits) continue;
    uint64_t& word = waiting_[bit >> 6];
    const uint64_t mask = uint64_t{1} << (bit & 63);
    if ((word & mask) == 0) continue;
    const int64_t chunk = chunk_of(row_id);
    if (chunk < captured_chunks) continue;
    if (memory.empty()) {
      arena_.allocate(entry_bytes_, std::min(kEntriesAtOnce, count - i), &memory);
      if (memory.empty()) return i;
    }
    copied->push_back(row_id);
    copy(row_id, chunk, memory.back());
    memory.pop_back();
    word &= ~mask;
  }
  arena_.free(memory, entry_bytes_);
  return count;
}

void CopyOnWrite::copy(int64_t row_id, int64_t chunk, std::byte* memory) {
  auto* entry = new (memory) CopiedRow{heads_[chunk], row_id};
  std::byte* out = entry->rows();
  for (const SegmentArray& array : table_.arrays) {
    std::memcpy(out, array.rows.row(row_id), array.rows.row_bytes);
    out += array.rows.row_bytes;
  }
  heads_[chunk] = entry;
}

bool CopyOnWrite::has_copies(int64_t first) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return !heads_.empty() && heads_[first / rows_per_chunk_] != nullptr;
}

void CopyOnWrite::list_waiting(int64_t first, int64_t count, RowIdVector* row_ids) const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (waiting_.empty()) return;  // released
  for (int64_t position = first; position < first + count; ++position) {
    const int64_t row_id =
        table_.is_range() ? table_.range_begin + position : (*row_ids_)[position];
    const int64_t bit = row_id - first_row_id_;
    if ((waiting_[bit >> 6] >> (bit & 63) & 1) != 0) row_ids->push_back(row_id);
  }
}

// Without rows yet: one at `position` has its entry so many bytes after `base`.
CopiedRows CopyOnWrite::copies_at(std::byte* base) const {
  CopiedRows copies;
  base += sizeof(CopiedRow);
  for (const SegmentArray& array : table_.arrays) {
    RowArray packed = array.rows;
    packed.data = base;
    packed.row_stride_bytes = 1;
    packed.first_row_id = 0;
    copies.arrays.push_back(packed);
    base += array.rows.row_bytes;
  }
  return copies;
}

void CopyOnWrite::overlay(int64_t first, int64_t count, std::byte* out, OverlaidRows* overlaid,
                          const std::function<void(const CopiedRows&)>& observe) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (heads_.empty()) return;
  assert(first % rows_per_chunk_ == 0 && count <= rows_per_chunk_);
  CopiedRow*& head = heads_[first / rows_per_chunk_];
  if (head == nullptr) return;
  if (!table_.is_range()) out += row_ids_bytes(table_, first, count);
  std::byte* const base = reinterpret_cast<std::byte*>(head);
  CopiedRows copies = copies_at(base);
  std::vector<std::byte*> freed;
  for (CopiedRow* entry = head; entry != nullptr; entry = entry->next) {
    put(entry->rows(), position_in_chunk(entry->row_id, first, count), count, out, overlaid);
    freed.push_back(reinterpret_cast<std::byte*>(entry));
    copies.positions.push_back(freed.back() - base);
    copies.row_ids.push_back(entry->row_id);
  }
  observe(copies);
  head = nullptr;
  arena_.free(freed, entry_bytes_);
}

// One copied row into each array of a chunk of `count` rows, the first of which begins at `to`.
void CopyOnWrite::put(const std::byte* from, int64_t position, int64_t count, std::byte* to,
                      OverlaidRows* overlaid) {
  const std::byte* const begin = from;
  bool is_rounded = false, fits = true;
  for (const SegmentArray& array : table_.arrays) {
    std::byte* row = to + position * array.file_row_bytes();
    if (array.is_rounded()) {
      is_rounded = true;
      row_.resize(array.rows.row_bytes / sizeof(float));
      std::memcpy(row_.data(), from, array.rows.row_bytes);  // `from` may be unaligned
      fits &= round_row(row_.data(), static_cast<int64_t>(row_.size()), array.precision, row,
                        &overlaid->largest_error);
    } else {
      std::memcpy(row, from, array.rows.row_bytes);
    }
    to += align_up(count * array.file_row_bytes());
    from += array.rows.row_bytes;
  }
  if (!is_rounded) return;
  overlaid->broken[position] = fits ? 0 : 1;
  if (fits) return;
  std::vector<std::byte>& exact = overlaid->exact[position];
  from = begin;
  for (const SegmentArray& array : table_.arrays) {
    if (array.is_rounded()) exact.insert(exact.end(), from, from + array.rows.row_bytes);
    from += array.rows.row_bytes;
  }
}

void CopyOnWrite::release() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::byte*> freed;
  for (CopiedRow*& head : heads_) {
    while (head != nullptr) {
      freed.push_back(reinterpret_cast<std::byte*>(head));
      head = head->next;
    }
  }
  arena_.free(freed, entry_bytes_);
  waiting_.clear();  // nothing is copied any more
}

}  // namespace cpr_ext
