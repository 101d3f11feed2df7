#include "bindings/weight_view.h"

#include "bindings/tensor_view.h"
#include "core/error.h"

namespace py = pybind11;

namespace cpr_ext {

WeightView view_weight(py::handle object, const std::string& table, int device) {
  const std::string name = "the weight of table '" + table + "'";
  const TensorView view = view_tensor(object, name.c_str(), device);
  if (view.shape.size() != 2 || !is_floating(view.dtype)) {
    throw UsageError(name + " has dtype " + view.dtype_name + " and " +
                     std::to_string(view.shape.size()) +
                     " dimensions; it must be floating and (num_rows, embedding_dim)");
  }
  const bool row_contiguous = view.shape[1] <= 1 || view.strides[1] == 1;
  const bool rows_apart = view.shape[0] <= 1 || view.strides[0] >= view.shape[1];
  if (!row_contiguous || !rows_apart) {
    throw UsageError(name + " must have contiguous rows, one after the other; pass .contiguous()");
  }
  return {static_cast<const std::byte*>(view.data), view.dtype, view.shape[0], view.shape[1],
          view.strides[0] * view.item_bytes};
}

OptionalWeight::OptionalWeight(const py::object& object, const RowTracker& tracker) {
  if (object.is_none() || !tracker.needs_weight()) return;
  view_ = view_weight(object, tracker.name(), tracker.device());
}

}  // namespace cpr_ext
