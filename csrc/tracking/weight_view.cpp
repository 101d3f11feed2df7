#include "tracking/weight_view.h"

#include <utility>

#include "core/error.h"

namespace cpr_ext {

MeasuredWeight::MeasuredWeight(std::string table, const WeightView& weight)
    : table_(std::move(table)),
      dtype_(weight.dtype),
      num_rows_(weight.num_rows),
      embedding_dim_(weight.embedding_dim) {
  if (!is_floating(weight.dtype) || weight.embedding_dim < 1) {
    throw UsageError("table '" + table_ + "': change is measured on a floating weight with at" +
                     " least one column");
  }
}

const WeightView& MeasuredWeight::checked(const WeightView* weight) const {
  if (weight == nullptr) {
    throw UsageError("table '" + table_ + "': a ChangeMeter measures the table; pass weight=");
  }
  if (weight->dtype != dtype_ || weight->num_rows != num_rows_ ||
      weight->embedding_dim != embedding_dim_) {
    throw UsageError("table '" + table_ + "': weight has another shape or dtype than the (" +
                     std::to_string(num_rows_) + ", " + std::to_string(embedding_dim_) +
                     ") one this ChangeMeter was made with");
  }
  return *weight;
}

void MeasuredWeight::refuse_nan(int64_t row_id) const {
  throw NanError("table '" + table_ + "': row " + std::to_string(row_id) +
                 " holds NaN; the model has diverged, its last good state is kept");
}

}  // namespace cpr_ext
