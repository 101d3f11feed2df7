#include "bindings/table_view.h"

#include "bindings/tensor_view.h"
#include "core/error.h"

namespace py = pybind11;

namespace cpr_ext {

RowArray view_rows(py::handle tensor, const char* name, int64_t first_row_id, int device) {
  const TensorView view = view_tensor(tensor, name, device);
  if (view.shape.empty()) {
    throw UsageError(std::string(name) + " is a scalar; its first dimension must be num_rows");
  }
  RowArray rows;
  rows.data = static_cast<std::byte*>(view.data);
  rows.num_rows = view.shape[0];
  rows.dtype = view.dtype;
  rows.first_row_id = first_row_id;
  int64_t row_items = 1;
  for (size_t i = view.shape.size(); i-- > 1;) {
    if (view.shape[i] == 0) throw UsageError(std::string(name) + ": a row has no bytes");
    const bool is_apart = view.shape[i] != 1 && view.strides[i] != row_items;
    if (is_apart && rows.num_rows > 0) {  // numpy gives empty arrays any strides
      throw UsageError(std::string(name) + ": the elements of a row must be contiguous");
    }
    row_items *= view.shape[i];
  }
  rows.row_bytes = row_items * view.item_bytes;
  if (rows.row_bytes == 0) throw UsageError(std::string(name) + ": a row has no bytes");
  rows.row_stride_bytes = view.strides[0] * view.item_bytes;
  if (rows.num_rows > 1 && rows.row_stride_bytes < rows.row_bytes) {
    throw UsageError(std::string(name) + ": rows overlap or are in reverse order");
  }
  if (rows.num_rows <= 1) rows.row_stride_bytes = rows.row_bytes;
  return rows;
}

RowPrecision parse_precision(const std::string& name) {
  if (name == "float32") return RowPrecision::kExact;
  if (name == "float16") return RowPrecision::kFloat16;
  if (name == "int8") return RowPrecision::kInt8;
  throw UsageError("precision is '" + name + "'; allowed: float32, float16, int8");
}

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
