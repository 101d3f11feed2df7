"""A sample of random histories, and whether they would see a comparison that is missing."""

import importlib
from contextlib import suppress

import pytest

from cpr_ext.distributed.collective import recovery_decision
from cpr_ext.errors import CprError
from cpr_ext.storage import store
from cpr_ext.storage.manifest import Manifest
from cpr_ext.storage.store import Store
from cpr_ext.wings.publishing import publisher
from cpr_ext.wings.tools.maintenance import verification
from python_tests.faults.histories import COPIES, JOBS, PUBLICATIONS, History, objects_of_all
from python_tests.faults.history_model import cut_off

changed_rows_module = importlib.import_module("cpr_ext.wings.publishing.changed_rows")
next_state = publisher._Next


def begin_copy_without_a_commit(store, origin):
    origin.begin(store.manifest)
    store.origin = origin


# Every comparison of descent: where it is, what is in its place, and operations that show it.
COMPARISONS = {
    "no manifest is older than the one before it": (
        *(store, "older_than_previous", lambda *_: None),
        ("train", "put back"),
    ),
    "what is refused as older does not verify": (
        *(verification, "older_than_previous", lambda *_: None),
        ("train", "put back"),
    ),
    "a store that is copied follows from the copy": (
        *(Manifest, "descends_from", lambda self, commit: True),
        ("train", "clone", "copy", "copy"),
    ),
    "a machine that takes over makes a commit of its own": (
        *(Store, "_begin_copy", begin_copy_without_a_commit),
        ("train", *COPIES),
    ),
    "a consumer follows by identity, not by number": (
        publisher,
        "_Next",
        lambda number, state, after: next_state(number, f"{number:032x}", after),
        ("train", "publish", "consume", "fork publication"),
    ),
    "what changed is known by the ids of snapshots": (
        *(changed_rows_module, "_find", lambda ids, wanted: len(ids)),
        ("train", *PUBLICATIONS),
    ),
    "the workers of a job are of one run": (
        *(recovery_decision, "agree_on_run", lambda runs: runs[0][0] or runs[0][1]),
        JOBS,
    ),
}


@pytest.mark.parametrize("seed", range(12))
def test_a_random_history_is_as_the_model_says(tmp_path, seed):
    assert History(tmp_path, seed).run(14) == []


@pytest.fixture
def history(tmp_path):
    """A history whose steps a test chooses."""
    history = History(tmp_path, 0)
    with objects_of_all(history._objects):
        yield history


def test_a_clone_of_a_save_that_was_cut_off_as_it_became_durable_may_not_continue_the_copy(history):
    """The store has made a commit of its own since, for the copy."""
    history._train()
    (store,) = history._clones
    run = history._opened(store)
    with cut_off(2, is_after=True), suppress(CprError):
        history._save(store, run, "partial")
    run.release()
    history._clone()
    history._copy_of(store)
    clone = history._clones[-1]
    history._opened(clone).release()
    history._copy_of(clone)
    assert history.faults == []


@pytest.mark.parametrize("comparison", COMPARISONS)
def test_without_a_comparison_of_descent_a_history_is_wrong(tmp_path, monkeypatch, comparison):
    place, name, without, operations = COMPARISONS[comparison]
    assert not _is_wrong(tmp_path / "with", 0, operations)
    monkeypatch.setattr(place, name, without)
    assert any(_is_wrong(tmp_path / str(seed), seed, operations) for seed in range(30))


def _is_wrong(folder, seed, operations):
    folder.mkdir()
    try:
        return bool(History(folder, seed, operations).run(14))
    except AssertionError:
        return True
