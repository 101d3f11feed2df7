// A table's weight as it is now, for the trackers that measure it.
#pragma once

#include <cfloat>
#include <cstddef>
#include <cstdint>
#include <string>

#include "core/dtype.h"

namespace cpr_ext {

struct WeightView {
  const std::byte* data = nullptr;  // (num_rows, embedding_dim), each row contiguous; not owned
  DType dtype = DType::kFloat32;    // a floating type
  int64_t num_rows = 0;
  int64_t embedding_dim = 0;
  int64_t row_stride_bytes = 0;

  const std::byte* row(int64_t row_id) const { return data + row_id * row_stride_bytes; }
};

// The weight whose change a tracker measures; every later view of it must be of this table.
class MeasuredWeight {
 public:
  // Throws UsageError unless it is floating with at least one column.
  MeasuredWeight(std::string table, const WeightView& weight);

  DType dtype() const { return dtype_; }
  int64_t embedding_dim() const { return embedding_dim_; }
  int64_t row_bytes() const { return embedding_dim_ * item_size(dtype_); }

  // The weight as it is now. Throws UsageError if there is none, or of another shape or dtype.
  const WeightView& checked(const WeightView* weight) const;

  // Throws NanError: this row holds NaN.
  [[noreturn]] void refuse_nan(int64_t row_id) const;

 private:
  std::string table_;
  DType dtype_;
  int64_t num_rows_;
  int64_t embedding_dim_;
};

// Below every change that can be told from none, above the zero that no row to select has. Normal,
// so that it survives a thread that flushes subnormals to zero.
constexpr float kSmallestChange = FLT_MIN;

}  // namespace cpr_ext
