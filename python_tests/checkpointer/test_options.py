"""The options of staging, and that all have one default."""

import inspect
from dataclasses import fields

import pytest

from cpr_ext import Checkpointer, StagingOptions
from cpr_ext.checkpointer.options import CheckpointerOptions
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


def test_the_options_are_those_of_the_checkpointer_with_its_defaults():
    parameters = inspect.signature(Checkpointer).parameters
    of_program = {"model", "optimizers", "directory", "tables"}
    of_program |= {"extra_state", "stateful", "per_rank"}
    assert {each.name for each in fields(CheckpointerOptions)} == set(parameters) - of_program
    made = CheckpointerOptions()
    for name in parameters.keys() - of_program:
        default = parameters[name].default
        given = {} if default is None else {name: default}
        assert getattr(CheckpointerOptions(**given), name) == getattr(made, name), name
