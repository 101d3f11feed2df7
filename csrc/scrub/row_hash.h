// The hash of a row, as the CPU and devices compute it: NH of UMAC (Black et al., CRYPTO 1999) over
// 32-bit halves of 64-bit words, with keys from a Weyl sequence in place of a table of them; and
// the parity of all bits. Each array of a row begins with a new word, whose end is zeros.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace cpr_ext {

constexpr uint64_t kHashStep = 0x9E3779B97F4A7C15u;  // of the keys: 2^64 over the golden ratio

constexpr int64_t kHashWordBytes = 8;

// What the sum gets from a word; the first word of a row has the key kHashStep, the next twice it.
CPR_EXT_HOST_DEVICE inline uint64_t hash_product(uint64_t word, uint64_t key) {
  const auto low = static_cast<uint32_t>(word) + static_cast<uint32_t>(key);
  const auto high = static_cast<uint32_t>(word >> 32) + static_cast<uint32_t>(key >> 32);
  return static_cast<uint64_t>(low) * high;
}

// Never 0. `is_odd`: the parity of all bits.
CPR_EXT_HOST_DEVICE inline uint16_t hash_value(uint64_t sum, bool is_odd) {
  uint64_t mixed = sum;
  mixed ^= mixed >> 32;
  mixed *= 0xD6E8FEB86659FD93u;
  const auto high = static_cast<uint16_t>(mixed >> 49);
  return static_cast<uint16_t>((high == 0 ? 1 : high) << 1 | (is_odd ? 1 : 0));
}

}  // namespace cpr_ext
