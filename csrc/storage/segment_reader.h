// Reads pieces of a segment file and checks each before anybody sees its bytes.
#pragma once

#include <cstdint>
#include <string>

#include "core/error.h"
#include "storage/segment_writer.h"

namespace cpr_ext {

class SegmentReader {
 public:
  // Throws StorageError if the file cannot be opened.
  SegmentReader(const std::string& path, bool direct_io);

  // True if a failure to open says that there is no such regular file: that is damage of the store.
  // Every other one says nothing about what was committed.
  static bool is_missing(const StorageError& error);

  // Reads the piece into `data` (page-aligned, piece.size_bytes long). Returns what is damaged
  // about it (the file ends early), or an empty string. Throws StorageError if it could not be
  // read: the system refused, or gave fewer bytes than the file has. From any thread.
  std::string read(const Piece& piece, std::byte* data);

  // Returns what is wrong with the bytes of a piece that were read, or an empty string.
  static std::string check(const Piece& piece, uint32_t checksum, const std::byte* data);

  int64_t file_bytes() const { return file_.size(); }

 private:
  File file_;
};

}  // namespace cpr_ext
