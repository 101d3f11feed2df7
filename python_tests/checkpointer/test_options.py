"""The options of a Checkpointer, and of its store and its staging."""

import inspect

import pytest

from cpr_ext import Checkpointer, EverySteps, StagingOptions, StoreOptions
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
        (lambda: StoreOptions(rebase_after=0), "rebase_after is 0; it must be positive, or None"),
        (lambda: StoreOptions(rebase_after=float("nan")), "rebase_after is nan"),
        (lambda: StoreOptions(on_nan="ignore"), "on_nan is 'ignore'; allowed: raise, save"),
        (lambda: EverySteps(5, when_busy="skip"), "when_busy is 'skip'; allowed: delay, wait"),
    ],
)
def test_a_value_out_of_range_is_refused(make, message):
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


def test_the_door_has_eleven_options():
    parameters = inspect.signature(Checkpointer).parameters
    assert [*parameters] == [
        *("model", "optimizers", "directory", "priority", "schedule", "num_shards", "tables"),
        *("state", "store", "staging", "on_sigterm"),
    ]
