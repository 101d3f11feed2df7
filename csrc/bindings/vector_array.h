// A vector handed to numpy without a copy, and row ids back.
#pragma once

#include <pybind11/numpy.h>

#include <memory>
#include <utility>
#include <vector>

#include "core/row_id_vector.h"

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

// Row ids, which share_row_ids() finds again.
pybind11::array_t<int64_t> to_numpy(RowIdVector row_ids);

// Those of an array (n,) int64 of `size` ids at `data`: without a copy if to_numpy() made it of all
// of a vector, which nobody may change then.
SharedRowIds share_row_ids(pybind11::handle array, const int64_t* data, int64_t size);

}  // namespace cpr_ext
