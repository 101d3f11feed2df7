"""Texts by key, and the answer to those who ask for many of them at once. Lasts as long as a job.

A round of N workers needs N requests for all N values of a group. The answer is made once for all.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from cpr_ext.distributed.rendezvous import wire

MOST_NAMED = 8
Keys = tuple[str, ...]


class _Gathering:
    """Those who wait for the same values."""

    def __init__(self, missing: Iterable[str]) -> None:
        self.missing = set(missing)
        self.is_over = asyncio.Event()
        self.packed = ""


class Values:
    """The notes of one job, and what members of its newest round give each other."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._gatherings: dict[Keys, _Gathering] = {}
        self._of_key: dict[str, list[_Gathering]] = {}

    def write(self, key: str, text: str) -> None:
        """Set a text in place of any that is there."""
        self._texts[key] = text
        for gathering in self._of_key.get(key, ()):
            gathering.packed = ""
            gathering.missing.discard(key)
            if not gathering.missing:
                gathering.is_over.set()

    def read(self, key: str) -> str | None:
        """Return a text; None if there is none."""
        return self._texts.get(key)

    def has(self, keys: Iterable[str]) -> bool:
        """Return whether all these texts are there."""
        return all(key in self._texts for key in keys)

    async def gather(self, keys: Keys, seconds: float) -> dict[str, Any]:
        """Return the texts of all these keys, packed, once they are there.

        If that takes longer than ``seconds``: how many are missing, and some of them.
        """
        gathering = self._gatherings.get(keys)
        if gathering is None:
            gathering = self._begin(keys)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(gathering.is_over.wait(), seconds)
        if gathering.missing:
            missing = [key for key in keys if key in gathering.missing]
            return {"values": None, "missing": missing[:MOST_NAMED], "num_missing": len(missing)}
        if not gathering.packed:
            gathering.packed = wire.pack([self._texts[key] for key in keys])
        return {"values": gathering.packed}

    def forget(self, is_forgotten: Callable[[str], bool]) -> None:
        """Forget texts by their key; who waits for one of them waits no more."""
        for key in [key for key in self._texts if is_forgotten(key)]:
            del self._texts[key]
        for keys in [keys for keys in self._gatherings if any(map(is_forgotten, keys))]:
            self._end(keys)

    def _begin(self, keys: Keys) -> _Gathering:
        gathering = _Gathering(key for key in keys if key not in self._texts)
        if not gathering.missing:
            gathering.is_over.set()
        self._gatherings[keys] = gathering
        for key in keys:
            self._of_key.setdefault(key, []).append(gathering)
        return gathering

    def _end(self, keys: Sequence[str]) -> None:
        gathering = self._gatherings.pop(tuple(keys))
        gathering.missing.update(keys)
        gathering.is_over.set()
        for key in keys:
            self._of_key[key].remove(gathering)
            if not self._of_key[key]:
                del self._of_key[key]
