// Preloaded into a process, sees every call that changes files below one watched directory: makes
// one of them fail as told, and writes down all of them, so that a power cut can be replayed.
//
// A call is named by what it does, to which path, for the how many-th time: "pwrite dense/X 2".
// Other threads cannot change that name, so a fault hits the same call in every run.
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { kMaxFiles = 1024, kMaxPath = 512, kMaxSwallowed = 8 };

// What a planned call does instead of, or before, its work.
enum Fault { kNone, kKill, kTorn, kError, kShort, kDelay, kEnd };

static struct {
  enum Fault fault;
  char op[16];
  char path[kMaxPath];  // relative to the watched directory
  int countdown;        // calls of this name until the fault
  int error;            // errno for kError
  int repeat;           // kError: how many calls that need space or a device fail from there on
  int stays;            // all further calls of this name have the fault, too
  int hits;
} plan;
static int sees_reads;  // calls that only read are named, logged and can have faults

static char root[kMaxPath];
static size_t root_length;  // 0: nothing is watched
static char* open_paths[kMaxFiles];
static int log_fd = -1, data_fd = -1;
static off_t data_offset;
static struct {
  char op[16];
  char suffix[64];
} swallowed[kMaxSwallowed];
static int num_swallowed;
// Held around a call while a log is written: the order in the log is the order of the calls.
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

