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

CudaError::CudaError(const std::string& call, int code, const std::string& message,
                     const std::string& file, int line)
    : std::runtime_error("CUDA error " + std::to_string(code) + " (" + message + ") at " + call +
                         ", " + file.substr(file.find_last_of('/') + 1) + ":" +
                         std::to_string(line)),
      code_(code) {}

}  // namespace cpr_ext
