"""A sample of random histories, and whether they would see a comparison that is missing."""

import importlib
import shutil
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from cpr_ext.distributed.collective import recovery_decision
from cpr_ext.errors import CprError
from cpr_ext.recovery import sources
from cpr_ext.storage import lineage, stale_manifests
from cpr_ext.storage.remote import opening
from cpr_ext.storage.remote.filling import Filling
from cpr_ext.storage.remote.opening import RemoteStore
from cpr_ext.storage.remote.remote_state import RemoteState
from cpr_ext.storage.store import Store
from cpr_ext.tools.maintenance import verification, verify
from cpr_ext.tools.publishing import publisher
from python_tests.faults.histories import (
    BACKUPS,
    COPIES,
    JOBS,
    PUBLICATIONS,
    ROWS_OF_SHARDS,
    History,
)
from python_tests.faults.history_model import cut_off
from python_tests.faults.mixtures import DIRECTORIES

repair_module = importlib.import_module("cpr_ext.tools.maintenance.repair")
changed_rows_module = importlib.import_module("cpr_ext.tools.publishing.changed_rows")
stale_rows, next_state = sources._stale_rows, publisher._Next
shards_without = lineage.shards_without

require_descent = Filling._require_descent


def _require_descent_or_claim(self, view):
    if self.held is None or not set(self.held.ancestors[-2:]) & set(view.ancestors):
        require_descent(self, view)


def _shards_that_did_not_pass(dense, shards, start):
    return shards_without(SimpleNamespace(snapshot=0, shards=dense.shards), shards, start)


# Every comparison of descent: where it is, what is in its place, and operations that show it.
COMPARISONS = {
    "a shard holds the rows of each snapshot": (
        *(stale_manifests, "shards_without", lambda *_: ()),
        ("train", "twins", "clone", "mix"),
    ),
    "what follows it in a shard is of later snapshots": (
        *(stale_manifests, "shards_without", _shards_that_did_not_pass),
        ("train", "twins"),
    ),
    "no manifest is older than another has seen": (
        *(stale_manifests, "find_outdated", lambda manifests: []),
        ("train", "put back"),
    ),
    "a repair goes to a state that all shards hold": (
        *(repair_module, "shards_without", lambda *_: ()),
        ("train", "twins", "clone", "mix"),
    ),
    "rows that a repair mixed count as older": (
        sources,
        "_stale_rows",
        lambda part, record, *more: stale_rows(part, replace(record, is_mixed=False), *more),
        ("train", "twins", "clone", "mix"),
    ),
    "a store that is copied follows from the copy": (
        *(RemoteState, "may_be_continued_by", lambda self, view: True),
        ("train", "clone", "copy", "copy"),
    ),
    "a machine that takes over makes a commit of its own": (
        *(Store, "claim", lambda self, claim: None),
        ("train", *COPIES),
    ),
    "only a store that has made the newest claim continues the copy": (
        *(RemoteState, "may_be_continued_by", lambda self, view: view.descends_from(self.view)),
        ("train", "clone", "copy", "lose twice"),
    ),
    "a store with the newest claim follows from what was added after that": (
        *(RemoteState, "may_be_continued_by", lambda self, view: self.claim in view.ancestors),
        ("train", "copy", "copy"),
    ),
    "a directory that is read from the copy fits": (
        *(RemoteStore, "_fits", lambda *_: True),
        ("train", "copy", "lose directory"),
    ),
    "a directory that is read from the copy is of the same commit": (
        *(opening, "shards_without", lambda *_: ()),
        ("train", "clone", "copy", "lose directory"),
    ),
    "what is refused as of another commit does not verify": (
        *(verification, "find_other_states", lambda *_: []),
        ("train", "twins", "clone", "mix"),
    ),
    "what is refused as older does not verify": (
        *(verification, "find_outdated", lambda manifests: []),
        ("train", "put back"),
    ),
    "a backup is replaced by what follows from it": (
        *(Filling, "_require_descent", lambda *_: None),
        ("train", "clone", *BACKUPS),
    ),
    "a backup is known by its commit, not by a claim before it": (
        *(Filling, "_require_descent", _require_descent_or_claim),
        ("train", "copy", "lose twice", *BACKUPS),
    ),
    "a consumer follows by identity, not by number": (
        publisher,
        "_Next",
        lambda number, state, after: next_state(number, f"{number:032x}", after),
        ("train", "publish", "consume", "fork publication"),
    ),
    "what changed is known by chains": (
        *(changed_rows_module, "_find", lambda chains, wanted: len(chains)),
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
    with patch("cpr_ext.storage.remote.opening.open_objects", lambda options: history._objects):
        yield history


def test_a_shard_that_a_snapshot_did_not_change_is_not_taken_from_a_clone_that_did(history):
    history._train()
    (store,) = history._clones
    history._clone()
    clone = history._clones[-1]
    for each, rows in zip((store, clone), ROWS_OF_SHARDS, strict=True):
        run = history._opened(each)
        history._save(each, run, "partial", rows)
        run.release()
    name = DIRECTORIES[2]
    shutil.rmtree(store.directory / name)
    shutil.copytree(clone.directory / name, store.directory / name)
    store.is_known = False
    assert not verify(store.directory).is_sound
    history._opened(store).release()
    assert history.faults == []


def test_a_claim_on_the_copy_is_not_the_commit_that_it_is_made_with(history):
    """A reader of a copy that is only claimed has that claim, but not the claimant's commit."""
    history._train()
    history._copy()
    claimant = history._take_over(saves=False)
    history._lose()
    for clone in (claimant, history._clones[-1], claimant):
        history._back_up_of(clone)
    assert history._backup.events == claimant.events
    assert history.faults == []


def test_a_claim_comes_after_a_save_that_was_cut_off_as_it_became_durable(history):
    """So a clone from between the two has the save, and may not continue the copy."""
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
