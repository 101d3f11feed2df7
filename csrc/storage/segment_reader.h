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
  // it (it ends early, it cannot be read, its checksum differs), or an empty string.
  std::string read(const Piece& piece, uint32_t checksum, std::byte* data);

  int64_t file_bytes() const { return file_.size(); }

 private:
  File file_;
};

}  // namespace cpr_ext
