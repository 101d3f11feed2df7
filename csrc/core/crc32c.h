// CRC32C (Castagnoli, reflected polynomial 0x82F63B78, RFC 3720 appendix B.4), the checksum of
// every byte of a segment. One function; the backend is chosen once, at run time.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cpr_ext {

// The checksum of the bytes whose checksum is `crc`, followed by data[0, size). Start with crc = 0.
uint32_t crc32c_extend(uint32_t crc, const void* data, size_t size);

inline uint32_t crc32c(const void* data, size_t size) { return crc32c_extend(0, data, size); }

// The backends, for tests: all give the same values. `crc32c_sse42` is null where it cannot run.
using Crc32cFunction = uint32_t (*)(uint32_t crc, const void* data, size_t size);
uint32_t crc32c_portable(uint32_t crc, const void* data, size_t size);
Crc32cFunction crc32c_sse42();

}  // namespace cpr_ext
