// One bit per row: which rows have been observed since they were last taken. A tracker of its own
// where every dirty row is to be saved, and the memory of RowSampler and ChangeMeter.
//
// All dirty rows score the same. Where more than `k` of them lie in a range of n rows, selections
// take turns through it (rotation.h): each is saved within ceil(n / k) of them, whatever its id.
#pragma once

#include <string>

#include "core/huge_pages.h"
#include "core/row_id_vector.h"
#include "tracking/rotation.h"
#include "tracking/row_tracker.h"

namespace cpr_ext {

class DirtyRows final : public RowTracker {
 public:
  DirtyRows(std::string name, int64_t num_rows);

  const char* kind() const override { return "DirtyRows"; }
  int64_t memory_bytes() const override;
  void make_memory() override { words_.make_pages(); }
  void observe(const Lookup& lookup) override;

  // REQUIRES, for these three: 0 <= row_id < num_rows.
  bool is_dirty(int64_t row_id) const { return (words_[word_of(row_id)] & bit_of(row_id)) != 0; }
  void mark(int64_t row_id) { words_[word_of(row_id)] |= bit_of(row_id); }
  void clear(int64_t row_id) { words_[word_of(row_id)] &= ~bit_of(row_id); }

  // Rows of the range that are dirty here and not there. REQUIRES: both are of as many rows.
  int64_t num_dirty_besides(const DirtyRows& others, RowRange range) const;
  template <class Body>
  void visit_besides(const DirtyRows& others, RowRange range, Body&& body) const {
    for_each_word(range, [&](size_t word, uint64_t bits) {
      for (bits &= ~others.words_[word]; bits != 0; bits &= bits - 1) {
        body(static_cast<int64_t>(word * 64) + __builtin_ctzll(bits));
      }
      return true;
    });
  }

 private:
  static size_t word_of(int64_t row_id) { return static_cast<size_t>(row_id) >> 6; }
  static uint64_t bit_of(int64_t row_id) { return uint64_t{1} << (row_id & 63); }

  int64_t count_dirty(RowRange range) const override;
  bool has_no_dirty(RowRange range) const override;
  RowIdVector list_dirty(RowRange range) const override;
  RowIdVector select_best(RowRange range, int64_t k, const WeightView* weight,
                          ThreadPool* pool) const override;
  TakenRows clear_rows(RowIds row_ids, const WeightView* weight, ThreadPool* pool) override;
  TakenRows clear_range(RowRange range, const WeightView* weight, ThreadPool* pool) override;
  void restore(const TakenRows& taken) override;

  // Calls body(index of the word, its bits inside the range) until it returns false.
  template <class Body>
  void for_each_word(RowRange range, Body&& body) const {
    if (range.size() == 0) return;
    const size_t first = word_of(range.begin);
    const size_t last = word_of(range.end - 1);
    for (size_t i = first; i <= last; ++i) {
      uint64_t mask = ~uint64_t{0};
      if (i == first) mask &= mask << (range.begin & 63);
      if (i == last) mask &= ~uint64_t{0} >> (63 - ((range.end - 1) & 63));
      if (!body(i, words_[i] & mask)) return;
    }
  }
  void write_dirty(RowRange range, int64_t* row_ids, int64_t size) const;

  HugeZeros<uint64_t> words_;
  mutable Rotation rotation_;  // selecting says where the next selection may begin
};

}  // namespace cpr_ext
