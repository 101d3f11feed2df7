// A table's weight as it is now, for the trackers that measure it.
#pragma once

#include <cstddef>
#include <cstdint>

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

}  // namespace cpr_ext
