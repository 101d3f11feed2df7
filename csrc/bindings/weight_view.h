// A table's weight as it crosses to the trackers that measure it.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>
#include <string>

#include "tracking/row_tracker.h"
#include "tracking/weight_view.h"

namespace cpr_ext {

// Raises UsageError naming `table` unless `object` is floating, (num_rows, embedding_dim), with
// contiguous rows one after the other, in the memory of `device`. The view holds no reference: the
// caller keeps `object` alive.
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
