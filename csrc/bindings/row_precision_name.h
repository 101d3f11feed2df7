// The names of precisions, as Python has them.
#pragma once

#include <string>

#include "staging/row_precision.h"

namespace cpr_ext {

// Throws UsageError with those that there are.
RowPrecision parse_precision(const std::string& name);

}  // namespace cpr_ext
