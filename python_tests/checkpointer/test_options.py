"""The options of staging and compaction."""

import pytest

from cpr_ext import CompactionOptions, StagingOptions
from cpr_ext.errors import UsageError
from python_tests.helpers import Trained


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StagingOptions(num_slots=1), "num_slots is 1; it must be at least 2"),
        (lambda: StagingOptions(slot_bytes=0), "slot_bytes is 0; it must be at least 1, or None"),
        (lambda: StagingOptions(slot_bytes=-4096), "slot_bytes is -4096"),
        (lambda: StagingOptions(num_threads=0), "num_threads is 0; it must be at least 1, or None"),
        (lambda: StagingOptions(num_threads=1.5), "num_threads is 1.5; needed: a whole number"),
        (lambda: StagingOptions(copy_on_write_bytes=-1), "copy_on_write_bytes is -1"),
        (lambda: CompactionOptions(after=0), "CompactionOptions.after is 0; it must be positive"),
        (lambda: CompactionOptions(bytes_per_second=-1), "bytes_per_second is -1"),
    ],
)
def test_a_number_out_of_range_is_refused(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_whole_numbers_of_any_type_are_taken():
    assert StagingOptions(num_slots=4.0, slot_bytes=8192.0) == StagingOptions(8192, 4)


def test_options_cannot_be_changed_once_made():
    with pytest.raises(AttributeError):
        StagingOptions().num_slots = 5


def test_a_keyword_that_never_was_is_a_type_error(tmp_path):
    with pytest.raises(TypeError, match="unexpected keyword argument 'slotbytes'"):
        Trained(tmp_path, slotbytes=3)
