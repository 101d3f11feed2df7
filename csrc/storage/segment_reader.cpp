#include "storage/segment_reader.h"

#include <cstdio>

#include "core/crc32c.h"
#include "core/error.h"

namespace cpr_ext {

SegmentReader::SegmentReader(const std::string& path, bool direct_io)
    : file_(File::open(path, direct_io ? File::Io::kDirect : File::Io::kBuffered)) {}

namespace {

std::string where(const Piece& piece) { return " at byte " + std::to_string(piece.file_offset); }

}  // namespace

std::string SegmentReader::read(const Piece& piece, std::byte* data) {
  int64_t got;
  try {
    got = file_.read_at(piece.file_offset, data, piece.size_bytes);
  } catch (const StorageError& error) {
    return error.what();
  }
  if (got != piece.size_bytes) {
    return "the file ends " + std::to_string(piece.size_bytes - got) + " bytes early" +
           where(piece);
  }
  return "";
}

std::string SegmentReader::check(const Piece& piece, uint32_t checksum, const std::byte* data) {
  const uint32_t actual = crc32c(data, piece.size_bytes);
  if (actual != checksum) {
    char text[80];
    std::snprintf(text, sizeof(text), "checksum %08x, recorded %08x", actual, checksum);
    return text + where(piece);
  }
  return "";
}

}  // namespace cpr_ext
