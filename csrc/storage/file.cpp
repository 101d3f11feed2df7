#include "storage/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "core/error.h"

namespace cpr_ext {

namespace {

// Linux moves at most 0x7ffff000 bytes per call; a round figure below it keeps alignment.
constexpr int64_t kMaxTransfer = int64_t{1} << 30;

int open_retrying(const std::string& path, int flags) {
  if (path.find('\0') != std::string::npos) {  // the system would see a shorter name
    errno = EINVAL;
    return -1;
  }
  int fd;
  do {
    fd = ::open(path.c_str(), flags | O_CLOEXEC, 0666);
  } while (fd < 0 && errno == EINTR);
  return fd;
}

// Tries with O_DIRECT first if asked to; `direct` tells what was opened.
int open_preferring_direct(const std::string& path, int flags, bool* direct) {
  if (*direct) {
    const int fd = open_retrying(path, flags | O_DIRECT);
    if (fd >= 0 || errno != EINVAL) return fd;
    *direct = false;
    // Some file systems create the file before they refuse the flag.
    if (flags & O_EXCL) ::unlink(path.c_str());
  }
  return open_retrying(path, flags);
}

}  // namespace

File File::create(const std::string& path, int64_t file_bytes, Io io) {
  bool direct = io == Io::kDirect;
  const int fd = open_preferring_direct(path, O_WRONLY | O_CREAT | O_EXCL, &direct);
  if (fd < 0) throw StorageError("create", path, errno);
  File file(path, fd, direct);
  int result;
  do {
    result = ::fallocate(fd, 0, 0, file_bytes);
  } while (result != 0 && errno == EINTR);
  // Where blocks cannot be reserved, the size alone must do: nothing is written to the very end if
  // the last table is empty.
  const bool refused = errno == ENOSPC || errno == EDQUOT || errno == EFBIG || errno == EIO;
  if (result != 0 && !refused) result = ::ftruncate(fd, file_bytes);
  if (result != 0) {
    const int code = errno;
    remove_quietly(path, file.identity());
    throw StorageError("reserving " + std::to_string(file_bytes) + " bytes", path, code,
                       "free space or choose another directory");
  }
  return file;
}

File File::open(const std::string& path, Io io) {
  bool direct = io == Io::kDirect;
  // O_NONBLOCK: a pipe in the place of a segment must not hang the restore.
  const int fd = open_preferring_direct(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK, &direct);
  if (fd < 0) {
    throw StorageError("open", path, errno, errno == ELOOP ? "symbolic links are refused" : "");
  }
  File file(path, fd, direct);
  struct stat status;
  if (::fstat(fd, &status) != 0) throw StorageError("stat", path, errno);
  if (!S_ISREG(status.st_mode)) throw StorageError("open", path, EINVAL, "not a regular file");
  return file;
}

File::File(File&& other) noexcept
    : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)), direct_(other.direct_) {}

File& File::operator=(File&& other) noexcept {
  if (this != &other) {
    if (fd_ >= 0) ::close(fd_);
    path_ = std::move(other.path_);
    fd_ = std::exchange(other.fd_, -1);
    direct_ = other.direct_;
  }
  return *this;
}

File::~File() {
  if (fd_ >= 0) ::close(fd_);
}

void File::leave_direct() {
  const int flags = ::fcntl(fd_, F_GETFL);
  if (flags < 0 || ::fcntl(fd_, F_SETFL, flags & ~O_DIRECT) != 0) {
    throw StorageError("leaving direct I/O", path_, errno);
  }
  direct_ = false;
}

void File::write_at(int64_t offset, const std::byte* data, int64_t size) {
  while (size > 0) {
    const ssize_t written =
        ::pwrite(fd_, data, static_cast<size_t>(std::min(size, kMaxTransfer)), offset);
    if (written < 0) {
      if (errno == EINTR) continue;
      if (errno == EINVAL && direct_) {  // e.g. the rest of a short write is unaligned
        leave_direct();
        continue;
      }
      throw StorageError("write", path_, errno,
                         "the snapshot is given up; earlier ones are intact");
    }
    if (written == 0) throw StorageError("write", path_, EIO, "the device took no bytes");
    offset += written;
    data += written;
    size -= written;
  }
}

int64_t File::read_at(int64_t offset, std::byte* data, int64_t size) {
  int64_t total = 0;
  while (total < size) {
    const ssize_t got =
        ::pread(fd_, data + total, static_cast<size_t>(std::min(size - total, kMaxTransfer)),
                offset + total);
    if (got < 0) {
      if (errno == EINTR) continue;
      if (errno == EINVAL && direct_) {
        leave_direct();
        continue;
      }
      throw StorageError("read", path_, errno);
    }
    if (got == 0) break;
    total += got;
  }
  return total;
}

void File::sync() {
  // fsync, not fdatasync: the reserved size and extents must be durable with the data.
  int result;
  do {
    result = ::fsync(fd_);
  } while (result != 0 && errno == EINTR);
  if (result != 0) throw StorageError("fsync", path_, errno);
}

FileIdentity File::identity() const {
  struct stat status;
  if (::fstat(fd_, &status) != 0) throw StorageError("stat", path_, errno);
  return {status.st_dev, status.st_ino};
}

int64_t File::size() const {
  struct stat status;
  if (::fstat(fd_, &status) != 0) throw StorageError("stat", path_, errno);
  return status.st_size;
}

void remove_quietly(const std::string& path, const FileIdentity& identity) noexcept {
  struct stat status;
  if (::lstat(path.c_str(), &status) != 0) return;
  if (status.st_dev == identity.device && status.st_ino == identity.inode) ::unlink(path.c_str());
}

}  // namespace cpr_ext
