"""Which samples' effects the rows of each worker lost, each sample counted once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

Span = tuple[int, int]


@dataclass(frozen=True)
class LossAccount:
    """The samples that are in the account already, by worker.

    Rows that were restored lack the samples from the snapshot's to those of the job. When they are
    lost once more before their next snapshot, the same samples are lost again, and count no more.

    Attributes:
        counted: by rank, spans of samples (begin, end], ascending, none touching the next.
    """

    counted: tuple[tuple[Span, ...], ...]

    @classmethod
    def empty(cls, world_size: int) -> LossAccount:
        """Nothing was lost."""
        return cls(((),) * world_size)

    @classmethod
    def from_plain(cls, plain: Sequence[Sequence[Sequence[int]]]) -> LossAccount:
        """Inverse of :meth:`to_plain`."""
        return cls(tuple(tuple((span[0], span[1]) for span in spans) for spans in plain))

    def to_plain(self) -> list[Any]:
        """As JSON values."""
        return [[list(span) for span in spans] for spans in self.counted]

    def add(self, held: Sequence[int], samples: int) -> LossAccount:
        """With rows that hold the effects of ``held[rank]`` samples going on at ``samples``."""
        spans = [(min(own, samples), samples) for own in held]
        return LossAccount(tuple(map(_united, self.counted, spans)))

    def united(self, other: LossAccount) -> LossAccount:
        """With all that the other counts."""
        return LossAccount(
            tuple(
                reduce(_united, more, own)
                for own, more in zip(self.counted, other.counted, strict=True)
            )
        )

    def beyond(self, other: LossAccount) -> tuple[int, ...]:
        """By rank, how many samples more than the other, which is a part of it, this counts."""
        return tuple(
            _size(own) - _size(known)
            for own, known in zip(self.counted, other.counted, strict=True)
        )

    def going_back_to(self, samples: int) -> LossAccount:
        """The account of a job whose later samples are trained again, on rows of that moment."""
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
