"""The options of staging and compaction, and the old keywords that they replace."""

import warnings

import pytest

from cpr_ext import CompactionOptions, StagingOptions
from cpr_ext.checkpointer.old_keywords import OldKeywords, replace_old_keywords
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


OLD = {
    "slot_bytes": 64 << 10,
    "num_slots": 4,
    "keep_bytes": 1 << 20,
    "num_threads": 1,
    "direct_io": False,
    "compact_after": 0.5,
    "compact_bytes_per_second": 1 << 30,
}


def test_each_old_keyword_has_a_replacement():
    assert OLD.keys() == OldKeywords.__annotations__.keys()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        replaced = replace_old_keywords(None, None, OLD)
    assert replaced == (
        StagingOptions(64 << 10, 4, 1 << 20, 1, False),
        CompactionOptions(0.5, 1 << 30),
    )


def test_without_any_keyword_nothing_is_merged():
    assert replace_old_keywords(None, None, {}) == (StagingOptions(), CompactionOptions(after=None))


@pytest.mark.parametrize(
    ("name", "replacement"),
    [
        ("slot_bytes", "staging=StagingOptions(slot_bytes=...)"),
        ("num_slots", "staging=StagingOptions(num_slots=...)"),
        ("keep_bytes", "staging=StagingOptions(copy_on_write_bytes=...)"),
        ("num_threads", "staging=StagingOptions(num_threads=...)"),
        ("direct_io", "staging=StagingOptions(direct_io=...)"),
        ("compact_after", "compaction=CompactionOptions(after=...)"),
        ("compact_bytes_per_second", "compaction=CompactionOptions(bytes_per_second=...)"),
    ],
)
def test_an_old_keyword_works_and_its_warning_names_the_new_one(tmp_path, name, replacement):
    with pytest.warns(DeprecationWarning, match="will be removed") as caught:
        run = Trained(tmp_path, **{name: OLD[name]})
    [warning] = [each for each in caught if each.category is DeprecationWarning]
    text = f"cpr_ext.Checkpointer({name}=...) will be removed; use {replacement}"
    assert str(warning.message) == text
    assert warning.filename.endswith("helpers.py")  # the caller
    run.train(1)
    run.checkpointer.wait()
    run.checkpointer.close()


def test_an_old_keyword_and_its_replacement_are_refused_together(tmp_path):
    with pytest.raises(UsageError, match="keep_bytes and staging are both given"):
        Trained(tmp_path, keep_bytes=1 << 20, staging=StagingOptions())
    with pytest.raises(UsageError, match="compact_after and compaction are both given"):
        Trained(tmp_path, compact_after=1.0, compaction=CompactionOptions())


def test_the_other_option_may_be_given_beside_an_old_keyword(tmp_path):
    with pytest.warns(DeprecationWarning, match="num_slots"):
        run = Trained(tmp_path, num_slots=4, compaction=CompactionOptions())
    assert run.checkpointer._saver._pipeline.num_free_slots == 4
    run.checkpointer.close()


def test_a_keyword_that_never_was_is_a_type_error(tmp_path):
    with pytest.raises(TypeError, match="unexpected keyword argument 'slotbytes'"):
        Trained(tmp_path, slotbytes=3)
