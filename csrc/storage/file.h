// The one door to the file system: a file written or read at aligned offsets, past the page cache
// where the file system allows it. Every short write is continued, every error is thrown.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace cpr_ext {

// Offsets, lengths and addresses of direct I/O are multiples of this.
constexpr int64_t kAlignment = 4096;

// Offsets and sizes in a segment of small arrays, which is written through the page cache: a block
// for each of them would take more than the rows. safetensors asks for it.
constexpr int64_t kSmallBlock = 8;

// Rounds up to a whole number of blocks.
constexpr int64_t align_up(int64_t bytes, int64_t block_bytes = kAlignment) {
  return (bytes + block_bytes - 1) / block_bytes * block_bytes;
}

// Which file it is, whatever its name.
struct FileIdentity {
  dev_t device = 0;
  ino_t inode = 0;
};

class File {
 public:
  enum class Io { kDirect, kBuffered };

  // Creates `path`, which must not exist, file_bytes long; reserves them where the file system can,
  // so that a full disk shows now.
  // kDirect falls back to buffered where the file system refuses it. Throws StorageError.
  static File create(const std::string& path, int64_t file_bytes, Io io);

  // Opens an existing regular file for reading; anything else, also a symbolic link, is refused.
  // Throws StorageError.
  static File open(const std::string& path, Io io);

  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  ~File();  // closes; an error at close is lost, so call sync() for durability

  // REQUIRES for direct files: offset, size and address are multiples of kAlignment.
  void write_at(int64_t offset, const std::byte* data, int64_t size);
  // Reads exactly `size` bytes; returns how many there were before the end of the file.
  int64_t read_at(int64_t offset, std::byte* data, int64_t size);

  void sync();  // data and size are on the device when it returns
  int64_t size() const;
  FileIdentity identity() const;
  bool is_direct() const { return direct_; }
  const std::string& path() const { return path_; }

 private:
  File(std::string path, int fd, bool direct) : path_(std::move(path)), fd_(fd), direct_(direct) {}
  void leave_direct();

  std::string path_;
  int fd_ = -1;
  bool direct_ = false;
};

// Removes a file that was given up, unless `path` leads to another one by now, as it does if its
// directory was replaced. Whether it could be removed does not matter to the caller.
void remove_quietly(const std::string& path, const FileIdentity& identity) noexcept;

}  // namespace cpr_ext
