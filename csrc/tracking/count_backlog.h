// Lookups that are given to a tracker and not yet counted.
#pragma once

namespace cpr_ext {

class CountBacklog {
 public:
  virtual ~CountBacklog() = default;
  virtual void wait() = 0;  // returns once there are none
};

}  // namespace cpr_ext
