"""Groups over hosts, and the parts of a shard."""

import collections
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext.distributed.parity import placement
from cpr_ext.distributed.parity.placement import crowded, hosts_by_count, part_held, place
from cpr_ext.errors import UsageError


@given(st.integers(2, 6), st.integers(1, 6), st.integers(1, 8), st.randoms())
def test_groups_are_of_one_size_and_as_many_hosts_as_can_be(size, count, num_hosts, chance):
    hosts = [chance.randrange(num_hosts) for _ in range(size * count)]
    groups = place(size * count, size, hosts)
    assert sorted(rank for group in groups for rank in group) == list(range(size * count))
    assert {len(group) for group in groups} == {size}
    per_host = collections.Counter(hosts)
    for group in groups:
        for host, used in collections.Counter(hosts[rank] for rank in group).items():
            # At best a host's workers are spread evenly over the groups.
            assert used <= -(-per_host[host] // count) + (per_host[host] % count > 0)
        if max(per_host.values()) <= count:
            assert len({hosts[rank] for rank in group}) == size


def test_workers_of_one_host_are_in_different_groups_or_it_is_named():
    assert place(8, 4, hosts_by_count(8, 2)) == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert place(4, 2, ["a", "a", "b", "b"]) == ((0, 2), (1, 3))
    assert place(4, 4, hosts_by_count(4, 4)) == ((0, 1, 2, 3),)
    assert crowded((0, 2), ["a", "b", "c", "b"]) == {}
    assert crowded((0, 1, 2, 3), list("abab")) == {"a": [0, 2], "b": [1, 3]}
    for world_size, size in ((6, 4), (2, 3), (5, 2)):
        with pytest.raises(UsageError, match=rf"{world_size} workers.*possible here: \["):
            place(world_size, size, range(world_size))
    with pytest.raises(UsageError, match="names 2 hosts"):
        place(4, 2, ["a", "b"])


@given(st.integers(2, 8))
def test_every_member_holds_one_part_of_every_other(size):
    group = tuple(range(10, 10 + size))
    for member in group:
        holders = placement.holders(group, member)
        assert sorted([*holders, member]) == list(group)
        assert [part_held(group, h, member) for h in holders] == list(range(size - 1))


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 9)), min_size=1, max_size=4),
    st.integers(1, 7),
)
def test_parts_are_of_whole_records_and_about_equal(records, parts):
    bounds = placement.cut(records, parts)
    total = sum(rows * words for rows, words in records)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, total, parts + 1)
    assert bounds == sorted(bounds)
    begins, at = {total}, 0
    for rows, words in records:
        begins |= set(range(at, at + rows * words, words))
        at += rows * words
    assert set(bounds) <= begins
    widest = max(words for _, words in records)
    for begin, end in itertools.pairwise(bounds):
        assert end - begin <= -(-total // parts) + widest
