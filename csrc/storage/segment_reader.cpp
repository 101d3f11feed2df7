#include "storage/segment_reader.h"

#include <cerrno>
#include <cstdio>

#include "core/crc32c.h"

namespace cpr_ext {

SegmentReader::SegmentReader(const std::string& path, bool direct_io)
    : file_(File::open(path, direct_io ? File::Io::kDirect : File::Io::kBuffered)) {}

namespace {

std::string where(const Piece& piece) { return " at byte " + std::to_string(piece.file_offset); }

}  // namespace

bool SegmentReader::is_missing(const StorageError& error) {
  switch (error.code()) {
    case ENOENT:
    case ENOTDIR:
    case ELOOP:   // a symbolic link
    case ENXIO:   // a socket
    case ENODEV:  // a device
    case EISDIR:
    case EINVAL:  // not a regular file, says File::open
      return true;
    default:
      return false;
  }
}

std::string SegmentReader::read(const Piece& piece, std::byte* data) {
  const int64_t got = file_.read_at(piece.file_offset, data, piece.size_bytes);
  if (got == piece.size_bytes) return "";
  if (file_.size() >= piece.file_offset + piece.size_bytes) {
    throw StorageError("read", file_.path(), EIO,
                       std::to_string(got) + " of " + std::to_string(piece.size_bytes) +
                           " bytes came" + where(piece) + ", though the file is longer");
  }
  return "the file ends " + std::to_string(piece.size_bytes - got) + " bytes early" + where(piece);
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
