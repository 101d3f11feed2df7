// A vector handed to numpy without a copy.
#pragma once

#include <pybind11/numpy.h>

#include <memory>
#include <utility>
#include <vector>

namespace cpr_ext {

template <class T, class Allocator>
pybind11::array_t<T> to_numpy(std::vector<T, Allocator> values) {
  using Vector = std::vector<T, Allocator>;
  auto owner = std::make_unique<Vector>(std::move(values));
  const auto size = static_cast<pybind11::ssize_t>(owner->size());
  const T* data = owner->data();
  pybind11::capsule keep_alive(owner.get(),
                               [](void* vector) { delete static_cast<Vector*>(vector); });
  owner.release();
  return pybind11::array_t<T>(size, data, keep_alive);
}

}  // namespace cpr_ext
