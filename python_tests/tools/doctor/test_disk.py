"""Checks of a folder's disk; nothing stays in it."""

import pytest

from cpr_ext.tools.doctor import disk
from cpr_ext.tools.maintenance.disk_probe import DiskSpeed

BYTES = 8 << 20


@pytest.mark.parametrize(
    ("speed", "status", "words"),
    [
        (DiskSpeed(400e6, 900e6, BYTES, True), "ok", "direct I/O writes 400 MB/s, reads 900 MB/s"),
        (DiskSpeed(40e6, 900e6, BYTES, True), "note", "writes 40 MB/s"),
        (DiskSpeed(400e6, 900e6, BYTES, False), "note", "no direct I/O"),
    ],
)
def test_speeds_are_judged(tmp_path, monkeypatch, speed, status, words):
    monkeypatch.setattr(disk, "probe_disk", lambda folder, probe_bytes: speed)
    check = disk.check_disk(tmp_path, BYTES)
    assert (check.status, words in check.found) == (status, True)
    assert bool(check.remedy) == (status != "ok")


def test_this_disk_is_measured(tmp_path):
    check = disk.check_disk(tmp_path, BYTES)
    assert check.status in ("ok", "note")
    assert "direct I/O" in check.found
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_wrong(tmp_path):
    (tmp_path / "file").touch()
    for place in ("none", "file"):
        check = disk.check_disk(tmp_path / place, BYTES)
        assert (check.status, "cannot be written" in check.found) == ("wrong", True)


def test_too_little_room_is_wrong(tmp_path):
    check = disk.check_disk(tmp_path, 1 << 60)
    assert (check.status, "make room" in check.remedy) == ("wrong", True)
    assert list(tmp_path.iterdir()) == []
