"""The memory of counts and hashes is made on request: the first writes then wait for no page."""

import resource

import numpy as np
import pytest

from cpr_ext._native import native

ROWS = 64 << 20
ONE_IN_EACH_PAGE = np.arange(0, ROWS, 1 << 19)


def first_counts(kind):
    tracker = getattr(native, kind)(name="a", num_rows=ROWS)
    return tracker, lambda: tracker.observe(ONE_IN_EACH_PAGE)


def first_hashes(kind):
    hashes = getattr(native, kind)(name="a", num_rows=ROWS)
    array = np.ones((ROWS, 1), dtype=np.uint8)
    return hashes, lambda: hashes.record([array], ONE_IN_EACH_PAGE)


@pytest.mark.parametrize(
    ("make", "kind"), [(first_counts, "AccessCounter"), (first_hashes, "HostRowHashes")]
)
@pytest.mark.parametrize("is_made", [True, False])
def test_the_first_writes_meet_pages_that_are_there(make, kind, is_made):
    owner, write = make(kind)
    if is_made:
        owner.make_memory()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    write()
    # Others may have some; pages of 2 MB that are not there have at least 64.
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults < 20) == is_made


def test_what_was_counted_stays():
    for kind in ("AccessCounter", "DirtyRows"):
        tracker, count = first_counts(kind)
        count()
        tracker.make_memory()
        assert tracker.num_dirty() == len(ONE_IN_EACH_PAGE)
