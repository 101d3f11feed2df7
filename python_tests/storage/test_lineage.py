"""Which state follows from which: chains of directories, commits of manifests."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext.storage import manifest as manifest_module
from cpr_ext.storage.lineage import (
    chain_after,
    commit_after,
    is_id,
    new_id,
    position_of,
    shards_without,
    split_ids,
)
from cpr_ext.storage.manifest import Manifest
from python_tests.storage.records import record

START = new_id()


@dataclass(frozen=True)
class Segment:
    snapshot: int
    chain: str
    shards: tuple[str, ...] = ()


def chain_of(*headers):
    """The segments of a directory that got these headers; None: a snapshot changed nothing."""
    found, chain = [], START
    for snapshot, header in enumerate(headers, 1):
        if header is not None:
            chain = chain_after(chain, "file", header)
            found.append(Segment(snapshot, chain))
    return found


@given(st.lists(st.binary(max_size=3), max_size=5), st.lists(st.binary(max_size=3), max_size=5))
def test_chains_are_equal_exactly_if_all_that_was_written_is(one, other):
    ends = [([segment.chain for segment in chain_of(*headers)] or [START])[-1] for headers in
            (one, other)]  # fmt: skip
    assert (ends[0] == ends[1]) == (one == other)
    assert all(map(is_id, ends))


@given(st.data())
def test_the_shards_without_a_state_are_those_that_did_not_pass_through_it(data):
    """A model of it: stores go on from a common history, and some shards are of another one."""
    num_shards, num_snapshots = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    changes = st.lists(st.booleans(), min_size=num_snapshots, max_size=num_snapshots)
    of_dense, held, first_wrong = [], [], []
    for shard in range(num_shards):
        changed, common = data.draw(changes), data.draw(st.integers(0, num_snapshots))
        others = changed[:common] + data.draw(changes)[common:]
        own_headers = [b"%d %d" % (shard, n) if yes else None for n, yes in enumerate(changed)]
        other_headers = [b"other %d" % n if yes else None for n, yes in enumerate(others)]
        of_dense.append(chain_of(*own_headers))
        held.append(chain_of(*own_headers[:common], *other_headers[common:]))
        differ = (n for n in range(common, num_snapshots) if changed[n] or others[n])
        first_wrong.append(next(differ, num_snapshots))
    for n in range(num_snapshots):
        chains = ([s.chain for s in shard if s.snapshot <= n + 1] for shard in of_dense)
        dense = Segment(n + 1, "", tuple([START, *each][-1] for each in chains))
        behind = tuple(shard for shard, first in enumerate(first_wrong) if first <= n)
        assert shards_without(dense, held, START) == behind


def test_a_dense_part_of_other_shards_is_reached_by_none():
    assert shards_without(Segment(1, "", (START,)), [[], []], START) == (0, 1)


def test_a_directory_without_segments_is_where_it_began():
    assert position_of(START, [], START) == 0
    assert position_of(new_id(), [], START) is None


def test_two_processes_that_do_the_same_make_two_commits():
    assert commit_after(START, "dense", [], "1") != commit_after(START, "dense", [], "2")


def test_a_manifest_knows_its_ancestors_so_far_back_and_pinned_ones_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest_module, "ANCESTORS_KEPT", 3)
    (tmp_path / "dense").mkdir()
    manifest = Manifest(tmp_path / "dense", store_id=START)
    commits = []
    for number in range(1, 9):
        manifest.commit((record(number, "dense"),))
        commits.append(manifest.commit_id)
        if number == 2:
            manifest.pinned = frozenset({commits[0]})
    again = Manifest(tmp_path / "dense", store_id=START)
    assert again.ancestors == (commits[0], *commits[-4:-1])
    assert [again.descends_from(commit) for commit in commits] == [True, *[False] * 3, *[True] * 4]
    assert not again.descends_from(new_id())


def test_a_commit_in_doubt_is_no_ancestor(tmp_path, monkeypatch):
    (tmp_path / "dense").mkdir()
    manifest = Manifest(tmp_path / "dense", store_id=START)
    manifest.commit((record(1, "dense"),))
    with monkeypatch.context() as patch:
        patch.setattr("cpr_ext.storage.checksummed_json.sync_directory", _refuse)
        with pytest.raises(OSError, match="5"):
            manifest.commit((record(2, "dense"),))
    in_doubt = Manifest(tmp_path / "dense").commit_id
    manifest.commit((record(3, "dense"),))
    assert in_doubt not in (manifest.commit_id, *manifest.ancestors)


def _refuse(*_):
    raise OSError(5)


def test_identities_are_listed_without_anything_between_them():
    assert split_ids("".join(ids := (new_id(), new_id()))) == ids
