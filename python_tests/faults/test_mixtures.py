"""Directories of different commits of one store are never mixed without a word."""

import importlib
import random

import pytest

from cpr_ext.storage import stale_manifests
from python_tests.faults.mixtures import DIRECTORIES, make_copies, mix, mixtures, try_mixture

repair_module = importlib.import_module("cpr_ext.tools.maintenance.repair")


@pytest.fixture(scope="module", params=["partial", "base"])
def copies(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixtures")
    return folder, make_copies(folder, request.param)


def test_a_mixture_of_commits_is_exact_or_says_which_rows_are_older(copies, tmp_path):
    folder, numbers = copies
    for of in random.Random(1).sample(list(mixtures(numbers)), 8):
        assert try_mixture(mix(folder, of, tmp_path / "store"))[1] == "", of


def test_without_descent_a_mixture_would_pass(copies, tmp_path, monkeypatch):
    folder, numbers = copies
    for module in (stale_manifests, repair_module):
        monkeypatch.setattr(module, "shards_without", lambda *_: ())
    monkeypatch.setattr(repair_module, "position_of", lambda _, records, start: len(records))
    newest, older = numbers[-1], numbers[-2]
    of = (newest, *[older] * (len(DIRECTORIES) - 1))
    assert try_mixture(mix(folder, of, tmp_path / "store"))[1] != ""
