"""After shards were restored, each of their rows has the hash of what was restored."""

import tempfile
import warnings
from contextlib import suppress
from itertools import product
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext._native import native
from cpr_ext.errors import SnapshotError, StoreError
from cpr_ext.saving.table_scrub import TableScrub
from cpr_ext.state.table import shard_row_range
from python_tests.examples import examples
from python_tests.helpers import Trained
from python_tests.saving.failures import NUM_SHARDS, OPTIONS

EVENTS = (
    "train",
    "begin",
    "partial",
    "base",
    "failed",
    "recover 0",
    "recover 1",
    "recover",
    "scrub",
)
WAYS = (
    {},
    {"consistency": "row"},
    {"overlap": "always"},
    {"overlap": "always", "consistency": "row"},
)


class Run:
    """A run with a base snapshot, whose snapshots may fail."""

    def __init__(self, directory, **way):
        self.trained = Trained(directory, optimizer="sgd", **{**OPTIONS, **way})
        self.trained.train(1)
        self.checkpointer = self.trained.checkpointer
        self.checkpointer.wait()
        self.were_recorded = []

    def do(self, event):
        if event == "train":
            self.trained.train(2)
        elif event == "begin":
            self.checkpointer.save("partial")
        elif event == "failed":
            self.fail()
        elif event == "scrub":
            assert self.checkpointer.scrub() == {}
        elif event.startswith("recover"):
            self.recover(None if event == "recover" else [int(event[-1])])
        else:
            self.checkpointer.save(event)
            self.checkpointer.wait()

    def fail(self):
        """Save rows that have changed, which fails after they were captured."""
        shard = self.trained.store.directory / "shard-00001"
        hidden = shard.with_name("hidden")
        shard.rename(hidden)
        try:
            self.checkpointer.save("partial")
            with warnings.catch_warnings(), suppress(SnapshotError):
                warnings.simplefilter("ignore")
                self.checkpointer.wait()
        finally:
            hidden.rename(shard)

    def recover(self, shards):
        mode = "full" if shards is None else "partial"
        with mock.patch.object(TableScrub, "record_restored", self.spy(TableScrub.record_restored)):
            with suppress(StoreError):  # no snapshot has all rows of one step; nothing changed then
                self.checkpointer.recover(shards=shards, mode=mode)
        tables = self.checkpointer._saver.claims.scrub._tables.values()
        for scrub, shard in product(tables, shards or range(NUM_SHARDS)):
            rows = scrub.table.num_embeddings
            begin, end = shard_row_range(rows, shard, NUM_SHARDS)
            restored = native.HostRowHashes(name="restored", num_rows=rows)
            restored.record_range(scrub.arrays(), begin, end)
            found = scrub._hashes.range_values(begin, end)
            assert (found == restored.range_values(begin, end)).all()

    def spy(self, record):
        def spied(scrub, begin, end, *, are_recorded):
            self.were_recorded.append(are_recorded)
            record(scrub, begin, end, are_recorded=are_recorded)

        return spied


@pytest.mark.parametrize(
    ("events", "are_recorded"),
    [
        (["train", "partial", "train", "recover 0"], True),
        (["train", "partial", "recover"], False),
        (["train", "failed", "recover 0"], False),
        (["train", "failed", "train", "partial", "recover 0"], False),
        (["train", "failed", "train", "base", "train", "recover 1"], True),
    ],
)
def test_captured_rows_keep_their_hashes_unless_a_capture_was_not_saved(
    tmp_path, events, are_recorded
):
    run = Run(tmp_path / "store")
    for event in events:
        run.do(event)
    assert set(run.were_recorded) == {are_recorded}
    run.checkpointer.close()


@pytest.mark.filterwarnings("ignore::cpr_ext.errors.SnapshotFailedWarning")
@examples(40)
@given(st.sampled_from(WAYS), st.lists(st.sampled_from(EVENTS), min_size=2, max_size=8))
def test_hashes_are_of_what_was_restored_whatever_came_before(way, events):
    with tempfile.TemporaryDirectory() as directory:
        run = Run(Path(directory) / "store", **way)
        for event in [*events, "recover 0", "recover 1", "scrub"]:
            run.do(event)
        run.checkpointer.close()
