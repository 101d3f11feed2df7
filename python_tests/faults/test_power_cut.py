"""What the replay takes for possible after a power cut, on logs of a few calls."""

import pytest

from python_tests.faults.interposer import Logged
from python_tests.faults.power_cut import Disk, cuts, fingerprint, ways, write_tree

KEEP = ways(0, 0, 0)


def made(path):
    return Logged("open", path, done=True, argument=1)


def written(path, data, offset=0):
    return Logged("pwrite", path, done=True, argument=offset, data=data)


def synced(path):
    return Logged("fsync", path, done=True)


def renamed(path, target):
    return Logged("rename", path, target, done=True)


def disk_after(*calls):
    disk = Disk()
    for call in calls:
        disk.apply(call)
    return disk


def trees(*calls, draws=60):
    """Every tree found, what is drawn included."""
    disk = disk_after(*calls)
    return [disk.tree(keep) for n in range(draws) for keep in ways(n, 1, 0).values()]


def test_nothing_is_durable_without_a_sync():
    calls = made("f"), written("f", b"abc")
    assert disk_after(*calls).tree(KEEP["nothing"]) == {}
    assert disk_after(*calls).tree(KEEP["all"]) == {"f": b"abc"}


def test_synced_bytes_without_a_synced_entry_are_gone():
    calls = made("f"), written("f", b"abc"), synced("f")
    assert disk_after(*calls).tree(KEEP["nothing"]) == {}
    assert disk_after(*calls, synced(".")).tree(KEEP["nothing"]) == {"f": b"abc"}


def test_a_synced_entry_without_synced_bytes_is_empty_or_zeros_or_whole():
    calls = made("f"), written("f", b"abc"), synced(".")
    assert {tree["f"] for tree in trees(*calls)} == {b"", b"\0\0\0", b"abc"}


def test_blocks_of_a_write_arrive_each_on_its_own():
    data = b"a" * 4096 + b"b" * 4096
    calls = made("f"), synced("f"), synced("."), written("f", data)
    found = {tree["f"] for tree in trees(*calls)}
    assert data in found
    assert b"\0" * 4096 + b"b" * 4096 in found
    assert b"a" * 4096 + b"\0" * 4096 in found


def test_a_rename_is_all_or_nothing():
    old = made("m"), written("m", b"old"), synced("m"), synced(".")
    new = made("t"), written("t", b"new"), synced("t"), renamed("t", "m")
    found = trees(*old, *new)
    assert {tree["m"] for tree in found} == {b"old", b"new"}
    # Renamed, or still there beside the old one, or its entry never arrived.
    assert {(tree["m"], tree.get("t")) for tree in found} == {
        (b"new", None),
        (b"old", b"new"),
        (b"old", None),
    }


def test_a_file_removed_may_still_be_there_until_its_directory_is_synced():
    calls = made("f"), written("f", b"abc"), synced("f"), synced(".")
    calls += (Logged("unlink", "f", done=True),)
    assert {tree.get("f") for tree in trees(*calls)} == {None, b"abc"}
    assert disk_after(*calls, synced(".")).tree(KEEP["nothing"]) == {}


def test_a_directory_that_is_lost_takes_all_with_it():
    calls = Logged("mkdir", "d", done=True), made("d/f"), synced("d/f"), synced("d")
    assert disk_after(*calls).tree(KEEP["nothing"]) == {}
    assert disk_after(*calls, synced(".")).tree(KEEP["nothing"]) == {"d": None, "d/f": b""}


@pytest.mark.parametrize("op", ["truncate", "fallocate"])
def test_a_size_that_was_not_synced_may_be_either(op):
    calls = made("f"), synced("f"), synced("."), Logged(op, "f", done=True, argument=5)
    assert {tree["f"] for tree in trees(*calls)} == {b"", bytes(5)}


def test_calls_that_failed_change_nothing():
    assert disk_after(Logged("mkdir", "d", done=False)).tree(KEEP["all"]) == {}


def test_equal_trees_are_tried_once_per_promise():
    log = [made("f"), Logged("mark"), synced("f"), synced(".")]
    found = list(cuts(log, lambda num_lines: num_lines, reorderings=3))
    tried = [(cut.num_lines, tree) for cut, tree in found if tree is not None]
    assert sorted((n, len(tree)) for n, tree in tried) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_tree_is_written_as_it_is(tmp_path):
    tree = {"d": None, "d/f": b"abc", "e": None}
    write_tree(tree, tmp_path)
    assert (tmp_path / "d/f").read_bytes() == b"abc"
    assert (tmp_path / "e").is_dir()
    assert fingerprint(tree) != fingerprint({**tree, "d/f": b"abd"})
