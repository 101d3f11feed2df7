"""What the processes of a job write, line by line, with the rank of who wrote it."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

_MOST_BYTES = 1 << 16
_LINE = re.compile(rb"[^\n\r]*(?:\r\n|[\n\r])")
_writing = threading.Lock()


class Output:
    """Reads what one process writes, in threads of its own.

    Args:
        rank: of its worker; None: it is a spare, and gets one later.
        log_dir: the lines go to ``worker-00003.log`` there, too; those of a spare to ``spare.log``.

    Attributes:
        ends: the descriptors for the process to write to, as its standard output and error.
    """

    def __init__(self, rank: int | None, log_dir: Path | None) -> None:
        self.rank = rank
        self._log_dir = log_dir
        self.ends: list[int] = []
        self._threads: list[threading.Thread] = []
        for target in (sys.stdout, sys.stderr):
            reading, writing = os.pipe()
            self.ends.append(writing)
            thread = threading.Thread(
                target=self._copy, args=(reading, target), name="cpr_ext-output", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def started(self) -> None:
        """Close the ends, which the process has now."""
        for end in self.ends:
            os.close(end)

    def finish(self, seconds: float) -> None:
        """Wait until all is written that the process wrote, which has ended.

        What it has started may write on.
        """
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _copy(self, reading: int, target: TextIO) -> None:
        rest = b""
        with os.fdopen(reading, "rb", buffering=0) as source:
            while content := source.read(_MOST_BYTES):
                rest += content
                lines = _LINE.findall(rest)
                rest = rest[sum(map(len, lines)) :]
                if len(rest) >= _MOST_BYTES:
                    lines, rest = [*lines, rest + b"\n"], b""
                self._write(lines, target)
        if rest:
            self._write([rest + b"\n"], target)

    def _write(self, lines: list[bytes], target: TextIO) -> None:
        prefix = b"[spare] " if self.rank is None else b"[%d] " % self.rank
        with _writing, suppress(OSError, ValueError):  # nobody reads it any more
            target.flush()
            target.buffer.write(b"".join(prefix + line for line in lines))
            target.buffer.flush()
        if self._log_dir is not None and lines:
            name = "spare" if self.rank is None else f"worker-{self.rank:05d}"
            with suppress(OSError), (self._log_dir / f"{name}.log").open("ab") as file:
                file.write(b"".join(lines))
