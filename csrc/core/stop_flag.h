// Asks work on another thread to return early.
#pragma once

#include <atomic>
#include <exception>

namespace cpr_ext {

struct StopFlag {
  std::atomic<bool> value{false};
};

// Thrown by work that was asked to stop; nothing has changed.
struct Stopped : std::exception {
  const char* what() const noexcept override { return "asked to stop"; }
};

// While it lives, loops that its thread starts (selection's) stop once the flag is set.
class StopScope {
 public:
  explicit StopScope(const StopFlag* flag) : before_(current()) { current() = flag; }
  ~StopScope() { current() = before_; }
  StopScope(const StopScope&) = delete;
  StopScope& operator=(const StopScope&) = delete;

  static const StopFlag*& current() {
    thread_local const StopFlag* flag = nullptr;
    return flag;
  }

 private:
  const StopFlag* before_;
};

}  // namespace cpr_ext
