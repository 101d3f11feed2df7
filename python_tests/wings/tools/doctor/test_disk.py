"""Checks of a folder's disk; nothing stays in it."""

import errno
import os

import pytest

from cpr_ext.wings.tools.doctor import disk


@pytest.mark.parametrize(
    ("refused", "status", "words"),
    [
        (None, "ok", "GB free; direct I/O"),
        (errno.EINVAL, "note", "no direct I/O, the page cache"),
        (errno.ENOSPC, "wrong", "cannot be written: No space left on device"),
    ],
)
def test_direct_io_is_tried(tmp_path, monkeypatch, refused, status, words):
    open_file = os.open

    def open_or_refuse(name, flags, *more, **named):
        if flags & os.O_DIRECT:
            if refused is not None:
                raise OSError(refused, os.strerror(refused))
            flags &= ~os.O_DIRECT  # whatever the disk of this test takes
        return open_file(name, flags, *more, **named)

    monkeypatch.setattr(os, "open", open_or_refuse)
    check = disk.check_disk(tmp_path)
    assert (check.status, words in check.found) == (status, True)
    assert bool(check.remedy) == (status != "ok")
    assert list(tmp_path.iterdir()) == []


def test_this_disk_is_tried(tmp_path):
    assert "direct I/O" in disk.check_disk(tmp_path).found
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_wrong(tmp_path):
    (tmp_path / "file").touch()
    for place in ("none", "file"):
        check = disk.check_disk(tmp_path / place)
        assert (check.status, "cannot be written" in check.found) == ("wrong", True)
