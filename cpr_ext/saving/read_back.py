"""Reads the first snapshot back once it is committed: what cannot be recovered is found early.

It is read as ``cpr verify`` reads it, block by block, when no snapshot is to be committed, on the
thread that commits them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from cpr_ext.errors import CprError, DamageError
from cpr_ext.recovery.verify import checked_pieces, refusal
from cpr_ext.runtime.log_text import logger_of
from cpr_ext.storage.store import Store
from cpr_ext.storage.store_reader import StoreReader

logger = logger_of("saving")

#: The most of the time of one core that it takes.
SHARE = 0.2


class ReadBack:
    """Reads one committed snapshot; see :meth:`cpr_ext.storage.commit_thread.do_when_idle`.

    Attributes:
        damage: what a recovery would refuse; None: nothing is found so far.
        has_ended: it does nothing more.
    """

    def __init__(self, store: Store) -> None:
        self.damage: str | None = None
        self.has_ended = False
        self._store = store
        self._reader = store.view()
        self._bytes_read = 0
        self._pieces = _pieces(self._reader)

    def advance(self) -> float | None:
        """Read the next block; return for how long to leave the core to others, None: ended."""
        if self.has_ended:
            return None
        started = time.perf_counter()
        try:
            self._bytes_read += next(self._pieces)
            return (time.perf_counter() - started) * (1 / SHARE - 1)
        except StopIteration:
            logger.info("the first snapshot was read back: %.1f MB", self._bytes_read / 1e6)
        except DamageError as error:
            self._note_damage(error)
        except Exception as error:  # no memory, no thread, an error of the system
            logger.info("the first snapshot was not read back: %s", error)
        self.has_ended = True
        return None

    def _note_damage(self, error: DamageError) -> None:
        try:  # files of another store, or of none, say nothing of this one
            self._store.require_in_place()
            is_gone = self._reader.is_gone()
        except (CprError, OSError):
            is_gone = True
        if is_gone:
            logger.info("the first snapshot was not read back: newer ones took its place")
        else:
            self.damage = str(error)

    def finish(self) -> None:
        """Read all of it; on the thread that commits."""
        while self.advance() is not None:
            pass


def _pieces(reader: StoreReader) -> Iterator[int]:
    newest = reader.newest()
    yield from checked_pieces(reader, newest)
    records = reader.manifest.at(newest.snapshot)
    for record in records:
        yield from checked_pieces(reader, record)
    if (reason := refusal(reader, records)) is not None:
        raise DamageError(reason)
