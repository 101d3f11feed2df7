"""The one probe of a disk's speed writes as snapshots do."""

import errno
import os

import pytest

from cpr_ext.errors import StorageError
from cpr_ext.tools.maintenance.disk_probe import probe_disk

BYTES = 8 << 20


@pytest.fixture
def flags(monkeypatch):
    """The flags of each file that Python opens by ``os.open``."""
    found, real = [], os.open

    def noted(path, flags, *more, **named):
        found.append(flags)
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", noted)
    return found


def test_the_probe_bypasses_the_page_cache_where_snapshots_do(tmp_path, flags):
    speed = probe_disk(tmp_path, probe_bytes=BYTES)
    assert any(flag & os.O_DIRECT for flag in flags)
    assert min(speed.write_bytes_per_second, speed.read_bytes_per_second) > 0
    assert speed.probe_bytes == BYTES
    assert list(tmp_path.iterdir()) == []


def test_where_direct_io_is_refused_the_probe_falls_back_as_snapshots_do(tmp_path, monkeypatch):
    real = os.open

    def refuse(path, flags, *more, **named):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refuse)
    assert not probe_disk(tmp_path, probe_bytes=BYTES).is_direct
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(StorageError, match="none' cannot be probed: No such file"):
        probe_disk(tmp_path / "none", probe_bytes=BYTES)


def test_an_interrupt_while_it_writes_is_not_hidden_by_another_error(tmp_path, monkeypatch):
    def interrupted(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "pwritev", interrupted)
    with pytest.raises(KeyboardInterrupt):
        probe_disk(tmp_path, probe_bytes=BYTES)
    assert not list(tmp_path.iterdir())
