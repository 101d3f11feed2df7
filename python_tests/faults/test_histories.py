"""A sample of random histories, and whether they would see a comparison that is missing."""

import importlib
from dataclasses import replace

import pytest

from cpr_ext.recovery import sources
from cpr_ext.storage import stale_manifests
from cpr_ext.storage.remote.remote_state import StoreView
from cpr_ext.storage.store import Store
from python_tests.faults.histories import History

repair_module = importlib.import_module("cpr_ext.maintenance.repair")
stale_rows = sources._stale_rows


@pytest.mark.parametrize("seed", range(12))
def test_a_random_history_is_as_the_model_says(tmp_path, seed):
    assert History(tmp_path, seed).run(10) == []


@pytest.mark.parametrize(
    ("place", "name", "without"),
    [
        (stale_manifests, "shards_without", lambda *_: ()),
        (repair_module, "shards_without", lambda *_: ()),
        (StoreView, "descends_from", lambda self, other: True),
        (Store, "claim", lambda self: None),
        (
            sources,
            "_stale_rows",
            lambda part, record, *more: stale_rows(part, replace(record, is_mixed=False), *more),
        ),
    ],
)
def test_without_a_comparison_of_descent_a_history_is_wrong(
    tmp_path, monkeypatch, place, name, without
):
    monkeypatch.setattr(place, name, without)
    assert any(_is_wrong(tmp_path / str(seed), seed) for seed in range(30))


def _is_wrong(folder, seed):
    folder.mkdir()
    try:
        return bool(History(folder, seed).run(10))
    except AssertionError:
        return True
