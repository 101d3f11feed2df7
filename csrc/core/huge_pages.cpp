#include "core/huge_pages.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

namespace cpr_ext {

namespace {

constexpr size_t kHugePageBytes = size_t{2} << 20;
// Rounding up must not cost a small array more than the half of itself.
constexpr size_t kFewestBytes = 2 * kHugePageBytes;

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

void* allocate_huge(size_t bytes, size_t alignment) {
  if (bytes > static_cast<size_t>(-1) - 2 * kHugePageBytes) throw std::bad_alloc();
  if (bytes < kFewestBytes) {
    void* data = std::aligned_alloc(alignment, round_up(std::max<size_t>(bytes, 1), alignment));
    if (data == nullptr) throw std::bad_alloc();
    return data;
  }
  const size_t rounded = round_up(bytes, kHugePageBytes);
  void* mapped = ::mmap(nullptr, rounded + kHugePageBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  auto* begin = static_cast<char*>(mapped);
  const size_t head = round_up(reinterpret_cast<uintptr_t>(begin), kHugePageBytes) -
                      reinterpret_cast<uintptr_t>(begin);
  char* data = begin + head;
  if (head > 0) ::munmap(begin, head);
  if (head < kHugePageBytes) ::munmap(data + rounded, kHugePageBytes - head);
#ifdef MADV_HUGEPAGE
  ::madvise(data, rounded, MADV_HUGEPAGE);  // no more than a hint
#endif
  return data;
}

void* allocate_huge_zeros(size_t bytes, size_t alignment) {
  void* data = allocate_huge(bytes, alignment);
  if (bytes < kFewestBytes) std::memset(data, 0, bytes);
  return data;
}

void make_pages(void* data, size_t bytes) noexcept {
  constexpr size_t kSmallPageBytes = 4096;
  auto* const first = static_cast<volatile char*>(data);
  for (size_t at = 0; at < bytes; at += kSmallPageBytes) first[at] = first[at];
}

void free_huge(void* data, size_t bytes) noexcept {
  if (bytes < kFewestBytes) {
    std::free(data);
  } else {
    ::munmap(data, round_up(bytes, kHugePageBytes));
  }
}

}  // namespace cpr_ext
