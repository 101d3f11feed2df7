// A whole batch in one call: every table's lookups into its tracker.
#pragma once

#include <vector>

#include "core/thread_pool.h"
#include "tracking/lookup.h"
#include "tracking/row_tracker.h"

namespace cpr_ext {

// trackers[i] observes lookups[i]; a tracker may occur more than once. Everything is checked before
// anything is observed: on RowIndexError (of the first lookup at fault) every tracker is as before.
// Those on a device count on its stream, together; bad indices that it found in lookups of earlier
// calls are told once those of this call, which are not at fault, have been observed.
// Trackers are spread over the pool, each on one thread and its lookups in order.
// REQUIRES: both vectors have the same size.
void count_lookups(const std::vector<RowTracker*>& trackers, const std::vector<Lookup>& lookups,
                   ThreadPool* pool);

}  // namespace cpr_ext
