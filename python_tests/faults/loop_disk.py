"""A file system of its own on a loop device, which can be stopped at once as if the power went.

What stops it is ``EXT4_IOC_SHUTDOWN`` without flushing the log: from then on nothing reaches the
device, not even what the file system holds back at that moment; mounted again it replays its
journal. It is what xfstests calls godown. The device itself loses nothing that reached it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import struct
import subprocess
import tempfile
import time
from pathlib import Path

_SHUTDOWN = 0x8004587D  # _IOR('X', 125, __u32)
_WITHOUT_LOG = 2
_NEW_MOUNT_NAMESPACE = 0x00020000
_NEEDED = ("mkfs.ext4", "mount", "umount")
_SIZE_BYTES = 48 << 20
JOURNAL_MODES = ("ordered", "writeback", "journal")


class NoDiskError(Exception):
    """There can be no such disk here; the text says why."""


def enter_own_mounts() -> None:
    """What this process mounts from now on nobody else sees, and it ends with the process.

    Raises:
        NoDiskError: it is not Linux, or not root.
    """
    unshare = getattr(ctypes.CDLL(None, use_errno=True), "unshare", None)
    if unshare is None or os.geteuid() != 0:
        raise NoDiskError("mounting needs Linux and root")
    for tool in _NEEDED:
        if shutil.which(tool) is None:
            raise NoDiskError(f"there is no {tool}")
    if not Path("/dev/loop-control").exists():
        raise NoDiskError("there are no loop devices")
    if unshare(_NEW_MOUNT_NAMESPACE) != 0:
        raise NoDiskError(f"mounts of its own: {os.strerror(ctypes.get_errno())}")
    _run("mount", "--make-rprivate", "/")


class LoopDisk:
    """An empty ext4 in a file of ``directory``, mounted below it until the block ends.

    Args:
        mode: of the journal.

    Raises:
        NoDiskError: there can be none here.
    """

    def __init__(self, directory: Path, mode: str) -> None:
        self._directory = directory
        self._image = directory / "disk"
        self.path = directory / "mounted"
        # Nothing is made durable by itself, neither by a rename nor by the time.
        self._options = f"loop,data={mode},noauto_da_alloc,commit=300"

    def __enter__(self) -> LoopDisk:
        self.path.mkdir()
        with self._image.open("wb") as file:
            file.truncate(_SIZE_BYTES)
        _run("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,nodiscard", str(self._image))
        self._mount()
        return self

    def __exit__(self, *_: object) -> None:
        self._unmount()

    def stop(self) -> None:
        """Let nothing reach the device any more."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            # The file system that this directory is of, and no other, is made useless.
            number = os.fstat(descriptor).st_dev
            device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
            image = (device / "loop" / "backing_file").read_text().strip()
            assert image == str(self._image), f"{self.path} is on {image}"
            fcntl.ioctl(descriptor, _SHUTDOWN, struct.pack("I", _WITHOUT_LOG))
        finally:
            os.close(descriptor)

    def start_again(self) -> None:
        """Mount what is on the device; nobody may have files open there."""
        self._unmount()
        self._mount()

    def _mount(self) -> None:
        _run("mount", "-t", "ext4", "-o", self._options, str(self._image), str(self.path))

    def _unmount(self) -> None:
        for _ in range(100):  # a process that was killed may be giving its files back
            done = subprocess.run(["umount", str(self.path)], capture_output=True, text=True)
            if done.returncode == 0 or "not mounted" in done.stderr:
                return
            time.sleep(0.05)
        raise NoDiskError(f"cannot unmount: {done.stderr.strip()}")


def probe(directory: Path) -> None:
    """Make such a disk, stop it, and look whether it forgot what was not synced.

    Raises:
        NoDiskError: it cannot be made, or forgets nothing.
    """
    with tempfile.TemporaryDirectory(dir=directory) as place:
        with LoopDisk(Path(place), JOURNAL_MODES[0]) as disk:
            kept, lost = disk.path / "kept", disk.path / "lost"
            with kept.open("w") as file:
                file.write("kept")
                file.flush()
                os.fsync(file.fileno())
            lost.write_text("lost")
            try:
                disk.stop()
            except OSError as error:
                raise NoDiskError(f"it cannot be stopped: {error}") from error
            disk.start_again()
            if kept.read_text() != "kept" or lost.exists():
                raise NoDiskError("what was synced is gone, or what was not is there")


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise NoDiskError(f"{command[0]}: {done.stderr.strip()}")
    return done.stdout
