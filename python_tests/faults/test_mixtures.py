"""Parts of different commits of one store are refused, or repaired to one commit."""

import random

import pytest

from cpr_ext.storage import segment_header, store
from cpr_ext.wings.tools.maintenance import verification
from python_tests.faults.mixtures import make_copies, mix, mixtures, try_mixture


@pytest.fixture(scope="module", params=["partial", "base"])
def copies(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixtures")
    return folder, make_copies(folder, request.param)


def test_a_mixture_of_commits_is_exact_or_refused(copies, tmp_path):
    folder, numbers = copies
    for of in random.Random(1).sample(list(mixtures(numbers)), 16):
        assert try_mixture(mix(folder, of, tmp_path / "store"))[1] == "", of


def test_without_descent_an_older_manifest_would_pass_for_the_newest(copies, tmp_path, monkeypatch):
    folder, (older, *_, newest) = copies
    of = (older, newest, older)
    place = mix(folder, of, tmp_path / "store")
    assert not verification.verify(place).is_sound
    assert try_mixture(place)[0] != "exact"
    for module in (store, verification):
        monkeypatch.setattr(module, "older_than_previous", lambda *_: None)
    assert try_mixture(mix(folder, of, place))[0] == "exact"


def test_without_ids_a_segment_of_another_snapshot_would_pass(tmp_path, monkeypatch):
    """With the checksum of its header: a collision of 32 bits."""
    folder = tmp_path / "twins"
    folder.mkdir()
    make_copies(folder, "base")
    assert segment_header._identity({"kind": 1, "snapshot": 2, "id": 3}) == (1, 2, 3)
