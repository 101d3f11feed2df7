"""Checks of a folder's disk; nothing stays in it."""

import errno
import os

import pytest

from cpr_ext.doctor import disk

BYTES = 8 << 20


def refuse(name, probe_bytes):
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


@pytest.mark.parametrize(
    ("measure", "status", "words"),
    [
        (lambda name, probe_bytes: (400e6, 900e6), "ok", "writes 400 MB/s, reads 900 MB/s"),
        (lambda name, probe_bytes: (40e6, 900e6), "note", "writes 40 MB/s"),
        (refuse, "note", "direct I/O fails: Invalid argument"),
    ],
)
def test_speeds_are_judged(tmp_path, monkeypatch, measure, status, words):
    monkeypatch.setattr(disk, "measure_direct", measure)
    check = disk.check_disk(tmp_path, BYTES)
    assert (check.status, words in check.found) == (status, True)
    assert bool(check.remedy) == (status != "ok")
    assert list(tmp_path.iterdir()) == []


def test_this_disk_is_measured(tmp_path):
    check = disk.check_disk(tmp_path, BYTES)
    assert check.status in ("ok", "note")
    assert "direct I/O" in check.found
    assert list(tmp_path.iterdir()) == []


def test_what_was_written_is_read(tmp_path):
    file = tmp_path / "probe"
    file.touch()
    try:
        speeds = disk.measure_direct(str(file), BYTES)
    except OSError as error:
        pytest.skip(f"no direct I/O here: {error}")
    assert min(speeds) > 0
    assert file.stat().st_size == BYTES


def test_a_folder_that_cannot_be_written_is_wrong(tmp_path):
    check = disk.check_disk(tmp_path / "none", BYTES)
    assert (check.status, "cannot be written" in check.found) == ("wrong", True)


def test_too_little_room_is_wrong(tmp_path):
    check = disk.check_disk(tmp_path, 1 << 60)
    assert (check.status, "make room" in check.remedy) == ("wrong", True)
    assert list(tmp_path.iterdir()) == []
