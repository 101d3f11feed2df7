"""Builds ``interpose.c``, loads it before everything else, and tells it what to do."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("interpose.c")
_LIBRARY = "CPR_EXT_FAULTS_LIBRARY"

# What can happen to a call: (code in interpose.c, errno, how many calls fail from there on).
FAULTS: dict[str, tuple[int, int, int]] = {
    "kill": (1, 0, 1),
    "torn": (2, 0, 1),  # half of the bytes are written, then the process is killed
    "EIO": (3, errno.EIO, 1),
    "ENOSPC": (3, errno.ENOSPC, 1),
    "full": (3, errno.ENOSPC, 12),  # the disk stays full for a while
    "short": (4, 0, 1),
    "delay": (5, 0, 1),
}
# The same of calls that only read.
READ_FAULTS: dict[str, tuple[int, int, int]] = {
    "EIO": (3, errno.EIO, 1),
    "EACCES": (3, errno.EACCES, 1),
    "EMFILE": (3, errno.EMFILE, 1),
    "ESTALE": (3, errno.ESTALE, 1),
    "short": (4, 0, 1),  # half of the bytes come
    "end": (6, 0, 1),  # none, as if the file ended
}
READ_OPS: dict[str, tuple[str, ...]] = {
    "openr": ("EIO", "EACCES", "EMFILE", "ESTALE"),
    "opendir": ("EIO", "EACCES", "EMFILE"),
    "read": ("EIO", "ESTALE", "short", "end"),
    "pread": ("EIO", "ESTALE", "short", "end"),
    "stat": ("EIO", "EACCES", "ESTALE"),
    "readdir": ("EIO", "ESTALE"),
}
WRITES = ("write", "pwrite")
DEADLY = ("kill", "torn")
# Faults that only some calls can have.
_ONLY = {
    "torn": WRITES,
    "short": WRITES,
    "full": (*WRITES, "open", "fallocate", "mkdir"),
    "delay": ("fsync", "rename", "unlink"),
}


@dataclass(frozen=True)
class Call:
    """A call by its name: what, to which path below the watched directory, the how many-th."""

    op: str
    path: str
    ordinal: int

    def __str__(self) -> str:
        return f"{self.op}:{self.path}:{self.ordinal}"

    @classmethod
    def parse(cls, text: str) -> Call:
        op, path, ordinal = text.split(":")
        return cls(op, path, int(ordinal))


@dataclass(frozen=True)
class Logged:
    """A line of the log: a call, or a mark (op ``mark``)."""

    op: str
    path: str = ""
    target: str = ""
    done: bool = False
    argument: int = 0
    data: bytes = b""


def faults_of(call: Call) -> list[str]:
    """The faults that the call can have."""
    return [fault for fault in FAULTS if call.op in _ONLY.get(fault, (call.op,))]


def calls_of(log: list[Logged]) -> list[Call]:
    """The calls of a log, named."""
    counts: Counter[tuple[str, str]] = Counter()
    calls = []
    for entry in log:
        if entry.op != "mark":
            counts[entry.op, entry.path] += 1
            calls.append(Call(entry.op, entry.path, counts[entry.op, entry.path]))
    return calls


def read_log(directory: Path) -> list[Logged]:
    """What ``Interposer.log_to`` wrote."""
    data = (directory / "data").read_bytes()
    log = []
    for line in (directory / "log").read_text().splitlines():
        if line == "mark":
            log.append(Logged("mark"))
            continue
        op, path, target, done, argument, offset, size = line.split("\t")
        written = data[int(offset) : int(offset) + int(size)] if done == "1" else b""
        log.append(Logged(op, path, target, done == "1", int(argument), written))
    return log


class UnavailableError(Exception):
    """Calls cannot be interposed here; the text says why."""


def build(directory: Path) -> Path:
    """Compile the library into ``directory``.

    Raises:
        UnavailableError: this is not Linux, there is no C compiler, or it refuses.
    """
    if not sys.platform.startswith("linux"):
        raise UnavailableError("LD_PRELOAD as used here needs Linux")
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        raise UnavailableError("no C compiler")
    library = directory / "interpose.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-o", str(library), str(SOURCE)]
    done = subprocess.run([*command, "-ldl", "-pthread"], capture_output=True, text=True)
    if done.returncode != 0:
        raise UnavailableError(f"{compiler} refused {SOURCE.name}: {done.stderr.strip()}")
    return library


def environment(library: Path) -> dict[str, str]:
    """The environment of a process whose calls are to be seen."""
    path = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "LD_PRELOAD": str(library),
        _LIBRARY: str(library),
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "OMP_NUM_THREADS": "1",
    }


class Interposer:
    """The library loaded into this process.

    Raises:
        UnavailableError: it was not loaded before everything else.
    """

    def __init__(self) -> None:
        if _LIBRARY not in os.environ:
            raise UnavailableError("the library was not preloaded")
        self._library = ctypes.CDLL(os.environ[_LIBRARY])

    def watch(self, directory: Path) -> None:
        """See calls below ``directory`` from now on; counts begin anew."""
        self._library.fault_watch(str(directory).encode())

    def plan(self, fault: str, call: Call) -> None:
        """Let ``fault`` happen to ``call``, counted from now on."""
        code, error, repeat = FAULTS[fault]
        path = call.path.encode()
        self._library.fault_plan(code, call.op.encode(), path, call.ordinal, error, repeat)

    def see_reads(self) -> None:
        """See calls that only read, too."""
        self._library.fault_reads(0)

    def plan_read(self, fault: str, call: Call, *, stays: bool) -> None:
        """Let ``fault`` happen to a call that only reads; ``stays``: to all further ones, too."""
        code, error, repeat = READ_FAULTS[fault]
        path = call.path.encode()
        self._library.fault_plan(code, call.op.encode(), path, call.ordinal, error, repeat)
        self._library.fault_reads(int(stays))

    def swallow(self, op: str, suffix: str) -> None:
        """Take all ``op`` on paths that end in ``suffix`` out: they report success, do nothing."""
        self._library.fault_swallow(op.encode(), suffix.encode())

    @property
    def hits(self) -> int:
        """How many calls the fault has happened to."""
        return int(self._library.fault_hits())

    def log_to(self, directory: Path) -> None:
        """Write all calls down, for ``read_log``."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        files = [os.open(directory / name, flags) for name in ("log", "data")]
        self._library.fault_log(*files)

    def mark(self) -> None:
        """Write a mark into the log."""
        self._library.fault_mark()
