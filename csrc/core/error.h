// What can go wrong in the native core. A bug is an assert; damage that recovery expects is a
// return value; these are the user's and the system's faults, and carry the values and the remedy.
#pragma once

#include <stdexcept>
#include <string>

namespace cpr_ext {

// The caller asked for something that cannot be: wrong shape, dtype, size. Nothing was changed.
class UsageError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// A row index lies outside its table. Nothing was changed.
class RowIndexError : public UsageError {
 public:
  using UsageError::UsageError;
};

// The operating system refused: `operation` on `path` gave errno `code`.
class StorageError : public std::runtime_error {
 public:
  StorageError(const std::string& operation, const std::string& path, int code,
               const std::string& remedy = "");
  int code() const { return code_; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  int code_;
};

// A row to be saved holds NaN: a diverged model must not replace good rows.
class NanError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A call of the CUDA runtime failed, or work on a GPU that was found to have failed by it.
class CudaError : public std::runtime_error {
 public:
  CudaError(const std::string& call, int code, const std::string& message, const std::string& file,
            int line);
  // The same error, with what it was that could not be done and the remedy before it.
  CudaError(const CudaError& error, const std::string& purpose)
      : std::runtime_error(purpose + ": " + error.what()), code_(error.code_) {}
  int code() const { return code_; }

 private:
  int code_;
};

}  // namespace cpr_ext