#define REAL(type, name, ...)              \
  static type (*real_##name)(__VA_ARGS__); \
  if (!real_##name) real_##name = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

// --- control, by ctypes ---

void fault_watch(const char* directory) {
  root_length = strlen(directory);
  memcpy(root, directory, root_length + 1);
  memset(&plan, 0, sizeof plan);
  num_swallowed = 0;
  sees_reads = 0;
}

void fault_plan(int fault, const char* op, const char* path, int ordinal, int error, int repeat) {
  plan.fault = (enum Fault)fault;
  snprintf(plan.op, sizeof plan.op, "%s", op);
  snprintf(plan.path, sizeof plan.path, "%s", path);
  plan.countdown = ordinal;
  plan.error = error;
  plan.repeat = repeat;
  plan.hits = 0;
  plan.stays = 0;
}

// From now on calls that only read are seen, too; `stays`: a planned fault does not go away.
void fault_reads(int stays) {
  sees_reads = 1;
  plan.stays = stays;
}

// How many calls were made to fail, or were delayed.
int fault_hits(void) { return plan.hits; }

// Calls of this kind on paths with this ending do nothing and report success: code without them.
void fault_swallow(const char* op, const char* suffix) {
  if (num_swallowed == kMaxSwallowed) abort();
  snprintf(swallowed[num_swallowed].op, sizeof swallowed->op, "%s", op);
  snprintf(swallowed[num_swallowed].suffix, sizeof swallowed->suffix, "%s", suffix);
  ++num_swallowed;
}

static ssize_t raw_write(int fd, const void* data, size_t size) {
  REAL(ssize_t, write, int, const void*, size_t);
  return real_write(fd, data, size);
}

// One line per call to `log`, the bytes written to `data`; both outside the watched directory.
void fault_log(int log, int data) {
  log_fd = log;
  data_fd = data;
  data_offset = 0;
}

void fault_mark(void) {
  pthread_mutex_lock(&mutex);
  if (log_fd >= 0 && raw_write(log_fd, "mark\n", 5) != 5) abort();
  pthread_mutex_unlock(&mutex);
}

// --- names ---

static const char* watched(const char* path) {
  if (root_length == 0 || path == NULL || strncmp(path, root, root_length) != 0) return NULL;
  if (path[root_length] == '\0') return ".";
  return path[root_length] == '/' ? path + root_length + 1 : NULL;
}

static const char* path_of(int fd) {
  return root_length > 0 && fd >= 0 && fd < kMaxFiles ? open_paths[fd] : NULL;
}

static void note_open(int fd, const char* path) {
  if (fd < 0) return;
  if (fd >= kMaxFiles) abort();
  free(open_paths[fd]);
  open_paths[fd] = strdup(path);
}

// --- faults ---

static void die(void) {
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

static int takes_space(const char* op) { return strcmp(op, "unlink") != 0; }

// The fault for this call; kNone for nearly all.
static enum Fault fault_of(const char* op, const char* path) {
  enum Fault fault = kNone;
  pthread_mutex_lock(&mutex);
  if (plan.fault == kError && plan.hits > 0 && plan.hits < plan.repeat && takes_space(op)) {
    fault = kError;  // the disk is still full
  } else if (plan.stays && plan.hits > 0 && strcmp(op, plan.op) == 0 &&
             strcmp(path, plan.path) == 0) {
    fault = plan.fault;
  } else if (plan.countdown > 0 && strcmp(op, plan.op) == 0 && strcmp(path, plan.path) == 0 &&
             --plan.countdown == 0) {
    fault = plan.fault;
  }
  plan.hits += fault != kNone;
  pthread_mutex_unlock(&mutex);
  if (fault == kKill) die();
  if (fault == kDelay) nanosleep(&(struct timespec){0, 20 * 1000 * 1000}, NULL);
  return fault;
}

static int is_swallowed(const char* op, const char* path) {
  for (int i = 0; i < num_swallowed; ++i) {
    const size_t length = strlen(path), ending = strlen(swallowed[i].suffix);
    if (strcmp(op, swallowed[i].op) == 0 && length >= ending &&
        strcmp(path + length - ending, swallowed[i].suffix) == 0) {
      return 1;
    }
  }
  return 0;
}

static void begin_call(void) {
  if (log_fd >= 0) pthread_mutex_lock(&mutex);
}

// Writes down a call, whether it was done, with its bytes; keeps errno.
// A line is: op, path, target, done, argument, where its bytes lie in `data`, how many.
static void end_call(int done, const char* op, const char* path, const char* target, off_t offset,
                     const void* data, size_t size) {
  if (log_fd < 0) return;
  const int code = errno;
  char line[2 * kMaxPath + 128];
  const int length = snprintf(line, sizeof line, "%s\t%s\t%s\t%d\t%lld\t%lld\t%zu\n", op, path,
                              target, done, (long long)offset, (long long)data_offset, size);
  if (raw_write(log_fd, line, (size_t)length) != length) abort();
  if (done && size > 0) {
    if (raw_write(data_fd, data, size) != (ssize_t)size) abort();
    data_offset += (off_t)size;
  }
  errno = code;
  pthread_mutex_unlock(&mutex);
}

// Fails the call as planned, and writes that down.
static int fail(const char* op, const char* path) {
  begin_call();
  errno = plan.error;
  end_call(0, op, path, "", 0, NULL, 0);
  return -1;
}

// --- calls ---

static int raw_stat(const char* path, struct stat* status) {
  REAL(int, stat, const char*, struct stat*);
  return real_stat(path, status);
}

static int open_common(int (*opener)(const char*, int, ...), const char* path, int flags,
                       mode_t mode) {
  const char* name = watched(path);
  if (name == NULL) return opener(path, flags, mode);
  const int writes = (flags & O_ACCMODE) != O_RDONLY;
  if (writes && fault_of("open", name) == kError) return fail("open", name);
  if (!writes && sees_reads && fault_of("openr", name) == kError) return fail("openr", name);
  begin_call();
  struct stat status;
  const int existed = raw_stat(path, &status) == 0;
  const int fd = opener(path, flags, mode);
  note_open(fd, name);
  if (!writes) {
    if (sees_reads) {
      end_call(fd >= 0, "openr", name, "", 0, NULL, 0);
    } else if (log_fd >= 0) {
      pthread_mutex_unlock(&mutex);
    }
    return fd;
  }
  // The argument: 1 if the file is new, 2 if it was emptied, else 0.
  end_call(fd >= 0, "open", name, "", !existed ? 1 : flags & O_TRUNC ? 2 : 0, NULL, 0);
  return fd;
}

#define OPEN(name)                                                             \
  int name(const char* path, int flags, ...) {                                 \
    static int (*real)(const char*, int, ...);                                 \
    if (!real) real = (int (*)(const char*, int, ...))dlsym(RTLD_NEXT, #name); \
    mode_t mode = 0;                                                           \
    if (flags & (O_CREAT | O_TMPFILE)) {                                       \
      va_list arguments;                                                       \
      va_start(arguments, flags);                                              \
      mode = va_arg(arguments, mode_t);                                        \
      va_end(arguments);                                                       \
    }                                                                          \
    return open_common(real, path, flags, mode);                               \
  }
OPEN(open)
OPEN(open64)

int openat(int directory, const char* path, int flags, ...) {
  mode_t mode = 0;
  if (flags & (O_CREAT | O_TMPFILE)) {
    va_list arguments;
    va_start(arguments, flags);
    mode = va_arg(arguments, mode_t);
    va_end(arguments);
  }
  if (watched(path) != NULL) return open(path, flags, mode);
  REAL(int, openat, int, const char*, int, ...);
  return real_openat(directory, path, flags, mode);
}

int openat64(int directory, const char* path, int flags, ...) {
  mode_t mode = 0;
  if (flags & (O_CREAT | O_TMPFILE)) {
    va_list arguments;
    va_start(arguments, flags);
    mode = va_arg(arguments, mode_t);
    va_end(arguments);
  }
  return openat(directory, path, flags, mode);
}

int creat(const char* path, mode_t mode) { return open(path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char* path, mode_t mode) { return creat(path, mode); }

int close(int fd) {
  REAL(int, close, int);
  if (path_of(fd) != NULL) {
    free(open_paths[fd]);
    open_paths[fd] = NULL;
  }
  return real_close(fd);
}

static ssize_t pwrite_real(int fd, const void* data, size_t size, off_t offset) {
  REAL(ssize_t, pwrite64, int, const void*, size_t, off_t);
  return real_pwrite64(fd, data, size, offset);
}

// offset < 0: at the file's own position.
static ssize_t write_common(const char* op, int fd, const void* data, size_t size, off_t offset) {
  const char* name = path_of(fd);
  if (name == NULL) {
    return offset < 0 ? raw_write(fd, data, size) : pwrite_real(fd, data, size, offset);
  }
  const enum Fault fault = fault_of(op, name);
  if (fault == kError) return fail(op, name);
  if ((fault == kShort || fault == kTorn) && size > 1) size /= 2;
  begin_call();
  off_t at = offset;
  if (offset < 0 && (at = lseek(fd, 0, SEEK_CUR)) < 0) abort();
  const ssize_t done = offset < 0 ? raw_write(fd, data, size) : pwrite_real(fd, data, size, offset);
  end_call(done > 0, op, name, "", at, data, done > 0 ? (size_t)done : 0);
  if (fault == kTorn) die();
  return done;
}

ssize_t write(int fd, const void* data, size_t size) {
  return write_common("write", fd, data, size, -1);
}
ssize_t pwrite(int fd, const void* data, size_t size, off_t offset) {
  return write_common("pwrite", fd, data, size, offset);
}
ssize_t pwrite64(int fd, const void* data, size_t size, off_t offset) {
  return write_common("pwrite", fd, data, size, offset);
}

// Vectors go out piece by piece: a caller must expect less to be written than it asked for.
ssize_t pwritev(int fd, const struct iovec* parts, int count, off_t offset) {
  if (path_of(fd) != NULL && count > 0) {
    return write_common("pwrite", fd, parts->iov_base, parts->iov_len, offset);
  }
  REAL(ssize_t, pwritev, int, const struct iovec*, int, off_t);
  return real_pwritev(fd, parts, count, offset);
}
ssize_t pwritev64(int fd, const struct iovec* parts, int count, off_t offset) {
  return pwritev(fd, parts, count, offset);
}
ssize_t writev(int fd, const struct iovec* parts, int count) {
  if (path_of(fd) != NULL && count > 0) {
    return write_common("write", fd, parts->iov_base, parts->iov_len, -1);
  }
  REAL(ssize_t, writev, int, const struct iovec*, int);
  return real_writev(fd, parts, count);
}

// A call that returns 0 or -1 with errno; `body` makes it.
#define PLAIN(op, name, target, offset, body)                 \
  do {                                                        \
    if (fault_of(op, name) == kError) return fail(op, name);  \
    if (is_swallowed(op, name)) return 0;                     \
    begin_call();                                             \
    const int result = (body);                                \
    end_call(result == 0, op, name, target, offset, NULL, 0); \
    return result;                                            \
  } while (0)

int fsync(int fd) {
  REAL(int, fsync, int);
  const char* name = path_of(fd);
  if (name == NULL) return real_fsync(fd);
  PLAIN("fsync", name, "", 0, real_fsync(fd));
}
int fdatasync(int fd) {
  REAL(int, fdatasync, int);
  const char* name = path_of(fd);
  if (name == NULL) return real_fdatasync(fd);
  PLAIN("fsync", name, "", 0, real_fdatasync(fd));
}

int ftruncate(int fd, off_t length) {
  REAL(int, ftruncate64, int, off_t);
  const char* name = path_of(fd);
  if (name == NULL) return real_ftruncate64(fd, length);
  PLAIN("truncate", name, "", length, real_ftruncate64(fd, length));
}
int ftruncate64(int fd, off_t length) { return ftruncate(fd, length); }
int truncate(const char* path, off_t length) {
  REAL(int, truncate64, const char*, off_t);
  const char* name = watched(path);
  if (name == NULL) return real_truncate64(path, length);
  PLAIN("truncate", name, "", length, real_truncate64(path, length));
}
int truncate64(const char* path, off_t length) { return truncate(path, length); }

int fallocate(int fd, int mode, off_t offset, off_t length) {
  REAL(int, fallocate64, int, int, off_t, off_t);
  const char* name = path_of(fd);
  if (name == NULL) return real_fallocate64(fd, mode, offset, length);
  if (mode != 0) abort();  // nobody punches holes; the log has no word for it
  PLAIN("fallocate", name, "", offset + length, real_fallocate64(fd, mode, offset, length));
}
int fallocate64(int fd, int mode, off_t offset, off_t length) {
  return fallocate(fd, mode, offset, length);
}
int posix_fallocate(int fd, off_t offset, off_t length) {
  return fallocate(fd, 0, offset, length) == 0 ? 0 : errno;
}
int posix_fallocate64(int fd, off_t offset, off_t length) {
  return posix_fallocate(fd, offset, length);
}

int rename(const char* from, const char* to) {
  REAL(int, rename, const char*, const char*);
  const char* name = watched(from);
  const char* target = watched(to);
  if (name == NULL || target == NULL) return real_rename(from, to);
  PLAIN("rename", name, target, 0, real_rename(from, to));
}
int renameat(int from_directory, const char* from, int to_directory, const char* to) {
  if (watched(from) != NULL) return rename(from, to);
  REAL(int, renameat, int, const char*, int, const char*);
  return real_renameat(from_directory, from, to_directory, to);
}
int renameat2(int from_directory, const char* from, int to_directory, const char* to,
              unsigned flags) {
  if (watched(from) != NULL && flags == 0) return rename(from, to);
  REAL(int, renameat2, int, const char*, int, const char*, unsigned);
  return real_renameat2(from_directory, from, to_directory, to, flags);
}

int link(const char* from, const char* to) {
  REAL(int, link, const char*, const char*);
  const char* name = watched(from);
  const char* target = watched(to);
  if (name == NULL || target == NULL) return real_link(from, to);
  PLAIN("link", name, target, 0, real_link(from, to));
}

int linkat(int from_directory, const char* from, int to_directory, const char* to, int flags) {
  if (flags == 0 && watched(from) != NULL) return link(from, to);
  REAL(int, linkat, int, const char*, int, const char*, int);
  return real_linkat(from_directory, from, to_directory, to, flags);
}

int unlink(const char* path) {
  REAL(int, unlink, const char*);
  const char* name = watched(path);
  if (name == NULL) return real_unlink(path);
  PLAIN("unlink", name, "", 0, real_unlink(path));
}
int unlinkat(int directory, const char* path, int flags) {
  if (flags == 0 && watched(path) != NULL) return unlink(path);
  REAL(int, unlinkat, int, const char*, int);
  return real_unlinkat(directory, path, flags);
}

int mkdir(const char* path, mode_t mode) {
  REAL(int, mkdir, const char*, mode_t);
  const char* name = watched(path);
  if (name == NULL) return real_mkdir(path, mode);
  PLAIN("mkdir", name, "", 0, real_mkdir(path, mode));
}
int mkdirat(int directory, const char* path, mode_t mode) {
  if (watched(path) != NULL) return mkdir(path, mode);
  REAL(int, mkdirat, int, const char*, mode_t);
  return real_mkdirat(directory, path, mode);
}

// --- calls that only read ---

// offset < 0: at the file's own position.
static ssize_t read_common(const char* op, int fd, void* data, size_t size, off_t offset) {
  REAL(ssize_t, read, int, void*, size_t);
  REAL(ssize_t, pread64, int, void*, size_t, off_t);
  const char* name = sees_reads ? path_of(fd) : NULL;
  if (name != NULL) {
    const enum Fault fault = fault_of(op, name);
    if (fault == kError) return fail(op, name);
    begin_call();
    end_call(1, op, name, "", 0, NULL, 0);
    if (fault == kEnd) return 0;
    if (fault == kShort && size > 1) size /= 2;
  }
  return offset < 0 ? real_read(fd, data, size) : real_pread64(fd, data, size, offset);
}

ssize_t read(int fd, void* data, size_t size) { return read_common("read", fd, data, size, -1); }
ssize_t pread(int fd, void* data, size_t size, off_t offset) {
  return read_common("pread", fd, data, size, offset);
}
ssize_t pread64(int fd, void* data, size_t size, off_t offset) {
  return read_common("pread", fd, data, size, offset);
}

// True if the call is to fail; else it is written down.
static int stat_fails(const char* name) {
  if (!sees_reads || name == NULL) return 0;
  if (fault_of("stat", name) == kError) {
    fail("stat", name);
    return 1;
  }
  begin_call();
  end_call(1, "stat", name, "", 0, NULL, 0);
  return 0;
}

#define STAT(name)                                                     \
  int name(const char* path, struct stat* status) {                    \
    REAL(int, name, const char*, struct stat*);                        \
    return stat_fails(watched(path)) ? -1 : real_##name(path, status); \
  }
STAT(stat)
STAT(lstat)

int fstat(int fd, struct stat* status) {
  REAL(int, fstat, int, struct stat*);
  return stat_fails(path_of(fd)) ? -1 : real_fstat(fd, status);
}
int stat64(const char* path, struct stat64* status) { return stat(path, (struct stat*)status); }
int lstat64(const char* path, struct stat64* status) { return lstat(path, (struct stat*)status); }
int fstat64(int fd, struct stat64* status) { return fstat(fd, (struct stat*)status); }
int fstatat(int directory, const char* path, struct stat* status, int flags) {
  REAL(int, fstatat, int, const char*, struct stat*, int);
  return stat_fails(watched(path)) ? -1 : real_fstatat(directory, path, status, flags);
}
int fstatat64(int directory, const char* path, struct stat64* status, int flags) {
  return fstatat(directory, path, (struct stat*)status, flags);
}

static struct {
  DIR* directory;
  char path[kMaxPath];
} listings[16];

DIR* opendir(const char* path) {
  REAL(DIR*, opendir, const char*);
  const char* name = sees_reads ? watched(path) : NULL;
  if (name == NULL) return real_opendir(path);
  if (fault_of("opendir", name) == kError) {
    fail("opendir", name);
    return NULL;
  }
  begin_call();
  DIR* directory = real_opendir(path);
  end_call(directory != NULL, "opendir", name, "", 0, NULL, 0);
  for (int i = 0; i < 16 && directory != NULL; ++i) {
    if (listings[i].directory != NULL) continue;
    listings[i].directory = directory;
    snprintf(listings[i].path, sizeof listings[i].path, "%s", name);
    break;
  }
  return directory;
}

int closedir(DIR* directory) {
  REAL(int, closedir, DIR*);
  for (int i = 0; i < 16; ++i) {
    if (listings[i].directory == directory) listings[i].directory = NULL;
  }
  return real_closedir(directory);
}

struct dirent* readdir(DIR* directory) {
  REAL(struct dirent*, readdir, DIR*);
  for (int i = 0; i < 16 && sees_reads; ++i) {
    if (listings[i].directory != directory) continue;
    if (fault_of("readdir", listings[i].path) == kError) {
      fail("readdir", listings[i].path);
      return NULL;
    }
    begin_call();
    end_call(1, "readdir", listings[i].path, "", 0, NULL, 0);
  }
  return real_readdir(directory);
}
struct dirent64* readdir64(DIR* directory) { return (struct dirent64*)readdir(directory); }
