// Memory for large arrays that are accessed at random: of pages of 2 MB where the system gives
// them, since with small ones every access costs a translation of its address as well.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

namespace cpr_ext {

// Aligned to `alignment`, a power of two of at most 4096. Large ones are mapped by themselves, so
// that nothing else comes to lie in their pages. Throws std::bad_alloc.
void* allocate_huge(size_t bytes, size_t alignment);
// As allocate_huge(), of zeros. The pages of a large one are taken when they are first written.
void* allocate_huge_zeros(size_t bytes, size_t alignment);
// Has the system make the pages that are not made yet; what they hold stays.
void make_pages(void* data, size_t bytes) noexcept;
void free_huge(void* data, size_t bytes) noexcept;  // `bytes` as they were allocated

// For containers.
template <class T>
struct HugePageAllocator {
  using value_type = T;

  HugePageAllocator() = default;
  template <class Other>
  HugePageAllocator(const HugePageAllocator<Other>&) {}

  T* allocate(size_t count) {
    if (count > static_cast<size_t>(-1) / sizeof(T)) throw std::bad_alloc();
    return static_cast<T*>(allocate_huge(count * sizeof(T), alignof(std::max_align_t)));
  }
  void deallocate(T* data, size_t count) noexcept { free_huge(data, count * sizeof(T)); }

  template <class Other>
  bool operator==(const HugePageAllocator<Other>&) const {
    return true;
  }
  template <class Other>
  bool operator!=(const HugePageAllocator<Other>&) const {
    return false;
  }
};

// Numbers that are zero at first.
template <class T>
class HugeZeros {
 public:
  explicit HugeZeros(size_t size)
      : size_(size),
        data_(static_cast<T*>(allocate_huge_zeros(size * sizeof(T), alignof(std::max_align_t)))) {}
  ~HugeZeros() { free_huge(data_, size_ * sizeof(T)); }
  HugeZeros(const HugeZeros&) = delete;
  HugeZeros& operator=(const HugeZeros&) = delete;

  void make_pages() { cpr_ext::make_pages(data_, size_ * sizeof(T)); }

  size_t size() const { return size_; }
  T* begin() { return data_; }
  const T* begin() const { return data_; }
  T& operator[](size_t i) { return data_[i]; }
  const T& operator[](size_t i) const { return data_[i]; }

 private:
  size_t size_;
  T* data_;
};

}  // namespace cpr_ext
