#include "core/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace cpr_ext {

namespace {

constexpr uint32_t kPolynomial = 0x82F63B78;  // bit-reflected

// kTables[j][b]: the checksum of byte b followed by j zero bytes ("slicing by 8").
struct Tables {
  uint32_t value[8][256];
};

constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? kPolynomial : 0);
    tables.value[0][byte] = crc;
  }
  for (uint32_t byte = 0; byte < 256; ++byte) {
    for (int j = 1; j < 8; ++j) {
      const uint32_t previous = tables.value[j - 1][byte];
      tables.value[j][byte] = (previous >> 8) ^ tables.value[0][previous & 0xFF];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

}  // namespace

uint32_t crc32c_portable(uint32_t crc, const void* data, size_t size) {
  const auto* bytes = static_cast<const uint8_t*>(data);
  crc = ~crc;
  while (size >= 8) {
    uint64_t word;
    std::memcpy(&word, bytes, 8);  // little-endian hosts only, as the segment format is
    word ^= crc;
    crc = 0;
    for (int j = 0; j < 8; ++j) crc ^= kTables.value[7 - j][(word >> (8 * j)) & 0xFF];
    bytes += 8;
    size -= 8;
  }
  for (; size > 0; --size) crc = (crc >> 8) ^ kTables.value[0][(crc ^ *bytes++) & 0xFF];
  return ~crc;
}

#if defined(__x86_64__)

namespace {

// The crc32 instruction has latency 3 and throughput 1, so three independent streams of kStream
// bytes are run side by side and joined by shifting a checksum over kStream zero bytes.
constexpr size_t kStream = 1024;

// Shift operator over kStream zero bytes, as four byte-indexed tables.
using ShiftTable = std::array<std::array<uint32_t, 256>, 4>;

ShiftTable make_shift_table() {
  ShiftTable table{};
  for (int byte_index = 0; byte_index < 4; ++byte_index) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      uint32_t crc = byte << (8 * byte_index);
      for (size_t i = 0; i < kStream; ++i) crc = (crc >> 8) ^ kTables.value[0][crc & 0xFF];
      table[byte_index][byte] = crc;
    }
  }
  return table;
}

uint32_t shift(const ShiftTable& table, uint32_t crc) {
  return table[0][crc & 0xFF] ^ table[1][(crc >> 8) & 0xFF] ^ table[2][(crc >> 16) & 0xFF] ^
         table[3][crc >> 24];
}

__attribute__((target("sse4.2"))) uint32_t extend_sse42(uint32_t crc, const void* data,
                                                        size_t size) {
  static const ShiftTable table = make_shift_table();
  const auto* bytes = static_cast<const uint8_t*>(data);
  const auto load = [](const uint8_t* from) {
    uint64_t word;
    std::memcpy(&word, from, 8);
    return word;
  };
  uint64_t crc0 = static_cast<uint32_t>(~crc);
  while (size >= 3 * kStream) {
    uint64_t crc1 = 0;
    uint64_t crc2 = 0;
    for (size_t i = 0; i < kStream; i += 8) {
      crc0 = _mm_crc32_u64(crc0, load(bytes + i));
      crc1 = _mm_crc32_u64(crc1, load(bytes + kStream + i));
      crc2 = _mm_crc32_u64(crc2, load(bytes + 2 * kStream + i));
    }
    crc0 = shift(table, static_cast<uint32_t>(crc0)) ^ crc1;
    crc0 = shift(table, static_cast<uint32_t>(crc0)) ^ crc2;
    bytes += 3 * kStream;
    size -= 3 * kStream;
  }
  for (; size >= 8; size -= 8, bytes += 8) crc0 = _mm_crc32_u64(crc0, load(bytes));
  auto tail = static_cast<uint32_t>(crc0);
  for (; size > 0; --size) tail = _mm_crc32_u8(tail, *bytes++);
  return ~tail;
}

}  // namespace

Crc32cFunction crc32c_sse42() { return __builtin_cpu_supports("sse4.2") ? extend_sse42 : nullptr; }

#else

Crc32cFunction crc32c_sse42() { return nullptr; }

#endif

uint32_t crc32c_extend(uint32_t crc, const void* data, size_t size) {
  static const Crc32cFunction best = crc32c_sse42() ? crc32c_sse42() : crc32c_portable;
  return best(crc, data, size);
}

}  // namespace cpr_ext
