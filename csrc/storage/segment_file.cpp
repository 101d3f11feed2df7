#include "storage/segment_file.h"

#include <unistd.h>

#include <cassert>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "core/crc32c.h"
#include "core/error.h"

namespace cpr_ext {

SegmentWriter::SegmentWriter(std::string path, int64_t header_bytes, int64_t file_bytes,
                             int64_t block_bytes, bool direct_io)
    : path_(std::move(path)),
      header_bytes_(header_bytes),
      file_bytes_(file_bytes),
      block_bytes_(block_bytes),
      direct_io_(direct_io && block_bytes == kAlignment) {
  if (header_bytes <= 0 || header_bytes % block_bytes != 0 || file_bytes < header_bytes ||
      file_bytes % block_bytes != 0) {
    throw UsageError("segment of " + std::to_string(file_bytes) + " bytes with a header of " +
                     std::to_string(header_bytes) + ": both must be multiples of " +
                     std::to_string(block_bytes) + " and the header must fit");
  }
}

SegmentWriter::~SegmentWriter() { abandon(); }

File& SegmentWriter::file() {
  assert(!ended_ && "write after finish or abandon");
  if (!file_) {
    file_ = File::create(path_, file_bytes_, direct_io_ ? File::Io::kDirect : File::Io::kBuffered);
    created_ = file_->identity();
    creator_process_ = ::getpid();
  }
  return *file_;
}

void SegmentWriter::write(const std::vector<Piece>& pieces, const std::byte* data) {
  // Small pieces have gaps between them in memory, and none in the file: without them a few calls
  // write thousands.
  std::vector<std::byte> closely;
  const bool is_small = block_bytes_ != kAlignment && pieces.size() > 1;
  if (is_small) {
    const std::byte* next = data;
    for (const Piece& piece : pieces) {
      closely.insert(closely.end(), next, next + piece.size_bytes);
      next += piece.bytes_in_memory();
    }
    data = closely.data();
  }
  int64_t run_offset = 0;
  int64_t run_bytes = 0;
  const std::byte* run_data = data;
  for (const Piece& piece : pieces) {
    assert(piece.file_offset >= header_bytes_ && piece.size_bytes % block_bytes_ == 0);
    const bool follows =
        piece.file_offset == run_offset + run_bytes && data == run_data + run_bytes;
    if (run_bytes > 0 && !follows) {
      file().write_at(run_offset, run_data, run_bytes);
      run_bytes = 0;
    }
    if (run_bytes == 0) {
      run_offset = piece.file_offset;
      run_data = data;
    }
    run_bytes += piece.size_bytes;
    data += is_small ? piece.size_bytes : piece.bytes_in_memory();
  }
  if (run_bytes > 0) file().write_at(run_offset, run_data, run_bytes);
}

void SegmentWriter::finish(const std::string& header) {
  if (static_cast<int64_t>(header.size()) != header_bytes_) {
    throw UsageError("the segment header has " + std::to_string(header.size()) +
                     " bytes; planned were " + std::to_string(header_bytes_));
  }
  const std::unique_ptr<std::byte, decltype(&std::free)> aligned(
      static_cast<std::byte*>(std::aligned_alloc(kAlignment, align_up(header_bytes_))), &std::free);
  if (!aligned) throw std::bad_alloc();
  std::memcpy(aligned.get(), header.data(), header.size());
  file().write_at(0, aligned.get(), header_bytes_);
  file().sync();
  file_.reset();
  ended_ = true;
}

void SegmentWriter::abandon() noexcept {
  ended_ = true;
  file_.reset();
  if (!kept_ && creator_process_ == ::getpid()) remove_quietly(path_, created_);
  creator_process_ = 0;
}

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
