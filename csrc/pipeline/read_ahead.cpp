#include "pipeline/read_ahead.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "core/error.h"
#include "storage/segment_reader.h"

namespace cpr_ext {

namespace {

// While one waits to be scheduled, or opens the next file, the disk has the other's request.
constexpr int kReaders = 2;

}  // namespace

// A reader's own, so that no two threads share a file.
struct ReadAhead::OpenFile {
  const RestoreSource* source = nullptr;
  std::optional<SegmentReader> reader;
  std::string damage;  // there is no such regular file
};

ReadAhead::ReadAhead(const std::vector<RestoreSource>& sources, bool direct_io, SlotPool& slots,
                     const std::vector<double>& pauses_seconds)
    : direct_io_(direct_io), slots_(slots), pauses_seconds_(pauses_seconds) {
  for (const RestoreSource& source : sources) {
    for (const Chunk& chunk : source.chunks) {
      const SegmentTable& table = source.tables[chunk.table].table;
      chunks_.push_back({&source, &chunk, chunk_bytes(table, chunk.count)});
    }
  }
  const size_t num_readers =
      std::min<size_t>({kReaders, chunks_.size(), static_cast<size_t>(slots.num_slots())});
  try {
    while (threads_.size() < num_readers) threads_.emplace_back([this] { run(); });
  } catch (...) {
    if (threads_.empty()) throw;  // else fewer do it too
  }
}

ReadAhead::~ReadAhead() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    next_to_read_ = chunks_.size();
    read_.clear();
    is_stopped_ = true;
  }
  stopped_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

std::optional<ReadChunk> ReadAhead::next() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (next_to_give_ == chunks_.size()) return std::nullopt;
  changed_.wait(lock, [&] { return error_ || read_.count(next_to_give_) > 0; });
  if (error_) std::rethrow_exception(error_);
  return std::move(read_.extract(next_to_give_++).mapped());
}

void ReadAhead::run() {
  try {
    OpenFile file;
    for (;;) {
      SlotLease slot = slots_.acquire();  // first, so that who reads the next to be given has one
      size_t begin, end;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        if (next_to_read_ == chunks_.size()) return;
        begin = next_to_read_;
        end = next_to_read_ = end_of_run(begin);
      }
      std::byte* data = slot.data();
      const auto shared = std::make_shared<const SlotLease>(std::move(slot));
      std::vector<ReadChunk> read;
      for (size_t i = begin; i < end; ++i) {
        read.push_back(read_chunk(chunks_[i], data, &file));
        read.back().slot = shared;
        data += chunks_[i].slot_bytes;
      }
      std::lock_guard<std::mutex> lock(mutex_);
      if (is_stopped_) return;
      for (size_t i = begin; i < end; ++i) read_.emplace(i, std::move(read[i - begin]));
      changed_.notify_one();
    }
  } catch (...) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!error_) error_ = std::current_exception();
    changed_.notify_one();
  }
}

// A slot has room for many small chunks: to hand each over takes longer than to read it.
size_t ReadAhead::end_of_run(size_t begin) const {
  int64_t left = slots_.slot_bytes() - chunks_[begin].slot_bytes;
  size_t end = begin + 1;
  while (end < chunks_.size() && chunks_[end].source == chunks_[begin].source &&
         chunks_[end].slot_bytes <= left) {
    left -= chunks_[end++].slot_bytes;
  }
  return end;
}

ReadChunk ReadAhead::read_chunk(const WantedChunk& wanted, std::byte* data, OpenFile* file) {
  if (file->source != wanted.source) {
    *file = OpenFile{};
    file->source = wanted.source;
  }
  const Chunk& chunk = *wanted.chunk;
  const SegmentTable& table = wanted.source->tables[chunk.table].table;
  ReadChunk read{wanted.source, &chunk, nullptr, data, {}, 0};
  for (const Piece& piece : chunk_pieces(table, chunk.first, chunk.count)) {
    read.damage.push_back(read_piece(piece, data, file));
    if (file->reader) read.bytes += piece.size_bytes;
    data += piece.bytes_in_memory();
  }
  return read;
}

// What is damaged about the piece, or an empty string. What the system refuses is tried again, and
// then throws StorageError.
std::string ReadAhead::read_piece(const Piece& piece, std::byte* data, OpenFile* file) {
  for (size_t attempt = 0;; ++attempt) {
    try {
      if (!file->reader && file->damage.empty()) open(file);
      return file->reader ? file->reader->read(piece, data) : file->damage;
    } catch (const StorageError&) {
      file->reader.reset();  // a stale handle is opened again by its name
      if (attempt == pauses_seconds_.size() || !pause(pauses_seconds_[attempt])) throw;
    }
  }
}

void ReadAhead::open(OpenFile* file) const {
  try {
    // A chunk of the source is read, so it has tables.
    const bool in_blocks = file->source->tables.front().table.block_bytes == kAlignment;
    file->reader.emplace(file->source->path, direct_io_ && in_blocks);
  } catch (const StorageError& error) {
    if (!SegmentReader::is_missing(error)) throw;
    file->damage = error.what();
  }
}

// False if the reading ended meanwhile.
bool ReadAhead::pause(double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  return !stopped_.wait_for(lock, std::chrono::duration<double>(seconds),
                            [&] { return is_stopped_; });
}

}  // namespace cpr_ext
