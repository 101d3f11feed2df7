// Reads pieces of a segment file and checks each before anybody sees its bytes.
#pragma once

#include <cstdint>
#include <string>

#include "storage/segment_writer.h"

namespace cpr_ext {

class SegmentReader {
 public:
  // Throws StorageError if the file cannot be opened.
  SegmentReader(const std::string& path, bool direct_io);

  // Reads the piece into `data` (page-aligned, piece.size_bytes long). Returns what is wrong with
  // it (it ends early, it cannot be read), or an empty string. From any thread.
  std::string read(const Piece& piece, std::byte* data);

  // Returns what is wrong with the bytes of a piece that were read, or an empty string.
  static std::string check(const Piece& piece, uint32_t checksum, const std::byte* data);

  int64_t file_bytes() const { return file_.size(); }

 private:
  File file_;
};

}  // namespace cpr_ext
