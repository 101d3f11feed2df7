// Writes and reads the pieces of a segment file; what is read is checked before anybody sees its
// bytes. Written are pieces at planned offsets, in any order; the header last. Until the
// header is there the file names nothing, and until the manifest names the file nobody reads it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/error.h"
#include "storage/file.h"

namespace cpr_ext {

// Bytes of a segment that are checked as one: a run of rows of one array, zero-padded to the
// segment's block. Pieces in memory follow each other at multiples of kAlignment.
struct Piece {
  int64_t file_offset = 0;
  int64_t size_bytes = 0;  // in the file

  int64_t bytes_in_memory() const { return align_up(size_bytes); }
};

class SegmentWriter {
 public:
  // Creates nothing yet. block_bytes: kAlignment, or kSmallBlock, which rules out direct I/O.
  // REQUIRES: file_bytes, header_bytes multiples of it.
  SegmentWriter(std::string path, int64_t header_bytes, int64_t file_bytes, int64_t block_bytes,
                bool direct_io);
  // A segment that is not kept is removed.
  ~SegmentWriter();

  // Writes `pieces`, which lie one after the other in `data` (page-aligned). Pieces that are also
  // neighbours in the file go out in one call. Pieces after file_bytes make the file longer. Throws
  // StorageError.
  void write(const std::vector<Piece>& pieces, const std::byte* data);

  // Writes the header, exactly header_bytes long, syncs and closes the file. No write may follow.
  void finish(const std::string& header);

  // The finished file is the store's from here on.
  void keep() noexcept { kept_ = true; }

  // Closes and removes a file that is not kept; no write may follow. A file that this writer did
  // not create is never removed, also if it has taken the place of the one that it did create; nor
  // is one created before this process was forked off: it is the parent's.
  void abandon() noexcept;

  const std::string& path() const { return path_; }

 private:
  File& file();

  const std::string path_;
  const int64_t header_bytes_;
  const int64_t file_bytes_;
  const int64_t block_bytes_;
  const bool direct_io_;
  std::optional<File> file_;  // opened by the first write, on the writer's thread
  FileIdentity created_;
  int creator_process_ = 0;  // 0: no file created
  bool ended_ = false;
  bool kept_ = false;
};

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
