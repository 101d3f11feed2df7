"""A sample of random histories, and whether they would see a comparison that is missing."""

import importlib
from dataclasses import replace

import pytest

from cpr_ext.distributed.collective import recovery_decision
from cpr_ext.recovery import sources
from cpr_ext.storage import stale_manifests
from cpr_ext.storage.remote.filling import Filling
from cpr_ext.storage.remote.opening import RemoteStore
from cpr_ext.storage.remote.remote_state import RemoteState
from cpr_ext.storage.store import Store
from cpr_ext.tools.publishing import publisher
from python_tests.faults.histories import BACKUPS, COPIES, JOBS, PUBLICATIONS, History

repair_module = importlib.import_module("cpr_ext.tools.maintenance.repair")
changed_rows_module = importlib.import_module("cpr_ext.tools.publishing.changed_rows")
stale_rows, next_state = sources._stale_rows, publisher._Next

# Every comparison of descent: where it is, what is in its place, and operations that show it.
COMPARISONS = {
    "a shard holds the rows of each snapshot": (
        *(stale_manifests, "shards_without", lambda *_: ()),
        ("train", "twins", "clone", "mix"),
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
    "a directory that is read from the copy fits": (
        *(RemoteStore, "_fits", lambda *_: True),
        ("train", "copy", "lose directory"),
    ),
    "a backup is replaced by what follows from it": (
        *(Filling, "_require_descent", lambda *_: None),
        ("train", "clone", *BACKUPS),
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
