// Row ids as a selection hands them over: many, and each written once.
#pragma once

#include <cstdint>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "core/huge_pages.h"

namespace cpr_ext {

// A vector of n elements does not write them first: whoever makes it does.
template <class T>
struct UninitializedAllocator : HugePageAllocator<T> {
  template <class Other>
  struct rebind {
    using other = UninitializedAllocator<Other>;
  };

  UninitializedAllocator() = default;
  template <class Other>
  UninitializedAllocator(const UninitializedAllocator<Other>&) {}

  template <class Other>
  void construct(Other* at) noexcept {
    ::new (static_cast<void*>(at)) Other;
  }
  template <class Other, class... Arguments>
  void construct(Other* at, Arguments&&... arguments) {
    ::new (static_cast<void*>(at)) Other(std::forward<Arguments>(arguments)...);
  }
};

using RowIdVector = std::vector<int64_t, UninitializedAllocator<int64_t>>;

// Millions of row ids that several hold, and nobody changes.
using SharedRowIds = std::shared_ptr<const RowIdVector>;

}  // namespace cpr_ext
