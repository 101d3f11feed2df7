// SplitMix64 (Steele, Lea, Flood 2014): the same numbers on every platform and device, and its
// mixing step serves as a hash.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace cpr_ext {

CPR_EXT_HOST_DEVICE constexpr uint64_t mix_bits(uint64_t bits) {
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
  return bits ^ (bits >> 31);
}

// The random number after `num_drawn` others, from 0 to size - 1, by the high half of a product: a
// division would cost several times that.
CPR_EXT_HOST_DEVICE constexpr uint64_t random_below(uint64_t size, uint64_t seed,
                                                    uint64_t num_drawn) {
  const uint64_t bits = mix_bits(seed + (num_drawn + 1) * 0x9e3779b97f4a7c15u);
  return static_cast<uint64_t>(static_cast<unsigned __int128>(bits) * size >> 64);
}

}  // namespace cpr_ext
