// Threads do not survive a fork: in the child their owners can neither be stopped nor destroyed.
#pragma once

#include <unistd.h>

namespace cpr_ext {

// Deletes in the process that made the object; a forked child (a data loader's worker, say) leaves
// its copy where it is, since joining threads that it does not have would crash it.
struct DeleteInCreator {
  pid_t creator = ::getpid();

  template <typename T>
  void operator()(T* object) const {
    if (::getpid() == creator) delete object;
  }
};

}  // namespace cpr_ext
