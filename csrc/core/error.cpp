#include "core/error.h"

#include <cstring>

namespace cpr_ext {

namespace {
std::string describe(const std::string& operation, const std::string& path, int code,
                     const std::string& remedy) {
  std::string text = operation + " failed on '" + path + "': " + std::strerror(code);
  if (!remedy.empty()) text += " (" + remedy + ")";
  return text;
}
}  // namespace

StorageError::StorageError(const std::string& operation, const std::string& path, int code,
                           const std::string& remedy)
    : std::runtime_error(describe(operation, path, code, remedy)), path_(path), code_(code) {}

}  // namespace cpr_ext
