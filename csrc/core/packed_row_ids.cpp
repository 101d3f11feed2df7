#include "core/packed_row_ids.h"

#include <algorithm>
#include <cstring>

namespace cpr_ext {

namespace {

struct PackedSizes {
  int low;            // bits of an id that are stored as they are
  int64_t low_bytes;  // of all ids together
  int64_t high_bits;  // of the unary part
  int64_t high_bytes;
};

PackedSizes sizes_of(const RowIdRun& run) {
  const int64_t range = run.last - run.first + 1;
  int low = 0;
  while (range / run.count >> (low + 1) > 0) ++low;
  const int64_t high_bits = ((range - 1) >> low) + run.count;
  // No overflow: count * low <= range, and range <= 2^62.
  return {low, (run.count * low + 7) / 8, high_bits, (high_bits + 7) / 8};
}

uint64_t load(const std::byte* from, int64_t bytes) {
  uint64_t word = 0;
  std::memcpy(&word, from, static_cast<size_t>(std::min<int64_t>(bytes, sizeof(word))));
  return word;
}

// Numbers of `width` bits, one after the other.
class BitWriter {
 public:
  BitWriter(std::byte* out, int width) : out_(out), width_(width) {}
  void put(uint64_t value) {
    word_ |= value << filled_;
    if (filled_ + width_ >= 64) {
      std::memcpy(out_, &word_, sizeof(word_));
      out_ += sizeof(word_);
      word_ = filled_ == 0 ? 0 : value >> (64 - filled_);
      filled_ += width_ - 64;
    } else {
      filled_ += width_;
    }
  }
  void finish() { std::memcpy(out_, &word_, static_cast<size_t>((filled_ + 7) / 8)); }

 private:
  std::byte* out_;
  const int width_;
  uint64_t word_ = 0;
  int filled_ = 0;
};

uint64_t number_at(const std::byte* data, int64_t bytes, int64_t bit, int width) {
  if (width == 0) return 0;
  const int64_t byte = bit / 8;
  const int shift = static_cast<int>(bit % 8);
  uint64_t value = load(data + byte, bytes - byte) >> shift;
  if (shift + width > 64) value |= static_cast<uint64_t>(data[byte + 8]) << (64 - shift);
  return value & ((uint64_t{1} << width) - 1);
}

}  // namespace

int64_t packed_bytes(const RowIdRun& run) {
  const PackedSizes sizes = sizes_of(run);
  return sizes.low_bytes + sizes.high_bytes;
}

void pack_row_ids(const int64_t* ids, const RowIdRun& run, std::byte* out) {
  const PackedSizes sizes = sizes_of(run);
  const uint64_t mask = (uint64_t{1} << sizes.low) - 1;
  std::byte* high = out + sizes.low_bytes;
  std::memset(high, 0, sizes.high_bytes);
  BitWriter low(out, sizes.low);
  for (int64_t i = 0; i < run.count; ++i) {
    const auto id = static_cast<uint64_t>(ids[i] - run.first);
    if (sizes.low > 0) low.put(id & mask);
    const uint64_t bit = (id >> sizes.low) + static_cast<uint64_t>(i);
    high[bit / 8] |= static_cast<std::byte>(1 << (bit % 8));
  }
  if (sizes.low > 0) low.finish();
}

bool unpack_row_ids(const std::byte* packed, const RowIdRun& run, int64_t* ids) {
  const PackedSizes sizes = sizes_of(run);
  const std::byte* high = packed + sizes.low_bytes;
  int64_t i = 0;
  for (int64_t byte = 0; byte < sizes.high_bytes; byte += 8) {
    for (uint64_t word = load(high + byte, sizes.high_bytes - byte); word != 0; word &= word - 1) {
      if (i == run.count) return false;
      const int64_t rest = byte * 8 + __builtin_ctzll(word) - i;
      const uint64_t low = number_at(packed, sizes.low_bytes, i * sizes.low, sizes.low);
      ids[i] = run.first + (rest << sizes.low | static_cast<int64_t>(low));
      if (ids[i] > run.last || (i > 0 && ids[i] <= ids[i - 1])) return false;
      ++i;
    }
  }
  return i == run.count && ids[0] == run.first && ids[i - 1] == run.last;
}

}  // namespace cpr_ext
