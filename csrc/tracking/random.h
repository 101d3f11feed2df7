// SplitMix64 (Steele, Lea, Flood 2014): the same numbers on every platform, and its mixing step
// serves as a hash.
#pragma once

#include <cstdint>

namespace cpr_ext {

constexpr uint64_t mix_bits(uint64_t bits) {
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
  return bits ^ (bits >> 31);
}

class SplitMix64 {
 public:
  explicit SplitMix64(uint64_t seed) : state_(seed) {}

  uint64_t next() { return mix_bits(state_ += 0x9e3779b97f4a7c15u); }

  // From 0 to size - 1, by the high half of a product: a division would cost several times that.
  uint64_t next_below(uint64_t size) {
    return static_cast<uint64_t>(static_cast<unsigned __int128>(next()) * size >> 64);
  }

 private:
  uint64_t state_;
};

}  // namespace cpr_ext
