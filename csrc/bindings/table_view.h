// The tensors of a table, as the rooms that copy and measure its rows see them.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>
#include <string>

#include "core/device_stream.h"
#include "staging/row_array.h"
#include "staging/row_precision.h"
#include "tracking/row_tracker.h"
#include "tracking/weight_view.h"

namespace cpr_ext {

// Views hold no reference: the caller keeps the tensor alive.

// Raises UsageError naming `name` unless `tensor` is (num_rows, ...) with contiguous rows that do
// not overlap, in the memory of `device`.
RowArray view_rows(pybind11::handle tensor, const char* name, int64_t first_row_id,
                   int device = kHostMemory);

// Throws UsageError with the names that there are.
RowPrecision parse_precision(const std::string& name);

// Raises UsageError naming `table` unless `object` is floating, (num_rows, embedding_dim), with
// contiguous rows one after the other, in the memory of `device`.
WeightView view_weight(pybind11::handle object, const std::string& table, int device);

// The weight for a call of a tracker, if it needs one and was given one.
class OptionalWeight {
 public:
  OptionalWeight(const pybind11::object& object, const RowTracker& tracker);
  const WeightView* get() const { return view_ ? &*view_ : nullptr; }

 private:
  std::optional<WeightView> view_;
};

}  // namespace cpr_ext
