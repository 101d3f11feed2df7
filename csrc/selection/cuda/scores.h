// Where the scores of rows come from when a device chooses among them; for *.cu only.
//
// Each has load_keys(row, end, keys): the scores of the rows row to row + kRowsPerLoad - 1, zero
// from `end` on and for rows below zero. Rows count from the first of the range to choose from.
// On the host, lead() is how many rows below zero the first load should begin, so that all loads
// lie at addresses that suit them. kGuess: how the lowest score that is chosen can be guessed.
#pragma once

#include <cstdint>

#include "core/cuda/bits.h"
#include "selection/random_scores.h"

namespace cpr_ext {

constexpr int kRowsPerLoad = 4;

enum class Guess {
  kNone,
  kLast,     // that of the last selection, at `last_cut` on the device; 0: there was none
  kCertain,  // 1: no other score occurs
};

// In memory, one per row.
struct StoredScores {
  static constexpr Guess kGuess = Guess::kNone;
  const uint32_t* scores;

  int lead() const {
    return static_cast<int>(reinterpret_cast<uintptr_t>(scores) / sizeof(uint32_t) % kRowsPerLoad);
  }

  // REQUIRES: row + lead() is a multiple of kRowsPerLoad.
  __device__ void load_keys(int64_t row, int64_t end, uint32_t* keys) const {
    if (row >= 0 && row + kRowsPerLoad <= end) {
      const uint4 four = __ldg(reinterpret_cast<const uint4*>(scores + row));
      keys[0] = four.x;
      keys[1] = four.y;
      keys[2] = four.z;
      keys[3] = four.w;
      return;
    }
    for (int i = 0; i < kRowsPerLoad; ++i) {
      keys[i] = row + i >= 0 && row + i < end ? scores[row + i] : 0;
    }
  }
};

// Stored counts: mostly small, so that the lowest chosen one is often that of the last selection.
struct StoredCounts : StoredScores {
  static constexpr Guess kGuess = Guess::kLast;
  uint32_t* last_cut;

  StoredCounts(const uint32_t* counts, uint32_t* last_cut)
      : StoredScores{counts}, last_cut(last_cut) {}
};

// One for each row whose bit is set.
struct SetBits {
  static constexpr Guess kGuess = Guess::kCertain;
  const uint32_t* words;
  int64_t begin;  // the range's first row

  int lead() const { return 0; }

  __device__ void load_keys(int64_t row, int64_t end, uint32_t* keys) const {
    for (int i = 0; i < kRowsPerLoad; ++i) {
      keys[i] = row + i < end && is_bit_set(words, begin + row + i) ? 1 : 0;
    }
  }
};

// Two for each row from `first` on whose bit is set, one for each before it.
struct BitsInTurn {
  static constexpr Guess kGuess = Guess::kNone;
  SetBits bits;
  int64_t first;

  int lead() const { return 0; }

  __device__ void load_keys(int64_t row, int64_t end, uint32_t* keys) const {
    bits.load_keys(row, end, keys);
    for (int i = 0; i < kRowsPerLoad; ++i) {
      if (row + i >= first) keys[i] *= 2;
    }
  }
};

// A random score for each row whose bit is set; those whose other bit is set, too, come first.
struct RandomScores {
  static constexpr Guess kGuess = Guess::kNone;
  SetBits bits;
  const uint32_t* first;  // words; the other bits
  const uint64_t* salt;   // on the device

  int lead() const { return 0; }

  __device__ void load_keys(int64_t row, int64_t end, uint32_t* keys) const {
    bits.load_keys(row, end, keys);
    for (int i = 0; i < kRowsPerLoad; ++i) {
      const int64_t row_id = bits.begin + row + i;
      if (keys[i] != 0) keys[i] = random_score(*salt, row_id, is_bit_set(first, row_id));
    }
  }
};

template <class Scores>
__host__ __device__ constexpr bool has_guess() {
  return Scores::kGuess != Guess::kNone;
}

// REQUIRES: has_guess().
template <class Scores>
__device__ uint32_t guess_of(const Scores& scores) {
  if constexpr (Scores::kGuess == Guess::kLast) {
    const uint32_t last = *scores.last_cut;
    return last == 0 ? 1 : last;  // before there was one: that all rows with a score are chosen
  }
  return 1;
}

// Where the cut of a selection goes, if anywhere, to be guessed next.
template <class Scores>
uint32_t* last_cut_of(const Scores& scores) {
  if constexpr (Scores::kGuess == Guess::kLast) return scores.last_cut;
  return nullptr;
}

}  // namespace cpr_ext
