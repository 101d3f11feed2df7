#include "tracking/row_change.h"

#include <cmath>

namespace cpr_ext {

namespace {

template <class Format>
float norm(const void* now_data, const void* before_data, int64_t size) {
  using Value = typename Format::Value;
  const auto* now = static_cast<const typename Format::Stored*>(now_data);
  const auto* before = static_cast<const typename Format::Stored*>(before_data);
  constexpr int kLanes = 8;  // independent sums, so that a vector unit can hold them
  Value lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const Value step = Format::load(now[i + lane]) - Format::load(before[i + lane]);
      lanes[lane] = add_square(lanes[lane], step);
    }
  }
  for (int lane = 0; i < size; ++i, ++lane) {
    const Value step = Format::load(now[i]) - Format::load(before[i]);
    lanes[lane] = add_square(lanes[lane], step);
  }
  Value sum = ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) +
              ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
  if (std::isnan(sum)) sum = careful_sum<Format>(now, before, size);
  return static_cast<float>(square_root(sum));
}

}  // namespace

float row_change(DType dtype, const void* now, const void* before, int64_t embedding_dim) {
  return visit_format(
      dtype, [&](auto format) { return norm<decltype(format)>(now, before, embedding_dim); });
}

}  // namespace cpr_ext
