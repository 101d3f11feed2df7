// Reads the chunks of segments ahead into slots, also across files, on threads of its own.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "pipeline/segment_restore.h"
#include "staging/slot_pool.h"
#include "storage/segment_writer.h"

namespace cpr_ext {

// One chunk, its checksums not yet compared.
struct ReadChunk {
  const RestoreSource* source = nullptr;
  const Chunk* chunk = nullptr;
  std::shared_ptr<const SlotLease> slot;  // of several chunks, if they are small
  const std::byte* data = nullptr;        // in the slot
  std::vector<std::string> damage;        // per piece, empty if it could be read
  int64_t bytes = 0;
};

// Reads all chunks of all sources, and gives them out in their order. Bounded by the slots.
class ReadAhead {
 public:
  // REQUIRES: all that is passed lives longer.
  ReadAhead(const std::vector<RestoreSource>& sources, bool direct_io, SlotPool& slots,
            const std::vector<double>& pauses_seconds);
  // Reads no more. A slot that a reader waits for comes from those that were read.
  ~ReadAhead();
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  // The next chunk; nothing after the last. Throws what a reader threw.
  std::optional<ReadChunk> next();

 private:
  struct WantedChunk {
    const RestoreSource* source;
    const Chunk* chunk;
    int64_t slot_bytes;
  };
  struct OpenFile;
  void run();
  size_t end_of_run(size_t begin) const;
  ReadChunk read_chunk(const WantedChunk& wanted, std::byte* data, OpenFile* file);
  std::string read_piece(const Piece& piece, std::byte* data, OpenFile* file);
  void open(OpenFile* file) const;
  bool pause(double seconds);

  const bool direct_io_;
  SlotPool& slots_;
  const std::vector<double>& pauses_seconds_;
  std::vector<WantedChunk> chunks_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::condition_variable stopped_;
  std::map<size_t, ReadChunk> read_;  // guarded by mutex_, as all below
  size_t next_to_read_ = 0;
  size_t next_to_give_ = 0;
  bool is_stopped_ = false;
  std::exception_ptr error_;
  std::vector<std::thread> threads_;  // last: they use all above
};

}  // namespace cpr_ext
