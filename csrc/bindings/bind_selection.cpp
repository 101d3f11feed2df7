#include "bindings/annotations.h"
#include "bindings/register.h"
#include "bindings/tensor_view.h"
#include "bindings/vector_array.h"
#include "selection/nonzero_rows.h"
#include "selection/top_rows.h"

namespace py = pybind11;

namespace cpr_ext {

namespace {

py::array_t<int64_t> top_rows_of(const ArrayLike& scores, int64_t k,
                                 const std::shared_ptr<ThreadPool>& pool) {
  const TensorView view = view_contiguous(scores, "scores", 1, {DType::kUInt32, DType::kFloat32});
  RowIdVector row_ids;
  {
    py::gil_scoped_release release;
    row_ids = view.dtype == DType::kUInt32
                  ? top_rows(static_cast<const uint32_t*>(view.data), view.shape[0], k, pool.get())
                  : top_rows(static_cast<const float*>(view.data), view.shape[0], k, pool.get());
  }
  return to_numpy(std::move(row_ids));
}

py::array_t<int64_t> nonzero_rows_of(const ArrayLike& rows,
                                     const std::shared_ptr<ThreadPool>& pool) {
  const TensorView view = view_contiguous(rows, "rows", 2, {});
  RowIdVector row_ids;
  {
    py::gil_scoped_release release;
    row_ids = nonzero_rows(static_cast<const std::byte*>(view.data), view.shape[0],
                           view.shape[1] * view.item_bytes, pool.get());
  }
  return to_numpy(std::move(row_ids));
}

}  // namespace

void register_selection(py::module_& module) {
  module.def(
      "nonzero_rows", &nonzero_rows_of, py::arg("rows"), py::arg("pool") = nullptr,
      "Return the rows of (num_rows, dim) in which any bit is set, such as those that a dense\n"
      "gradient changes.\n\n"
      "rows: any dtype, contiguous; torch (CPU) or numpy. Returns int64 row ids, ascending.");
  module.def(
      "top_rows", &top_rows_of, py::arg("scores"), py::arg("k"), py::arg("pool") = nullptr,
      "Return the k rows with the highest non-zero scores, ties by lowest row id; fewer if fewer\n"
      "are non-zero.\n\n"
      "scores: (num_rows) uint32 or float32, contiguous; torch (CPU) or numpy.\n"
      "Returns (<= k) int64 row ids, ascending. Linear in num_rows. Raises UsageError for\n"
      "a score that is NaN or negative.");
}

}  // namespace cpr_ext
