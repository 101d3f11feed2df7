// Loaded in front of the C library, makes its file operations fail as devices do. Offsets and
// sizes stay real: whatever is said to be written, is.
//   SHORT_IO=n      a pread or pwrite of more than n bytes moves n only; each is interrupted first
//   FAIL_WRITE=k:e  the k-th pwrite (from 0) fails with errno e; likewise FAIL_READ, FAIL_SYNC
//   NO_FALLOCATE=1  the file system cannot reserve blocks
//   NO_DIRECT=1     the file system refuses O_DIRECT, having created the file
//   SLOW_WRITE=ms   each pwrite takes that much longer
//   SLOW_NOTIFY=ms  a thread that tells others of a change goes on that much later
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/types.h>
#include <unistd.h>

static atomic_int interrupted, writes, reads, syncs;

static size_t shorten(size_t size) {
  const char* limit = getenv("SHORT_IO");
  return limit && size > (size_t)atol(limit) ? (size_t)atol(limit) : size;
}

static int fails(const char* name, atomic_int* calls) {
  const char* rule = getenv(name);
  int nth, code;
  if (!rule || sscanf(rule, "%d:%d", &nth, &code) != 2) return 0;
  if (atomic_fetch_add(calls, 1) != nth) return 0;
  errno = code;
  return 1;
}

static int interrupts(void) {
  if (!getenv("SHORT_IO") || atomic_fetch_add(&interrupted, 1) % 2) return 0;
  errno = EINTR;
  return 1;
}

ssize_t pwrite(int fd, const void* data, size_t size, off_t offset) {
  static ssize_t (*real)(int, const void*, size_t, off_t);
  if (!real) real = dlsym(RTLD_NEXT, "pwrite");
  if (getenv("SLOW_WRITE")) usleep(1000 * atoi(getenv("SLOW_WRITE")));
  if (interrupts() || fails("FAIL_WRITE", &writes)) return -1;
  return real(fd, data, shorten(size), offset);
}

ssize_t pread(int fd, void* data, size_t size, off_t offset) {
  static ssize_t (*real)(int, void*, size_t, off_t);
  if (!real) real = dlsym(RTLD_NEXT, "pread");
  if (interrupts() || fails("FAIL_READ", &reads)) return -1;
  return real(fd, data, shorten(size), offset);
}

int fsync(int fd) {
  static int (*real)(int);
  if (!real) real = dlsym(RTLD_NEXT, "fsync");
  return fails("FAIL_SYNC", &syncs) ? -1 : real(fd);
}

int pthread_cond_broadcast(pthread_cond_t* condition) {
  static int (*real)(pthread_cond_t*);
  if (!real) real = dlsym(RTLD_NEXT, "pthread_cond_broadcast");
  const int result = real(condition);
  if (getenv("SLOW_NOTIFY")) usleep(1000 * atoi(getenv("SLOW_NOTIFY")));
  return result;
}

int fallocate(int fd, int mode, off_t offset, off_t size) {
  static int (*real)(int, int, off_t, off_t);
  if (!real) real = dlsym(RTLD_NEXT, "fallocate");
  if (getenv("NO_FALLOCATE")) {
    errno = EOPNOTSUPP;
    return -1;
  }
  return real(fd, mode, offset, size);
}

int open(const char* path, int flags, ...) {
  static int (*real)(const char*, int, ...);
  if (!real) real = dlsym(RTLD_NEXT, "open");
  va_list rest;
  va_start(rest, flags);
  const mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;
  va_end(rest);
  const int refuse = getenv("NO_DIRECT") && flags & O_DIRECT;
  const int fd = real(path, refuse ? flags & ~O_DIRECT : flags, mode);
  if (!refuse || fd < 0) return fd;
  close(fd);
  errno = EINVAL;
  return -1;
}
