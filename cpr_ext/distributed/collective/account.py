"""Which samples' effects the rows of each worker lost, each sample counted once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

Span = tuple[int, int]


@dataclass(frozen=True)
class LossAccount:
    """The lost samples that were counted, by worker.

    Rows that were restored lack the samples from the snapshot's to those of the job. If they
    are lost again before their next snapshot, the same samples do not count again.

    Attributes:
        counted: by rank, spans of samples (begin, end], ascending, none touching the next.
    """

    counted: tuple[tuple[Span, ...], ...]

    @classmethod
    def empty(cls, world_size: int) -> LossAccount:
        """Return the account of a job that lost nothing."""
        return cls(((),) * world_size)

    @classmethod
    def from_plain(cls, plain: Sequence[Any]) -> LossAccount:
        """Invert :meth:`to_plain`."""
        world_size, losses = plain
        counted: list[tuple[Span, ...]] = [()] * world_size
        for rank, *spans in losses:
            counted[rank] = tuple((begin, end) for begin, end in spans)
        return cls(tuple(counted))

    def to_plain(self) -> list[Any]:
        """Return JSON values: of those ranks alone that lost something."""
        losses = [[rank, *map(list, spans)] for rank, spans in enumerate(self.counted) if spans]
        return [len(self.counted), losses]

    def add(self, held: Sequence[int], samples: int) -> LossAccount:
        """Count rows with the effects of ``held[rank]`` samples that resume at ``samples``."""
        spans = [(min(own, samples), samples) for own in held]
        return LossAccount(tuple(map(_united, self.counted, spans)))

    def united(self, other: LossAccount) -> LossAccount:
        """Return an account with the samples of both."""
        return LossAccount(
            tuple(
                reduce(_united, more, own)
                for own, more in zip(self.counted, other.counted, strict=True)
            )
        )

    def beyond(self, other: LossAccount) -> tuple[int, ...]:
        """Return by rank how many more samples this counts than ``other``, a part of it."""
        return tuple(
            _size(own) - _size(known)
            for own, known in zip(self.counted, other.counted, strict=True)
        )

    def going_back_to(self, samples: int) -> LossAccount:
        """Return the account of a job that trains its later samples again, on rows of then."""
        return LossAccount(
            tuple(
                tuple((begin, min(end, samples)) for begin, end in spans if begin < samples)
                for spans in self.counted
            )
        )


def _united(spans: tuple[Span, ...], new: Span) -> tuple[Span, ...]:
    if new[0] >= new[1]:
        return spans
    touching = [span for span in spans if span[0] <= new[1] and new[0] <= span[1]]
    apart = [span for span in spans if span not in touching]
    ends = [new, *touching]
    whole = (min(begin for begin, _ in ends), max(end for _, end in ends))
    return tuple(sorted([*apart, whole]))


def _size(spans: Sequence[Span]) -> int:
    return sum(end - begin for begin, end in spans)
