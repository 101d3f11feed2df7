#include "core/huge_pages.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <new>

namespace cpr_ext {

namespace {

constexpr size_t kHugePageBytes = size_t{2} << 20;
// Rounding up must not cost a small array more than the half of itself.
constexpr size_t kFewestBytes = 2 * kHugePageBytes;

}  // namespace

void* allocate_huge(size_t bytes, size_t alignment) {
  const bool is_huge = bytes >= kFewestBytes;
  if (is_huge) alignment = std::max(alignment, kHugePageBytes);
  const size_t rounded = (std::max<size_t>(bytes, 1) + alignment - 1) / alignment * alignment;
  if (rounded < bytes) throw std::bad_alloc();
  void* data = std::aligned_alloc(alignment, rounded);
  if (data == nullptr) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  if (is_huge) ::madvise(data, rounded, MADV_HUGEPAGE);  // no more than a hint
#endif
  return data;
}

}  // namespace cpr_ext
