#include "pipeline/exact_rows.h"

namespace cpr_ext {

std::string check_exact(const Chunk& chunk, const std::byte* data) {
  const auto* positions = reinterpret_cast<const int32_t*>(data);
  int64_t previous = -1;
  for (int64_t i = 0; i < chunk.exact.count; ++i) {
    if (positions[i] <= previous || positions[i] >= chunk.count) {
      return "exact row " + std::to_string(positions[i]) + " is out of order or of its chunk";
    }
    previous = positions[i];
  }
  return "";
}

}  // namespace cpr_ext
